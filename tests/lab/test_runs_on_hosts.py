"""`shoal run` and `shoal train` with --hosts: from one host, over its user's own ssh, on all."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from mounts import disk
from processes import PROMPT_S, SHOAL, Running, all_gone, until
from safetensors.torch import load_file
from ssh_hosts import Lab, ssh_lab, why_not

from shoal.launch.agent import secrets_folder
from shoal.version import VERSION

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

HELLO = """
import os, pathlib, socket, sys
print(os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", socket.gethostname(), *sys.argv[1:])
print(pathlib.Path("beside.txt").read_text())
print("cwd", os.getcwd(), file=sys.stderr)
print("threads", os.environ["OMP_NUM_THREADS"])
print("earlier", *pathlib.Path().rglob("earlier.txt"))
(pathlib.Path(os.environ["SHOAL_RESULTS"]) / f"of{os.environ['RANK']}.txt").write_text("kept")
"""
WAIT = """
import os, pathlib, signal, subprocess
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
(pathlib.Path(os.environ["SHOAL_RESULTS"]) / f"of{os.environ['RANK']}.txt").write_text("kept")
print("pids", os.getpid(), child.pid, flush=True)
signal.pause()
"""
FAIL = """
import os, pathlib, sys, time
(pathlib.Path(os.environ["SHOAL_RESULTS"]) / "so far.txt").write_text("kept")
here = pathlib.Path(sys.argv[1])  # which all hosts of the lab share
(here / os.environ["RANK"]).touch()
while os.environ["RANK"] == "1" and len(list(here.iterdir())) < 3:
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    print("about to fail", flush=True)
    sys.exit(7)
time.sleep(1000)
"""
KEEP = """
import os, pathlib
results = pathlib.Path(os.environ["SHOAL_RESULTS"])
for name in ("model.pt", "logs/rank0.log", "server/model.pt"):
    (results / name).parent.mkdir(exist_ok=True)
    (results / name).write_text("of rank " + os.environ["RANK"])
print("said")
"""
ABSENT = """
import os, shoal
if os.environ["RANK"] != "1":
    shoal.join()
"""
FLOOD = """
import os, sys
for number in range(30_000):
    print(number, "x" * (number % 100))
print("\\x1b[2J", flush=True)
sys.stdout.buffer.write(b"\\xff\\r\\n" + b"y" * 200_000)
"""
COUNT = """
import itertools, os, pathlib
(pathlib.Path(os.environ["SHOAL_RESULTS"]) / f"of{os.environ['RANK']}.txt").write_text("kept")
for number in itertools.count():
    print(number)
"""
BOSS = """
import torch, shoal
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
with shoal.Boss("tcp://0.0.0.0:1024", workers=2, wait_s=60) as boss:
    names = sorted(worker.host for worker in boss.status().workers)
    model = boss.place(net, cuts=["2"])
    optimizer = boss.optimizer(torch.optim.SGD, lr=0.1)
    x = torch.randn(5, 4)
    model(x).sum().backward()
    optimizer.step()
    placed = model.state_dict()
net(x).sum().backward()
torch.optim.SGD(net.parameters(), lr=0.1).step()
same = all(torch.equal(placed[name], tensor) for name, tensor in net.state_dict().items())
print(names, "the same" if same else "different")
"""
PLAIN = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
print("rank", dist.get_rank(), "of", dist.get_world_size(), os.environ.get("GLOO_SOCKET_IFNAME"))
"""
CHOICES = """
import shoal
with shoal.join() as crew:
    pass
"""
SYNCS = """
import torch, shoal
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()

def steps(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

x = torch.linspace(-1, 1, 12 * 4, dtype=torch.float64).view(12, 4)
alone = net()
steps(alone, x)
with shoal.join() as crew, crew.link("zmq") as by_zmq, crew.link("dist") as by_dist:
    ways = [(sync, None) for sync in ("all-reduce", "central", "ring", "serial-ring", "ddp")]
    ways += [(sync, link) for sync in ("ring", "serial-ring") for link in (by_zmq, by_dist)]
    for sync, link in ways:
        plain = net()
        model = crew.replicate(plain, sync=sync, link=link)
        steps(model, x.chunk(crew.size)[crew.rank])
        pairs = zip(plain.parameters(), alone.parameters(), strict=True)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs), (sync, link)
        model.close()
    crew.print(f"{len(ways)} ways, all exact, on {crew.size} hosts")
"""
TRAIN = ("--model", "residual-mlp", "--data", "sine", "--epochs", "1", "--batch-size", "512")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk that all hosts see."""
    with disk(tmp_path_factory.mktemp("disks") / "small", SMALL_BYTES) as made:
        yield made


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Iterator[Lab]:
    with ssh_lab(tmp_path_factory.mktemp("lab"), ("laptop", "desktop", "server")) as made:
        yield made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The user's folder on the laptop."""
    folder = tmp_path / "project"
    folder.mkdir()
    scripts = {"hello": HELLO, "wait": WAIT, "fail": FAIL, "flood": FLOOD, "boss": BOSS}
    scripts |= {"syncs": SYNCS, "plain": PLAIN, "choices": CHOICES, "keep": KEEP, "absent": ABSENT}
    scripts |= {"count": COUNT}
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "beside.txt").write_text("this came along")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "old.pyc").write_text("")
    return folder


class Launched(Running):
    """A shoal command that the laptop's user types in the project's folder."""

    def __init__(self, lab: Lab, project: Path, *words: str, **variables: str) -> None:
        own = [f"{name}={value}" for name, value in variables.items()]
        command = lab.command("laptop", "env", "-C", str(project), *own, *SHOAL, *words)
        super().__init__(project.parent / "said", command)


Launch = Callable[..., Launched]


@pytest.fixture
def launch(lab: Lab, project: Path) -> Iterator[Launch]:
    started: list[Launched] = []

    def begin(*words: str, **variables: str) -> Launched:
        started.append(Launched(lab, project, *words, **variables))
        return started[-1]

    yield begin
    for each in started:
        each.kill()


def nothing_is_left(lab: Lab) -> None:
    for host in lab.hosts:
        until(lambda host=host: not host.processes(), f"nothing runs on {host.name}")  # type: ignore[misc]


def folders_on(lab: Lab, *names: str) -> list[Path]:
    """Of runs, in the caches of these hosts."""
    caches = [lab[name].home / ".cache/shoal/runs" for name in names]
    return [folder for cache in caches if cache.exists() for folder in cache.iterdir()]


def run_folder(project: Path) -> Path:
    (folder,) = (project / "runs").iterdir()
    return folder


OUT = "my runs/of [this]"
SMALL_BYTES = 110 * 2**20
"""Of a disk: what a run needs at least, and little more."""


def leave_earlier_results(project: Path) -> None:
    """Of a run whose folder is inside the project; and a file that is none of them."""
    folder = project / OUT / "20260101-120000-hello"
    folder.mkdir(parents=True)
    for each in (folder, project):
        (each / "earlier.txt").write_text("kept")


def test_a_script_on_three_hosts(lab: Lab, launch: Launch, project: Path) -> None:
    words = ("run", "--hosts", "laptop,desktop:2,server", "hello.py", "--its", "own")
    run = launch(*words, OMP_NUM_THREADS="7")
    assert run.end() == 0, run.said
    for rank, host in enumerate(("laptop", "desktop", "desktop", "server")):
        assert f"[{host} {rank}] {rank} of 4 on {host} --its own" in run.out
        assert f"[{host} {rank}] this came along" in run.out
        assert f"[{host} {rank}] threads 7" in run.out
    assert f"[laptop 0] cwd {project}" in run.err
    log = (run_folder(project) / "logs/rank2.log").read_text()
    assert "2 of 4 on desktop" in log
    assert "cwd " in log
    for kept in ("of0.txt", "desktop/of1.txt", "desktop/of2.txt", "server/of3.txt"):
        assert (run_folder(project) / kept).read_text() == "kept"
    nothing_is_left(lab)
    assert folders_on(lab, "desktop", "server") == []


def test_training_led_by_another_host(
    lab: Lab, launch: Launch, project: Path, start: Callable[..., Running]
) -> None:
    """Results come back; the weights are those of ranks on one host."""
    words = ("train", *TRAIN, "--threads", "1")
    run = launch(*words, "--hosts", "desktop,laptop")
    assert run.end() == 0, run.said
    # Not at the same time: to import torch four times is most of it, and each has its limit.
    alone = start(*SHOAL, *words, "--workers", "2", "--out", str(project / "alone"))
    assert alone.end() == 0, alone.said
    folder = run_folder(project)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["hosts"] == ["desktop", "laptop"]
    assert summary["folder"] == f"runs/{folder.name}"
    assert f"kept in runs/{folder.name}" in run.out
    assert (folder / "metrics.jsonl").stat().st_size > 0
    assert {log.name for log in (folder / "logs").iterdir()} == {"rank0.log", "rank1.log"}
    assert not (folder / "laptop").exists(), "its rank left nothing"
    (other,) = (project / "alone").iterdir()
    ours, theirs = (load_file(each / "model.safetensors") for each in (folder, other))
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)
    nothing_is_left(lab)


def test_results_of_the_same_name_are_kept_apart(launch: Launch, project: Path) -> None:
    """The user's own host is one of those that do not lead."""
    run = launch("run", "--hosts", "desktop,server,laptop", "keep.py")
    assert run.end() == 0, run.said
    for rank, kept in enumerate(("model.pt", "server/model.pt", "laptop/model.pt")):
        assert (run_folder(project) / kept).read_text() == f"of rank {rank}"
    assert (run_folder(project) / "logs/rank0.log").read_text() == "said\n", "which is ours"
    for kept in ("logs/rank0.log", "server/model.pt"):
        assert (run_folder(project) / "desktop" / kept).read_text() == "of rank 0"
    assert not (run_folder(project) / "desktop/model.pt").exists()


def test_every_sync_over_both_transports_with_no_keys_by_hand(launch: Launch) -> None:
    run = launch("run", "--hosts", "laptop,desktop,server", "--threads", "1", "syncs.py")
    assert run.end() == 0, run.said
    assert "9 ways, all exact, on 3 hosts" in run.out


def test_stages_on_three_hosts_are_exact(launch: Launch) -> None:
    words = ("--stages", "3", "--transport", "zmq", "--threads", "1", "--verify")
    run = launch("train", *TRAIN, *words, "--hosts", "laptop,desktop,server")
    assert run.end() == 0, run.said
    assert "pass" in run.out


def test_a_rank_that_fails_is_named_and_all_are_ended(
    lab: Lab, launch: Launch, project: Path
) -> None:
    """What others had kept by then comes back."""
    here = project.parent / "here"
    here.mkdir()
    run = launch("run", "--hosts", "laptop,desktop,server", "fail.py", str(here))
    assert run.end() == 7, run.said
    assert "[desktop 1] about to fail" in run.out
    assert "shoal: rank 1 (desktop, pid " in run.err
    assert "ended with exit code 7" in run.err
    assert run.err.endswith(f"of this run is in {run_folder(project).relative_to(project)}\n")
    assert (run_folder(project) / "server" / "so far.txt").read_text() == "kept"
    nothing_is_left(lab)


def test_a_rank_that_ended_well_and_is_waited_for_is_named(lab: Lab, launch: Launch) -> None:
    """Another of its host runs on."""
    run = launch("run", "--hosts", "laptop,desktop:2", "--threads", "1", "absent.py")
    run.until_says("shoal: rank 1 (desktop) has ended with exit code 0, and rank ")
    run.interrupt()
    nothing_is_left(lab)


def waiting(launch: Launch) -> Launched:
    run = launch("run", "--hosts", "laptop,desktop,server", "wait.py")
    run.until(lambda: run.out.count("pids") == 3)
    return run


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c(lab: Lab, launch: Launch, project: Path, signum: int) -> None:
    """What ranks had kept by then comes back, and nothing stays there."""
    run = waiting(launch)
    run.interrupt(signum)
    assert run.process.returncode == 128 + signum, run.said
    folder = run_folder(project).relative_to(project)
    *before, last = run.err.splitlines()
    assert last == f"shoal: what there is of this run is in {folder}"
    assert all(line.startswith("copying ") for line in before), run.err  # on a busy machine
    for kept in ("of0.txt", "desktop/of1.txt", "server/of2.txt"):
        assert (run_folder(project) / kept).read_text() == "kept"
    nothing_is_left(lab)
    assert folders_on(lab, "desktop", "server") == []


def test_ctrl_c_while_ranks_say_more_than_can_be_shown(
    lab: Lab, launch: Launch, project: Path
) -> None:
    """Their logs end somewhere, and have no holes; no agent is taken for one that hangs."""
    run = launch("run", "--hosts", "laptop,desktop,server", "count.py")
    run.until(
        lambda: all(f"[{host.name} {n}] 5000\n" in run.out for n, host in enumerate(lab.hosts))
    )
    run.interrupt()
    assert run.process.returncode == 130, run.err
    folder = run_folder(project).relative_to(project)
    assert run.err.splitlines()[-1] == f"shoal: what there is of this run is in {folder}"
    assert "stays there" not in run.err
    for kept in ("of0.txt", "desktop/of1.txt", "server/of2.txt"):
        assert (run_folder(project) / kept).read_text() == "kept"
    for rank in range(3):
        *lines, _ = (run_folder(project) / f"logs/rank{rank}.log").read_text().split("\n")
        assert lines == [str(number) for number in range(len(lines))]
        assert len(lines) > 5000
    nothing_is_left(lab)
    assert folders_on(lab, "desktop", "server") == []


def test_a_second_ctrl_c_does_not_wait_for_results(lab: Lab, launch: Launch) -> None:
    run = waiting(launch)
    server = lab["server"]
    server.freeze_sshd()
    try:
        run.process.send_signal(signal.SIGINT)
        run.until(lambda: any("server" in words(each)[-2] for each in copying(run)))
        assert run.interrupt() < PROMPT_S
    finally:
        server.thaw_sshd()
    assert run.process.returncode == 130, run.said
    assert "what ranks left, if anything, stays there: desktop:/" in run.err
    nothing_is_left(lab)
    (kept,) = folders_on(lab, "server")
    assert [path.name for path in kept.rglob("*")] == ["results", "of2.txt"]
    assert f"server:{kept}/results" in run.err
    shutil.rmtree(kept)
    for folder in folders_on(lab, "desktop"):  # whose copy may have been ready, or not
        shutil.rmtree(folder)


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() or ["", ""]
    except psutil.NoSuchProcess:
        return ["", ""]


def copying(run: Launched) -> list[psutil.Process]:
    return [each for each in run.family() if words(each)[0] == "rsync"]


def test_a_launcher_that_is_killed_leaves_results_and_nothing_else(
    lab: Lab, launch: Launch
) -> None:
    run = waiting(launch)
    os.kill(run.process.pid, signal.SIGKILL)
    run.end()
    nothing_is_left(lab)
    left = folders_on(lab, "desktop", "server")
    assert [[path.name for path in folder.rglob("*")] for folder in left] == [
        ["results", "of1.txt"],
        ["results", "of2.txt"],
    ]
    for folder in left:
        shutil.rmtree(folder)


def test_a_host_that_is_cut_off_is_named_and_ends_its_ranks(
    lab: Lab, launch: Launch, project: Path
) -> None:
    run = waiting(launch)
    (pids,) = re.findall(r"\[server 2\] pids (\d+) (\d+)", run.out)
    ranks = [psutil.Process(int(pid)) for pid in pids]
    lab["server"].cut_off()
    try:
        assert run.end() == 1, run.said
        assert "shoal: server: the connection to it ended" in run.err
        (kept,) = [folder.name for folder in folders_on(lab, "server")]
        assert f"stays there: server:{lab['server'].home}/.cache/shoal/runs/{kept}/res" in run.err
        assert (run_folder(project) / "desktop/of1.txt").exists(), "others bring theirs"
        until(lambda: all_gone(ranks), "its rank is gone, with what that had started")
    finally:
        lab["server"].plug_in()
    for folder in folders_on(lab, "server"):
        shutil.rmtree(folder)
    for host in lab.hosts[:2]:  # on the server an sshd waits on for packets, as sshd does
        until(lambda host=host: not host.processes(), f"nothing runs on {host.name}")  # type: ignore[misc]


def agent_on(lab: Lab, name: str) -> psutil.Process:
    found = [psutil.Process(pid) for pid in lab[name].processes()]
    (agent,) = [each for each in found if words(each)[-1] == "shoal.launch.agent"]
    return agent


def test_after_an_agent_that_was_killed_another_tidies_up(lab: Lab, launch: Launch) -> None:
    """As the kernel does where memory is short: ranks had children in sessions of their own."""
    run = waiting(launch)
    agent_on(lab, "desktop").kill()
    assert run.end() == 1, run.said
    assert "shoal: desktop: its agent was killed" in run.err
    assert "desktop: what was left of this run there was ended: " in run.err
    nothing_is_left(lab)
    (kept,) = folders_on(lab, "desktop", "server")
    assert [path.name for path in kept.rglob("*")] == ["results", "of1.txt"]
    assert f"stays there: desktop:{kept}/results" in run.err
    shutil.rmtree(kept)


def test_an_agent_that_hangs_is_ended_by_another(lab: Lab, launch: Launch) -> None:
    run = waiting(launch)
    agent_on(lab, "desktop").send_signal(signal.SIGSTOP)
    run.interrupt()
    assert run.process.returncode == 130, run.said
    assert "shoal: desktop: its agent, which answered no more, was ended there, with" in run.err
    nothing_is_left(lab)
    (kept,) = folders_on(lab, "desktop", "server")
    assert [path.name for path in kept.rglob("*")] == ["results", "of1.txt"]
    shutil.rmtree(kept)


def test_a_second_ctrl_c_does_not_wait_for_a_host_that_is_lost(lab: Lab, launch: Launch) -> None:
    """And the command that ends what may be left there is told all the same."""
    run = waiting(launch)
    agent, desktop = agent_on(lab, "desktop"), lab["desktop"]
    desktop.freeze_sshd()
    try:
        before = ssh_to(run, "desktop")
        agent.send_signal(signal.SIGSTOP)
        run.process.send_signal(signal.SIGINT)
        run.until(lambda: ssh_to(run, "desktop") - before)
        assert run.interrupt() < 2 * PROMPT_S  # of the 20 s that another agent has
    finally:
        desktop.thaw_sshd()
    assert run.process.returncode == 130, run.said
    (command,) = re.findall(r"desktop: processes .* may be left there. To end them: (.*)", run.err)
    done = lab["laptop"].run("sh", "-c", command)
    assert done.returncode == 0, done.stderr
    nothing_is_left(lab)
    (name,) = re.findall(r"SHOAL_RUN=(\S+)", command)
    shutil.rmtree(secrets_folder(name))  # which nobody is left to remove, as the docs say
    for folder in folders_on(lab, "desktop", "server"):
        shutil.rmtree(folder)


def ssh_to(run: Launched, name: str) -> set[int]:
    return {each.pid for each in run.family() if words(each)[0] == "ssh" and name in words(each)}


def test_a_copy_is_given_up_and_removed_if_the_agent_is_killed_meanwhile(
    lab: Lab, launch: Launch, project: Path
) -> None:
    tools = project.parent / "tools"
    tools.mkdir()
    on_and_on = f"touch {tools}/copied; exec sleep 1000"
    (tools / "rsync").write_text(f'#!/bin/sh\n{shutil.which("rsync")} "$@"; {on_and_on}\n')
    (tools / "rsync").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    run = launch("run", "--hosts", "laptop,desktop", "hello.py", PATH=path)
    run.until(lambda: (tools / "copied").exists())
    agent_on(lab, "desktop").kill()
    assert run.end() == 1, run.said
    assert "shoal: desktop: its agent was killed" in run.err
    nothing_is_left(lab)
    assert folders_on(lab, "desktop") == []


def test_much_output_and_a_line_without_an_end(launch: Launch, project: Path) -> None:
    run = launch("run", "--hosts", "desktop", "flood.py")
    assert run.end() == 0, run.err
    lines = run.out.splitlines()
    numbers = [int(line.split()[2]) for line in lines if line.split()[2].isdecimal()]
    assert numbers == list(range(30_000))
    assert run.out.count("y") == 200_000
    assert "[desktop 0] \\x1b[2J\n" in run.out, "no screen is cleared"
    log = (run_folder(project) / "logs/rank0.log").read_bytes()
    printed = b"".join(b"%d %s\n" % (n, b"x" * (n % 100)) for n in range(30_000))
    assert log == printed + b"\x1b[2J\n\xff\r\n" + b"y" * 200_000, "the bytes that it wrote"


def test_hosts_that_cannot_be_used_are_told_of(lab: Lab, launch: Launch, project: Path) -> None:
    """Each with a remedy."""
    desktop = lab["desktop"]

    def failed(*hosts: str) -> str:
        run = launch("run", "--hosts", *hosts, "hello.py")
        assert run.end() == 1, run.said
        assert "Traceback" not in run.err
        assert run.out == ""
        assert not (project / "runs").exists()
        return run.err

    desktop.stop_sshd()
    try:
        told = failed("laptop,desktop,printer")
        assert "desktop: ssh desktop failed" in told
        assert "Connection refused" in told
        assert "systemctl" in told
        assert "Could not resolve" in told
        assert "/etc/hosts" in told
    finally:
        desktop.start_sshd()
    desktop.forget_key()
    try:
        assert "Permission denied" in (told := failed("laptop,desktop"))
        assert "ssh-copy-id desktop" in told
    finally:
        desktop.accept_key()

    def failed_with(words: tuple[str, ...], **lines: str) -> str:
        text = "".join(f"[hosts.{name}]\n{line}\n" for name, line in lines.items())
        (project / "hosts.toml").write_text(text)
        run = launch(*words, "--hosts", "hosts.toml", *(["hello.py"] if words == ("run",) else []))
        assert run.end() in (1, 2), run.said
        assert "Traceback" not in run.err
        return run.err

    python = project.parent / "python"
    python.write_text("#!/bin/sh\necho libfoo.so: cannot open >&2\nexit 127\n")
    python.chmod(0o755)
    told = failed_with(("run",), desktop=f'python = "{python}"', server='python = "/nope/python"')
    assert f"desktop: its Python does not start.\n  {python} ended with exit code 127" in told
    assert "libfoo.so: cannot open" in told
    assert "server: the Python that hosts.toml gives for it does not exist there" in told
    told = failed_with(("run",), desktop='folder = "/proc/x"', server='folder = "/proc/y"')
    assert "desktop: no folder for this run can be made in /proc/x (No such file" in told
    assert "server: no folder for this run can be made in /proc/y" in told
    words = ("train", *TRAIN)
    told = failed_with(words, desktop='address = "10.99.0.1"', server='interface = "nix"')
    assert 'desktop: address = "10.99.0.1": is no address of its own' in told
    assert "server: There is no interface 'nix' on server" in told
    words = ("train", "--data", "mnist", "--data-dir", "/nodata", "--threads", "1")
    told = failed_with(words, desktop="")
    assert "rank 0 (desktop, pid " in told
    assert "data folder /nodata: there is no such folder" in told
    nothing_is_left(lab)


def test_workers_of_a_boss_with_keys_that_nobody_made(
    lab: Lab, launch: Launch, project: Path
) -> None:
    """On the devices that the file gives: there is no GPU."""
    lines = [f'[hosts.{name}]\ndevice = "cpu"\n' for name in ("desktop", "server")]
    (project / "hosts.toml").write_text("".join(lines))
    words = ("--boss", ":1024", "--threads", "1", "--device", "cuda")
    workers = launch("worker", "--hosts", "hosts.toml", *words)
    home = lab["laptop"].home / ".config/shoal"
    workers.until(lambda: (home / "authorized_keys").exists())
    python = lab.command("laptop", "env", "-C", str(project), sys.executable, "boss.py")
    boss = Running(project.parent / "boss", python)
    try:
        assert boss.end() == 0, boss.said + workers.said
    finally:
        boss.kill()
    assert "['desktop', 'server'] the same" in boss.out
    workers.until_says("has left")
    workers.interrupt()
    assert (home / "authorized_keys").read_text() == ""
    assert not list(home.glob("*.lock"))
    assert (home / "key").stat().st_mode & 0o777 == 0o600
    nothing_is_left(lab)
    assert folders_on(lab, "desktop", "server") == []


def test_a_file_that_the_hosts_wrote_themselves(launch: Launch, project: Path) -> None:
    made = launch("hosts", "init", "laptop", "desktop:2")
    assert made.end() == 0, made.said
    leave_earlier_results(project)
    script = str(project / "hello.py")
    run = launch("run", "--hosts", "hosts.toml", "--out", OUT, script)
    assert run.end() == 0, run.said
    assert "[desktop 2] 2 of 3 on desktop" in run.out
    for rank in (1, 2):
        assert f"[desktop {rank}] earlier earlier.txt\n" in run.out
    again = launch("hosts", "init", "laptop")
    assert again.end() == 2
    assert "hosts.toml is there already" in again.err


def test_what_the_config_of_ssh_says(lab: Lab, launch: Launch) -> None:
    """Behind a jump host, the desktop sees the server's address where the laptop's is expected."""
    config = lab["laptop"].home / ".ssh/config"
    usual = config.read_text()
    for_logging_in = ["RemoteCommand tmux attach", "PermitLocalCommand yes", "LocalCommand echo in"]
    for_logging_in += ["SessionType none", "StdinNull yes", "ForkAfterAuthentication yes"]
    ours = "\n    ".join(["Host desktop", "ProxyJump server", *for_logging_in])
    config.write_text(f"{ours}\n{usual}")
    try:
        run = launch("run", "--hosts", "laptop,desktop", "plain.py")
        assert run.end() == 0, run.said
        visit = launch("doctor", "--hosts", "laptop,desktop")
        assert visit.end() == 0, visit.said
    finally:
        config.write_text(usual)
    assert "laptop is found at eth0 10.77.0.1 (MTU 1500): it is on the route to" in visit.out


def test_what_a_file_chooses_reaches_scripts(launch: Launch, project: Path) -> None:
    """torch's own, even of one rank; and those of shoal."""
    toml = project / "hosts.toml"
    toml.write_text('[hosts.desktop]\ninterface = "eth0"\ndevice = "cuda"\n')
    run = launch("run", "--hosts", "hosts.toml", "plain.py")
    assert run.end() == 0, run.said
    assert "[desktop 0] rank 0 of 1 eth0" in run.out
    run = launch("run", "--hosts", "hosts.toml", "choices.py")
    assert run.end() == 1, run.said
    assert "torch sees no GPU on desktop" in run.err
    toml.write_text('[hosts.laptop]\n[hosts.desktop]\ninterface = "eth7"\n')
    run = launch("run", "--hosts", "hosts.toml", "plain.py")
    assert run.end() == 1, run.said
    assert "shoal: desktop: There is no interface 'eth7' on desktop." in run.err


def test_shoal_where_there_was_none(lab: Lab, launch: Launch, project: Path) -> None:
    """Without what it needs, which would come over a network that these hosts do not have.

    A host that cannot be reached does not keep it from the others."""
    pip = ("--pip", "--no-deps --no-index")
    (project / "hosts.toml").write_text('[hosts.box]\nssh = "root@desktop"\n[hosts.printer]\n')
    run = launch("hosts", "install", "--hosts", "hosts.toml", *pip)
    assert run.end() == 1, run.said
    assert "shoal: printer: ssh printer failed.\n  ssh: Could not resolve hostname" in run.err
    assert "/etc/hosts" in run.err
    python = lab["desktop"].home / ".local/share/shoal/venv/bin/python"
    (project / "hosts.toml").write_text(f'[hosts.box]\nssh = "root@desktop"\npython = "{python}"\n')
    run = launch("hosts", "install", "box", "--hosts", "hosts.toml", *pip)
    assert run.end() == 0, run.said
    (broken,) = python.parents[1].glob("lib/python*/site-packages/shoal/version.py")
    broken.write_text(f"VERSION = '{VERSION}' of old")
    run = launch("hosts", "install", "box", "--hosts", "hosts.toml", *pip)
    assert run.end() == 0, run.said
    found = lab["desktop"].run(str(python), "-c", "import shoal.version as v; print(v.VERSION)")
    assert found.stdout.split() == [VERSION], found.stderr
    run = launch("run", "--hosts", "desktop", "hello.py")
    code = run.end()
    shutil.rmtree(python.parents[1])  # it comes first there, and lacks what it needs
    assert code == 1, run.said
    assert "Install shoal anew: shoal hosts install desktop" in run.err


def test_an_installation_ends_with_whoever_wants_it(
    lab: Lab, launch: Launch, project: Path
) -> None:
    """pip, here one that is silent for long, would go on for minutes."""
    (project / "python").write_text(f"#!/bin/sh\npwd > {project}/where\nsleep 1000\n")
    (project / "python").chmod(0o755)
    (project / "hosts.toml").write_text(f'[hosts.desktop]\npython = "{project}/python"\n')
    for signum in (signal.SIGINT, signal.SIGKILL):
        run = launch("hosts", "install", "--hosts", "hosts.toml", TMPDIR=str(project))
        run.until(lambda: (project / "where").exists() and (project / "where").read_text())
        run.interrupt(signum)
        nothing_is_left(lab)
        work = Path((project / "where").read_text().strip())
        until(lambda work=work: not work.exists(), "its files are gone")  # type: ignore[misc]
        (project / "where").unlink()


def path_without(folder: Path, *tools: str) -> str:
    """A PATH that has everything but these."""
    folder.mkdir()
    for place in ("/usr/bin", "/bin", "/usr/sbin"):
        for tool in Path(place).iterdir():
            if tool.name not in tools and not os.path.lexists(folder / tool.name):
                (folder / tool.name).symlink_to(tool)
    return f"PATH={folder}"


def test_by_tar_where_there_is_no_rsync(lab: Lab, project: Path) -> None:
    """Nor a gzip."""
    leave_earlier_results(project)
    path = path_without(project.parent / "tools", "rsync", "gzip")
    command = lab.command("laptop", "env", "-C", str(project), path, *SHOAL)
    words = ("run", "--hosts", "desktop", "--out", OUT, "hello.py")
    run = Running(project.parent / "by-tar", [*command, *words])
    assert run.end() == 0, run.said
    assert "[desktop 0] earlier earlier.txt\n" in run.out
    assert "[desktop 0] this came along" in run.out
    (kept,) = (project / OUT).glob("*/of0.txt")
    assert kept.read_text() == "kept"


def test_hosts_that_share_a_folder(lab: Lab, launch: Launch, project: Path) -> None:
    """As homes on a file server are; and one host under two names."""
    shared = project.parent / "shared"
    also = "ssh://root@desktop:22"  # as ssh takes it, and rsync does not
    tables = {"desktop": "desktop", "server": "server", "also": also}
    (project / "hosts.toml").write_text(
        "".join(
            f'[hosts.{name}]\nssh = "{ssh}"\nfolder = "{shared}"\n' for name, ssh in tables.items()
        )
    )
    run = launch("run", "--hosts", "hosts.toml", "--threads", "1", "hello.py")
    assert run.end() == 0, run.said
    assert "[also 2] 2 of 3 on desktop" in run.out
    for kept in ("of0.txt", "server/of1.txt", "also/of2.txt"):
        assert (run_folder(project) / kept).read_text() == "kept"
    until(lambda: list(shared.iterdir()) == [], "the folders are gone")


@pytest.mark.parametrize("tool", ["rsync", "tar"])
def test_code_for_which_there_is_no_room(lab: Lab, project: Path, small: Path, tool: str) -> None:
    with (project / "large").open("wb") as file:
        file.truncate(SMALL_BYTES)
    (project / "hosts.toml").write_text(f'[hosts.laptop]\n[hosts.desktop]\nfolder = "{small}"\n')
    path = path_without(project.parent / "tools", *(["rsync"] if tool == "tar" else []))
    command = lab.command("laptop", "env", "-C", str(project), path, *SHOAL)
    words = ("run", "--hosts", "hosts.toml", "hello.py")
    run = Running(project.parent / "no-room", [*command, *words])
    assert run.end() == 1, run.said
    assert f"shoal: desktop: copying {project} to it failed." in run.err
    if tool == "tar":  # rsync's last words are lost now and then
        assert "No space left on device" in run.err
        assert 'give another folder: in hosts.toml, for desktop: folder = "PATH"' in run.err
    assert "Traceback" not in run.err
    nothing_is_left(lab)
    assert list(small.iterdir()) == []


def test_a_host_that_greets(lab: Lab, launch: Launch) -> None:
    """rsync cannot be used then."""
    greeting = lab["desktop"].home / ".bashrc"
    greeting.write_text("echo welcome\n")
    try:
        run = launch("run", "--hosts", "desktop", "hello.py")
        assert run.end() == 1, run.said
        assert "`ssh desktop true` must print nothing" in run.err
        assert "Traceback" not in run.err
        visit = launch("doctor", "--hosts", "desktop")
        assert visit.end() == 1, visit.said
    finally:
        greeting.unlink()
    assert "✗ desktop, ssh: its shell prints 'welcome' at every login" in visit.out
