"""Agents that are lost in the middle of a run: real ones, of this host."""

from __future__ import annotations

import os
import signal

import pytest

from shoal.errors import RunFailed
from shoal.launch import agents as module
from shoal.launch.agents import Agents
from shoal.launch.hosts import Host
from shoal.launch.messages import Line, RankTask, Said, Start

WAIT = "import signal; print('up', flush=True); signal.pause()"
HOSTS = [Host(name="localhost"), Host(name="127.0.0.1")]


def lost_by(monkeypatch: pytest.MonkeyPatch, *signals: int) -> tuple[str, dict[str, str]]:
    """What is told when agents get these signals, once all their ranks are up; and of each."""
    monkeypatch.setattr(module, "ENDING_S", 0.5)
    tasks = [RankTask(rank=n, arguments=["-c", WAIT], environment={}) for n in range(2)]
    starts = [Start(folder="/", ranks=[task], threads="1") for task in tasks]
    up: list[int] = []
    with Agents(HOSTS) as agents:
        pids = [hello.pid for hello in agents.arrivals().values()]

        def strike(host: Host, report: Line | Said) -> None:
            up.append(report.rank)
            for pid, signum in zip(pids, signals, strict=True) if len(up) == 2 else ():
                os.kill(pid, signum)

        with pytest.raises(RunFailed) as caught:
            agents.run(starts, strike)
        return str(caught.value), {name: loss.way for name, loss in agents.lost.items()}


def test_those_that_are_lost_together_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    told, ways = lost_by(monkeypatch, signal.SIGKILL, signal.SIGKILL)
    assert ways == {"localhost": "killed", "127.0.0.1": "killed"}
    for host in HOSTS:
        assert f"{host.name}: its agent was killed" in told


def test_one_that_does_not_end_its_ranks_in_time_is_lost_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its results would be removed there, though nobody has them."""
    told, ways = lost_by(monkeypatch, signal.SIGKILL, signal.SIGSTOP)
    assert ways == {"localhost": "killed", "127.0.0.1": "late"}, "so others tidy up after both"
    assert "127.0.0.1: its ranks did not end within 0.5 s." in told
