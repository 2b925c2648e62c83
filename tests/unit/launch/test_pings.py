"""Agents hear that their launcher is there, whatever it is busy with."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import until

from shoal.launch import agents as module
from shoal.launch.agents import Agents
from shoal.launch.hosts import Host
from shoal.launch.messages import Line, RankTask, Said, Start

FAKE = """
import sys
from pathlib import Path
from shoal.launch.messages import Done, Here, Line, Ping, Start, encode, read_order
def say(report):
    sys.stdout.buffer.write(encode(report))
    sys.stdout.buffer.flush()
say(Here(host="h", pid=1, python="", python_version="", shoal="", torch="", seen_as="",
         seen_from="", cores=1, has_rsync=False))
heard = None
for line in sys.stdin.buffer:
    order = read_order(line)
    if isinstance(order, Start):
        rank = order.ranks[0].rank
        heard = Path(order.folder) / str(rank)
        if rank == 0:
            say(Done(cause=None))
    elif isinstance(order, Ping) and heard is not None:
        with heard.open("a") as file:
            file.write(".")
        if rank == 1 and heard.stat().st_size == 3:  # the other is done by now
            say(Line(rank=1, stream="stdout", data=b"hello"))
            say(Done(cause=None))
"""


def test_while_it_is_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a terminal, say; and those that are done hear it too."""
    (tmp_path / "fake_agent.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(module.__file__).parents[2]}")
    monkeypatch.setattr(module, "AGENT", "fake_agent")
    monkeypatch.setattr(module, "PING_S", 0.05)
    folder = tmp_path / "heard"
    folder.mkdir()

    def heard(rank: int) -> int:
        path = folder / str(rank)
        return path.stat().st_size if path.exists() else 0

    def hold_up(host: Host, report: Line | Said) -> None:
        before = heard(0), heard(1)
        until(lambda: heard(0) > before[0] + 2 and heard(1) > before[1] + 2, "both hear of us")

    starts = [
        Start(
            folder=str(folder),
            ranks=[RankTask(rank=rank, arguments=[], environment={})],
            threads="1",
        )
        for rank in range(2)
    ]
    with Agents([Host(name="localhost"), Host(name="127.0.0.1")]) as agents:
        agents.arrivals()
        assert agents.run(starts, hold_up) is None
