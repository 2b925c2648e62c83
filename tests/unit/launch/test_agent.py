"""A real agent of this host, at the end of a pipe, without ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest
from mounts import disk
from processes import ENOUGH_S, all_gone, clean_environment, until

from shoal.launch.agent import SILENCE_S, remove
from shoal.launch.descendants import RUN_VARIABLE
from shoal.launch.messages import (
    Clean,
    Done,
    Here,
    Line,
    Order,
    Ping,
    Prepare,
    Prepared,
    RankTask,
    Refused,
    Report,
    Start,
    Stop,
    Sweep,
    Swept,
    encode,
    read_report,
)
from shoal.settings import threads_each

SERVE = "import sys, shoal.launch.agent as a; a.SILENCE_S = {}; sys.exit(a.Agent().serve())"
WAIT = "import time; print('up', flush=True); time.sleep(1000)"
CHILD = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
BLAMED = """
import os, pathlib, sys, time
other = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    other.write_text(str(os.getpid()))
    raise RuntimeError("Connection closed by peer")
while not other.exists() or os.path.exists(f"/proc/{other.read_text()}/exe"):
    time.sleep(0.01)
raise ValueError("my fault")
"""
RUN = f"run-{os.getpid()}"  # to be told from other tests that run meanwhile
LOOK_UP = "import os; print(len(os.listdir(os.environ['SHOAL_CONFIG'])))"
NOBODY = 65534
COUNT = "import itertools\nfor number in itertools.count(): print(number)"
ENDLESS = "print('up', flush=True)\nwhile True: print('x' * 1000)"


Kind = TypeVar("Kind", bound=Report)


class Pipe:
    """An agent, as its launcher has it."""

    def __init__(self, silence_s: float, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE.format(silence_s)],
            env={**clean_environment(), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.expect(Here)

    def tell(self, *orders: Order) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(map(encode, orders)))
        self.process.stdin.flush()

    def expect(self, kind: type[Kind]) -> Kind:
        *_, report = self.until(kind)
        assert isinstance(report, kind)
        return report

    def until(self, kind: type[Report]) -> Iterator[Report]:
        """All that it says, to the first of this kind."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield (report := read_report(line))
            if isinstance(report, kind):
                return
        raise AssertionError(f"it left without {kind.__name__}")

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self) -> int:
        return self.process.wait(ENOUGH_S)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def agent() -> Iterator[Pipe]:
    with closing(Pipe(ENOUGH_S)) as made:
        yield made


@pytest.fixture
def other() -> Iterator[Pipe]:
    with closing(Pipe(ENOUGH_S)) as made:
        yield made
        made.hang_up()
        made.end()


@pytest.fixture
def impatient() -> Iterator[Pipe]:
    """One that does not wait as long for a word."""
    with closing(Pipe(1.0)) as made:
        yield made


def ranks(code: str, count: int = 1, *arguments: str, run: str = "") -> Start:
    words = ["-c", code, *arguments]
    tasks = [RankTask(rank=n, arguments=words, environment={"RANK": str(n)}) for n in range(count)]
    return Start(folder="/", ranks=tasks, threads="1", run=run)


def with_secrets(start: Start, contents: dict[str, str]) -> Start:
    return msgspec.structs.replace(start, secrets=contents)


def prepare(agent: Pipe, folder: Path) -> Prepared:
    agent.tell(Prepare(run=RUN, folder=str(folder), needed_bytes=0, advice="advice"))
    made = agent.expect(Prepared)
    (Path(made.code) / "script.py").touch()
    return made


def test_a_folder_is_made_where_it_was_asked_for(agent: Pipe, tmp_path: Path) -> None:
    agent.tell(Prepare(run="my-run", folder=str(tmp_path / "new"), needed_bytes=1, advice="advice"))
    made = agent.expect(Prepared)
    own = tmp_path / "new/my-run"
    assert made == Prepared(code=str(own / "code"), results=str(own / "results"))
    assert Path(made.results).is_dir()


@pytest.mark.parametrize("folder", ["/proc/x", "/dev/null"])
def test_where_no_folder_can_be_made(agent: Pipe, folder: str) -> None:
    agent.tell(Prepare(run="my-run", folder=folder, needed_bytes=1, advice="advice"))
    reason = agent.expect(Refused).reason
    assert reason.startswith(f"no folder for this run can be made in {folder} (")
    assert reason.endswith("this user may write: advice")


def test_a_project_that_is_not_there(agent: Pipe, tmp_path: Path) -> None:
    """Known before anything is made."""
    prepare = Prepare(
        run=RUN, folder=str(tmp_path / "new"), needed_bytes=1, project="/nix", advice=""
    )
    agent.tell(prepare)
    reason = agent.expect(Refused).reason
    assert "there is no folder /nix" in reason
    assert "Leave --no-sync out" in reason
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_room(agent: Pipe, tmp_path: Path) -> None:
    """Of the folder that was asked for, wherever the cache is."""
    with disk(tmp_path / "small", 2**20) as small:
        agent.tell(Prepare(run="my-run", folder=str(small), needed_bytes=100 * 2**20, advice="x"))
        reason = agent.expect(Refused).reason
        assert list(small.iterdir()) == []
    assert f"1 MiB are free on the disk of {small}, and a run needs 100" in reason


def test_a_launcher_that_says_nothing_is_told_why_its_ranks_ended(impatient: Pipe) -> None:
    """As when it was suspended: it reads that when it goes on."""
    impatient.tell(ranks(WAIT))
    impatient.expect(Line)
    family = impatient.family()
    assert (
        f"heard nothing from this command for {SILENCE_S:g} s" in impatient.expect(Refused).reason
    )
    impatient.end()
    assert all_gone(family)


def test_a_launcher_that_reads_nothing_is_not_waited_for(impatient: Pipe, tmp_path: Path) -> None:
    """All pipes are full by then."""
    prepare(impatient, tmp_path)
    impatient.tell(ranks(ENDLESS))
    impatient.expect(Line)
    family = impatient.family()
    assert family
    impatient.end()
    assert all_gone(family)
    assert list(tmp_path.iterdir()) == []


def test_what_ranks_start_ends_with_them_wherever_it_is(agent: Pipe) -> None:
    agent.tell(ranks(f"{CHILD}; {WAIT}"))
    agent.expect(Line)
    family = agent.family()
    assert len(family) == 2
    agent.tell(Stop())
    assert agent.expect(Done).cause is None
    assert all_gone(family)


def test_what_ranks_said_is_passed_on_whole_though_they_are_ended_at_once(agent: Pipe) -> None:
    """The launcher takes nothing until then: all pipes are full."""
    agent.tell(ranks(COUNT, 2))
    agent.expect(Line)
    family = agent.family()
    until(lambda: all(is_held_up(each) for each in family), "they can say no more")
    agent.tell(Stop())
    until(lambda: all_gone(family), "they are gone")
    said = {0: b"", 1: b""}
    for report in agent.until(Done):
        if isinstance(report, Line):
            said[report.rank] += report.data
    for data in said.values():
        numbers = [int(line) for line in data.split(b"\n")[:-1]]
        assert len(numbers) > 5000
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def is_held_up(process: psutil.Process) -> bool:
    before = process.cpu_times()
    time.sleep(0.1)
    return process.status() == psutil.STATUS_SLEEPING and process.cpu_times() == before


def test_what_ranks_leave_running_is_ended_too(agent: Pipe) -> None:
    agent.tell(ranks(CHILD + "; print('up')"), Ping())
    agent.expect(Done)
    assert agent.family() == []


def test_after_one_that_was_killed_another_tidies_up(
    agent: Pipe, other: Pipe, tmp_path: Path
) -> None:
    """Of that run, and of no other."""
    made = prepare(agent, tmp_path)
    (Path(made.results) / "weights").touch()
    families = []
    for each, run in ((agent, RUN), (other, f"not-{RUN}")):
        each.tell(ranks(f"{CHILD}; {WAIT}", run=run))
        each.expect(Line)
        families.append(each.family())
    killed, others = families
    agent.process.kill()
    agent.end()
    with closing(Pipe(ENOUGH_S)) as heir:
        heir.tell(Sweep(run=RUN, folder=str(tmp_path)))
        assert heir.expect(Swept).ended >= 1
        assert all_gone(killed)
        assert not any(all_gone([process]) for process in others)
        heir.hang_up()
        heir.end()
    assert [path.name for path in tmp_path.rglob("*")] == [RUN, "results", "weights"]


def test_a_copy_that_is_under_way_is_ended_too(agent: Pipe, tmp_path: Path) -> None:
    """sshd keeps it for hours where the cable was cut."""
    prepare(agent, tmp_path)
    copy = subprocess.Popen(["sleep", "1000"], env={**os.environ, RUN_VARIABLE: RUN})
    try:
        agent.hang_up()
        assert agent.end() == 0
        assert copy.wait(0) == -signal.SIGKILL
    finally:
        copy.kill()
        copy.wait()
    assert list(tmp_path.iterdir()) == []


def test_keys_are_removed_even_if_the_launcher_leaves_meanwhile(tmp_path: Path) -> None:
    """As it does when a rank has failed; there are so many that this takes a while."""
    keys = {f"key{number}": "secret" for number in range(3000)}
    with closing(Pipe(ENOUGH_S, TMPDIR=str(tmp_path))) as agent:
        agent.tell(with_secrets(ranks(LOOK_UP, run=RUN), keys))
        assert int(agent.expect(Line).data) == len(keys)
        agent.expect(Done)
        agent.hang_up()
        assert agent.end() == 0
    assert list(tmp_path.iterdir()) == []


def test_keys_of_an_agent_that_was_killed_are_removed_by_another(tmp_path: Path) -> None:
    pipes = (Pipe(ENOUGH_S, TMPDIR=str(tmp_path)) for _ in range(2))
    with closing(next(pipes)) as killed:
        killed.tell(with_secrets(ranks(WAIT, run=RUN), {"key": "secret"}))
        killed.expect(Line)
        assert [path.name for path in tmp_path.rglob("key")] == ["key"]
    with closing(next(pipes)) as heir:
        heir.tell(Sweep(run=RUN, folder=str(tmp_path / "runs")))
        heir.expect(Swept)
        heir.hang_up()
        assert heir.end() == 0
    assert list(tmp_path.iterdir()) == []


def test_one_that_hangs_is_ended_by_another_with_all_that_is_its(tmp_path: Path) -> None:
    pipes = (Pipe(ENOUGH_S, TMPDIR=str(tmp_path)) for _ in range(2))
    with closing(next(pipes)) as frozen:
        prepare(frozen, tmp_path / "runs")
        frozen.tell(with_secrets(ranks(f"{CHILD}; {WAIT}", run=RUN), {"key": "secret"}))
        frozen.expect(Line)
        family = frozen.family()
        frozen.process.send_signal(signal.SIGSTOP)
        with closing(next(pipes)) as heir:
            agent = frozen.process.pid
            heir.tell(Sweep(run=RUN, folder=str(tmp_path / "runs"), agent=agent))
            assert heir.expect(Swept).ended == len(family) == 2
            assert frozen.process.wait(ENOUGH_S) == -signal.SIGKILL
            assert all_gone(family)
            heir.hang_up()
            assert heir.end() == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]


def test_whoever_has_the_number_of_an_agent_now_is_left_alone(agent: Pipe, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as stranger:
        agent.tell(Sweep(run=RUN, folder=str(tmp_path), agent=stranger.pid))
        assert agent.expect(Swept).ended == 0
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize(
    ("ordered", "there", "expected"), [(None, "3", "3"), ("5", "3", "5"), (None, "", None)]
)
def test_threads_are_as_the_user_says_here_or_there_or_shared_out(
    ordered: str | None, there: str, expected: str | None
) -> None:
    with closing(Pipe(ENOUGH_S, OMP_NUM_THREADS=there)) as agent:
        show = "import os; print(os.environ['OMP_NUM_THREADS'])"
        agent.tell(msgspec.structs.replace(ranks(show), threads=ordered))
        assert agent.expect(Line).data.decode().strip() == (expected or str(threads_each(1)))


def test_an_agent_that_still_starts_ranks_hears_that_it_is_alone(agent: Pipe) -> None:
    agent.tell(ranks(WAIT, 200))
    until(lambda: len(agent.family()) > 2, "it has begun")
    family = agent.family()
    agent.hang_up()
    agent.end()
    assert len(family) < 200
    assert all_gone(family)


def test_stopped_before_it_came_to_start(agent: Pipe) -> None:
    agent.tell(Stop(), ranks(WAIT))
    assert agent.expect(Done).cause is None
    assert agent.family() == []


@pytest.mark.parametrize("is_fetched", [False, True])
def test_only_results_that_nobody_has_stay(agent: Pipe, tmp_path: Path, is_fetched: bool) -> None:
    made = prepare(agent, tmp_path)
    (Path(made.results) / "weights").touch()
    if is_fetched:
        agent.tell(Clean())
    agent.hang_up()
    agent.end()
    left = [path.name for path in tmp_path.rglob("*")]
    assert left == ([] if is_fetched else [RUN, "results", "weights"])


def test_without_results_nothing_stays(agent: Pipe, tmp_path: Path) -> None:
    prepare(agent, tmp_path)
    agent.hang_up()
    agent.end()
    assert list(tmp_path.iterdir()) == []


def test_whose_traceback_is_shown_is_left_to_the_launcher(agent: Pipe, tmp_path: Path) -> None:
    agent.tell(ranks(BLAMED, 2, str(tmp_path / "other")))
    lines = []
    while b"peer" not in b"".join(line.data for line in lines):
        lines.append(agent.expect(Line))
    assert {line.rank for line in lines} == {0, 1}
    assert not any(line.is_shown for line in lines)
    cause = agent.expect(Done).cause
    assert cause is not None
    assert cause.rank == 0


def test_folders_that_may_not_be_written_to_are_removed_too(tmp_path: Path) -> None:
    """By a user who must ask; what a link leads to stays as it is."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    for folder in (run / "closed/inner", run / "hidden", outside):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    (run / "link").symlink_to(outside)
    for folder, mode in ((run / "closed/inner", 0o555), (run / "closed", 0o555), (outside, 0o555)):
        folder.chmod(mode)
    (run / "hidden").chmod(0)
    child = os.fork()
    if child == 0:
        try:
            os.chdir(tmp_path)
            if os.geteuid() == 0:  # root need not ask
                for path in (tmp_path, *tmp_path.rglob("*")):
                    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
                os.setuid(NOBODY)
            remove(Path("run"))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert outside.stat().st_mode & 0o777 == 0o555
