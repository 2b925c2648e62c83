"""The lab itself: what the tests of `--hosts` and of the doctor take for granted."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import hosts
import psutil
import pytest
from processes import Running, all_gone, until
from ssh_hosts import Lab, SshHost, ssh_lab, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

PORT = 5000
RATE_MBIT = 100
IMPATIENT = ("-o", "ConnectTimeout=1")

RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    size, begun = len(connection.recv(1 << 16)), time.monotonic()
    while piece := connection.recv(1 << 16):
        size += len(piece)
    print(size, time.monotonic() - begun)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[4])) as out:
    out.sendall(bytes(int(sys.argv[3])))
    out.shutdown(socket.SHUT_WR)
    out.recv(1)
"""

Start = Callable[..., Running]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with ssh_lab(
        tmp_path_factory.mktemp("lab"),
        rates={"server": f"{RATE_MBIT}mbit"},
        interfaces={"desktop": "enp3s0"},
        dead_ends={"desktop": "docker0"},
        etc_hosts={"desktop": ["127.0.1.1 desktop.home desktop"]},
    ) as made:
        yield made


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]


def hostname_over_ssh(here: SshHost, there: str, *options: str) -> subprocess.CompletedProcess[str]:
    return here.run("ssh", *options, there, "hostname")


def receiver(start: Start, host: SshHost, port: int = PORT) -> Running:
    running = start(*host.command(*python(RECEIVE, host.address, port)))
    running.until_says("ready")
    return running


def sender(
    here: SshHost, there: SshHost, size: int, *, port: int = PORT, patience_s: float = 10
) -> subprocess.CompletedProcess[str]:
    return here.run(*python(SEND, there.address, port, size, patience_s))


def names(host: SshHost) -> set[str]:
    """Of the programs that run there."""
    found = set()
    for pid in host.processes():
        with suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(pid).name())
    return found


def test_every_host_reaches_every_host_by_name_alone(lab: Lab) -> None:
    for here in lab.hosts:
        for there in lab.hosts:
            done = here.run("ssh", there.name, "hostname; echo ~; pwd")
            home = str(there.home)
            assert (done.stdout.split(), done.stderr) == ([there.name, home, home], "")
    until(lambda: not any(host.processes() for host in lab.hosts), "every session has ended")


def test_a_session_has_a_clean_environment(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the user's, with the user's home; nothing of the tests'."""
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nowhere")
    monkeypatch.setenv("SECRET", "1")
    user = lab["laptop"].run("env").stdout.splitlines()
    assert f"HOME={lab['laptop'].home}" in user
    assert "SECRET=1" in user
    assert not any(line.startswith("SSH_") for line in user)
    session = lab["laptop"].run("ssh", "desktop", "env").stdout.splitlines()
    assert f"HOME={lab['desktop'].home}" in session
    names = {line.split("=")[0] for line in session}
    assert not {"SECRET", "VIRTUAL_ENV", "PYTHONPATH", "SSH_AUTH_SOCK"} & names


@pytest.mark.parametrize("tool", ["scp", "rsync"])
def test_files_can_be_copied(lab: Lab, tool: str) -> None:
    """To the home of that host alone."""
    if shutil.which(tool) is None:
        pytest.skip(f"there is no {tool}")
    (lab["laptop"].home / tool).write_text("hello")
    done = lab["laptop"].run(tool, "-q", tool, "desktop:", cwd=lab["laptop"].home)
    assert (done.returncode, done.stderr) == (0, "")
    assert (lab["desktop"].home / tool).read_text() == "hello"
    assert not (lab["server"].home / tool).exists()


def test_names_and_interfaces_are_those_ordered(lab: Lab) -> None:
    lookup = python("import socket; print(socket.gethostbyname('desktop'))")
    assert lab["desktop"].run(*lookup).stdout.strip() == "127.0.1.1"
    assert lab["laptop"].run(*lookup).stdout.strip() == lab["desktop"].address
    listing = python("import socket; print(*(name for _, name in socket.if_nameindex()))")
    assert set(lab["desktop"].run(*listing).stdout.split()) == {"lo", "enp3s0", "docker0"}
    assert set(lab["laptop"].run(*listing).stdout.split()) == {"lo", "eth0"}
    assert set(lab["desktop"].run("ls", "/sys/class/net").stdout.split()) >= {"enp3s0", "docker0"}


def test_the_dead_end_is_up_and_leads_nowhere(lab: Lab) -> None:
    assert "10.78.0.2" in lab["desktop"].run("ip", "-br", "address", "show", "up").stdout
    done = hostname_over_ssh(lab["desktop"], "10.78.0.1", *IMPATIENT)
    assert done.returncode == 255
    assert "timed out" in done.stderr or "No route to host" in done.stderr


@pytest.mark.parametrize(("here", "there"), [("server", "laptop"), ("laptop", "server")])
def test_a_cable_has_the_speed_ordered(lab: Lab, start: Start, here: str, there: str) -> None:
    def mbit() -> float:
        receiving = receiver(start, lab[there])
        assert sender(lab[here], lab[there], RATE_MBIT * 1_000_000 // 8).returncode == 0
        assert receiving.end() == 0, receiving.said
        size, seconds = map(float, receiving.out.split()[1:])
        return size * 8 / seconds / 1e6

    assert mbit() < 1.2 * RATE_MBIT  # a busy machine can only be slower


def test_other_cables_are_fast(lab: Lab, start: Start) -> None:
    receiving = receiver(start, lab["desktop"])
    assert sender(lab["laptop"], lab["desktop"], 50_000_000).returncode == 0
    assert receiving.end() == 0, receiving.said
    size, seconds = map(float, receiving.out.split()[1:])
    assert size * 8 / seconds / 1e6 > 2 * RATE_MBIT


def test_a_blocked_port(lab: Lab, start: Start) -> None:
    laptop, desktop = lab["laptop"], lab["desktop"]
    receiving = receiver(start, desktop)
    desktop.block_port(f"{PORT - 5}-{PORT + 5}")
    done = sender(laptop, desktop, 1, patience_s=0.5)
    assert "TimeoutError" in done.stderr
    assert hostname_over_ssh(laptop, "desktop").stdout == "desktop\n"
    desktop.unblock_ports()
    desktop.block_port(PORT, silently=False)
    begun = time.monotonic()
    assert "No route to host" in sender(laptop, desktop, 1, patience_s=60).stderr
    assert time.monotonic() - begun < 30
    desktop.unblock_ports()
    assert sender(laptop, desktop, 1).returncode == 0
    assert receiving.end() == 0


def test_a_blocked_port_is_blocked_from_outside_only(lab: Lab, start: Start) -> None:
    laptop, desktop = lab["laptop"], lab["desktop"]
    desktop.block_port(PORT)
    for here, there in ((desktop, desktop), (desktop, laptop)):
        receiving = receiver(start, there)
        assert sender(here, there, 1).returncode == 0
        assert receiving.end() == 0
    desktop.unblock_ports()


def test_large_packets_that_are_lost(lab: Lab, start: Start) -> None:
    desktop, laptop = lab["desktop"], lab["laptop"]
    desktop.lose_packets_above(1400)
    for size, arrives in ((1000, True), (10_000, False)):
        receiving = receiver(start, laptop, PORT + size)
        done = sender(desktop, laptop, size, port=PORT + size, patience_s=1)
        assert (done.returncode == 0) == arrives, done.stderr
        receiving.kill()
    desktop.lose_packets_above(1500)
    receiving = receiver(start, laptop)
    assert sender(desktop, laptop, 10_000).returncode == 0


def test_a_stopped_sshd(lab: Lab) -> None:
    lab["desktop"].stop_sshd()
    done = hostname_over_ssh(lab["laptop"], "desktop")
    assert done.returncode == 255
    assert "Connection refused" in done.stderr
    lab["desktop"].start_sshd()
    assert hostname_over_ssh(lab["laptop"], "desktop").stdout == "desktop\n"


def test_a_host_that_is_cut_off(lab: Lab) -> None:
    lab["desktop"].cut_off()
    done = hostname_over_ssh(lab["laptop"], "desktop", *IMPATIENT)
    assert done.returncode == 255
    assert "timed out" in done.stderr
    lab["desktop"].plug_in()
    assert hostname_over_ssh(lab["laptop"], "desktop").stdout == "desktop\n"


def test_a_connection_survives_a_short_cut(lab: Lab, start: Start) -> None:
    """As with a real cable: neither end is told."""
    wait = "echo begun; until [ -e go ]; do sleep 0.1; done; echo done"
    session = start(*lab["laptop"].command("ssh", "desktop", wait))
    session.until_says("begun")
    lab["desktop"].cut_off()
    (lab["desktop"].home / "go").touch()
    until(lambda: "sleep" not in names(lab["desktop"]), "the other end is done")
    assert "done" not in session.out
    lab["desktop"].plug_in()
    assert session.end() == 0, session.said
    assert "done" in session.out


def test_a_key_that_is_refused(lab: Lab) -> None:
    lab["desktop"].forget_key()
    done = hostname_over_ssh(lab["laptop"], "desktop")
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr
    lab["desktop"].accept_key()
    assert hostname_over_ssh(lab["laptop"], "desktop").stdout == "desktop\n"


def test_processes_are_those_of_one_host(lab: Lab, start: Start) -> None:
    running = start(*lab["laptop"].command("ssh", "desktop", "sleep", "1000"))
    running.until(lambda: "sleep" in names(lab["desktop"]))
    assert lab["laptop"].processes() == [running.process.pid]
    assert lab["server"].processes() == []
    lab["desktop"].end_processes()
    assert lab["desktop"].processes() == []
    assert running.end() == 255
    lab["desktop"].start_sshd()


def ours(owner: int) -> list[str]:
    return [name for name in hosts.namespaces() if name.startswith(f"shoal-{owner}-")]


def visible(folder: Path) -> tuple[list[str], list[tuple[int, str]], list[str]]:
    """What of this process's hosts can be seen on the machine itself."""
    mounts = Path("/proc/mounts").read_text().splitlines()
    signs = (f"shoal-{os.getpid()}-", str(folder))
    mounted = [line for line in mounts if any(sign in line for sign in signs)]
    return ours(os.getpid()), socket.if_nameindex(), mounted


def test_nothing_is_left(tmp_path: Path) -> None:
    """Neither of what is part of it, nor of what was started in it."""
    before = visible(tmp_path)
    with ssh_lab(tmp_path, ("laptop", "desktop")) as lab:
        away = "setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo $!"
        detached = int(lab["laptop"].run("ssh", "desktop", away).stdout)
        assert detached in lab["desktop"].processes()
        daemons = [pid for host in lab.hosts for pid in hosts.processes(host.namespace)]
        running = [psutil.Process(pid) for pid in {detached, *daemons} if psutil.pid_exists(pid)]
        assert len(running) >= 3
        assert socket.if_nameindex() == before[1]
        assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert all_gone(running)
    assert visible(tmp_path) == before


def test_what_a_killed_test_left_is_removed(tmp_path: Path, start: Start) -> None:
    code = f"""
import signal, sys
sys.path[:0] = {[str(Path(__file__).parents[1]), str(Path(__file__).parent)]}
from pathlib import Path
from ssh_hosts import ssh_lab
with ssh_lab(Path({str(tmp_path)!r}), ("laptop", "desktop")) as lab:
    print("built", flush=True)
    signal.pause()
"""
    killed = start(sys.executable, "-c", code)
    killed.until_says("built")
    left = ours(killed.process.pid)
    assert len(left) == 3
    hosts.remove_leftovers()  # whose owner is alive they stay
    assert ours(killed.process.pid) == left
    running = [psutil.Process(pid) for name in left for pid in hosts.processes(name)]
    assert len(running) >= 2
    owner = psutil.Process(killed.process.pid)
    owner.kill()
    until(lambda: owner.status() == psutil.STATUS_ZOMBIE, "nobody has taken note of its end")
    hosts.remove_leftovers()
    # Another test process may have been at it, and not be done.
    until(lambda: ours(killed.process.pid) == [], "what it left is gone")
    assert all_gone([each for each in running if each != owner])
    killed.end()


def test_what_belongs_to_the_earlier_owner_of_an_id_is_removed() -> None:
    own, earlier = hosts.unique_name(), f"shoal-{os.getpid()}-1-0"
    with hosts.namespace(own):
        subprocess.run(["ip", "netns", "add", earlier], check=True, timeout=20)
        hosts.remove_leftovers()
        left = ours(os.getpid())
    assert own in left
    assert earlier not in left
