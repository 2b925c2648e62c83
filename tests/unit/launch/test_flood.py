"""Ranks that say more than anyone can take, and are stopped: what is kept of it has no hole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ENOUGH_S, SHOAL, clean_environment, until

from shoal.launch import agents as module
from shoal.launch.agents import Agents
from shoal.launch.hosts import Host
from shoal.launch.local import Interrupted, Listener, RankCommand, run_ranks, stop_signals, uncut
from shoal.launch.messages import RankTask, Start
from shoal.launch.on_hosts import Watcher, run_on_hosts

FLOOD = "import itertools\nfor number in itertools.count(): print(number)"
LONG_LINES = "while True: print('x' * 6000, flush=True)"  # a pipe takes those in parts
HERE = Host(name="localhost")
SLOW = """
import sys, time
from shoal.launch.messages import Alive, Done, Here, Line, Start, Stop, encode, read_order
def say(report):
    sys.stdout.buffer.write(encode(report))
    sys.stdout.buffer.flush()
say(Here(host="h", pid=1, python="", python_version="", shoal="", torch="", seen_as="",
         seen_from="", cores=1, has_rsync=False))
for line in sys.stdin.buffer:
    order = read_order(line)
    if isinstance(order, Start):
        say(Line(rank=0, stream="stdout", data=b"up"))
    elif isinstance(order, Stop):
        for _ in range(20):
            say({report})
            time.sleep(0.1)
        say(Done(cause=None, has_results=True))
"""


def numbers_in(data: bytes) -> list[int]:
    """The last line may be cut short."""
    return [int(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def test_of_a_rank_that_a_signal_cut_off_nothing_more_is_passed_on() -> None:
    said: list[bytes] = []

    def on_line(rank: int, stream: str, line: bytes) -> None:
        said.append(line)
        if len(said) == 100:
            os.kill(os.getpid(), signal.SIGTERM)

    argv = [sys.executable, "-S", "-c", FLOOD]
    with pytest.raises(Interrupted):
        run_ranks(
            [RankCommand(rank=0, argv=argv, environment=os.environ)], Listener(on_line=on_line)
        )
    assert numbers_in(b"".join(said)) == list(range(100))


@pytest.mark.parametrize("at", [100, 5000])
def test_a_log_has_all_that_a_rank_said_before_it_was_ended(tmp_path: Path, at: int) -> None:
    """However far the terminal was behind when it was interrupted."""
    shown: list[str] = []

    def on_line(host: Host, rank: int, stream: str, text: str) -> None:
        shown.append(text)
        if len(shown) == at:
            os.kill(os.getpid(), signal.SIGINT)

    task = RankTask(rank=0, arguments=["-S", "-c", FLOOD], environment={})
    with pytest.raises(Interrupted):
        run_on_hosts(
            [HERE], tmp_path, lambda sites, ways: [task], Watcher(on_line),
            project=tmp_path, sync=False, threads=1,
        )  # fmt: skip
    assert shown == [str(number) for number in range(at)]
    numbers = numbers_in((tmp_path / "logs/rank0.log").read_bytes())
    assert len(numbers) >= at
    assert numbers == list(range(len(numbers)))


def test_a_signal_waits_for_what_must_not_be_cut() -> None:
    done = []

    def work() -> None:
        with uncut:
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("in there")
        done.append("after it")

    with stop_signals():
        with pytest.raises(Interrupted):
            work()
        with uncut:  # it is heard once
            pass
    assert done == ["in there"]


@pytest.mark.parametrize(
    ("report", "lost"), [("Line(rank=0, stream='stdout', data=b'x')", []), ("Alive()", ["late"])]
)
def test_an_agent_that_passes_on_what_was_said_is_not_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: str, lost: list[str]
) -> None:
    """So its results are fetched."""
    (tmp_path / "slow_agent.py").write_text(SLOW.replace("{report}", report))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(module.__file__).parents[2]}")
    monkeypatch.setattr(module, "AGENT", "slow_agent")
    monkeypatch.setattr(module, "ENDING_S", 1.0)

    def interrupt(*said: object) -> None:
        if not is_stopped:
            raise Interrupted(signal.SIGINT)

    is_stopped = False
    with Agents([HERE]) as agents:
        agents.arrivals()
        with pytest.raises(Interrupted):
            agents.run([Start(folder="/", ranks=[], threads=None)], interrupt)
        is_stopped = True
        agents.stop()
        assert [loss.way for loss in agents.lost.values()] == lost
        assert agents.with_results == ([] if lost else [HERE])


def test_what_is_told_after_ctrl_c_begins_a_line(tmp_path: Path) -> None:
    (tmp_path / "flood.py").write_text(LONG_LINES)

    def kept() -> int:
        return sum(log.stat().st_size for log in tmp_path.glob("runs/*/logs/rank0.log"))

    def is_held_up() -> bool:
        before = kept()
        time.sleep(0.3)
        return 0 < before == kept()

    with subprocess.Popen(
        [*SHOAL, "run", "--hosts", "localhost", "flood.py"],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as run:
        until(is_held_up, "nobody reads, and the pipe is full")
        run.send_signal(signal.SIGINT)
        said, _ = run.communicate(timeout=ENOUGH_S)
    assert run.returncode == 130, said
    assert b"\nshoal: what there is of this run is in " in said
