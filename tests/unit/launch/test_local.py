"""Ranks as processes of this host: whose traceback is shown."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from shoal.launch import local
from shoal.launch.local import Listener, RankCommand, run_ranks

ECHO = """
import os, signal, sys
from pathlib import Path
os.write(2, b"Traceback (most recent call last):\\nshoal.errors.PeerLost: rank 1 has left\\n")
Path(sys.argv[1]).touch()
signal.pause()
"""
CAUSE = """
import sys, time
from pathlib import Path
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
raise ValueError("enough")
"""


def test_a_rank_that_lost_a_peer_and_is_slow_to_end_is_not_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy host its process took more than a second to go, and its traceback came first."""
    monkeypatch.setattr(local, "TRACEBACK_HOLD_S", 0.0)
    commands = [
        RankCommand(
            rank=rank,
            argv=[sys.executable, "-S", "-c", script, str(tmp_path / "said")],
            environment=os.environ,
        )
        for rank, script in enumerate((ECHO, CAUSE))
    ]
    shown: list[tuple[int, bytes]] = []
    hidden: list[tuple[int, bytes]] = []
    cause = run_ranks(
        commands,
        Listener(
            on_line=lambda rank, stream, line: shown.append((rank, line)),
            on_hidden=lambda rank, line: hidden.append((rank, line)),
        ),
    )
    assert cause is not None
    assert cause.rank == 1
    assert {rank for rank, _ in shown} == {1}
    assert shown[-1] == (1, b"ValueError: enough\n")
    assert hidden[-1] == (0, b"shoal.errors.PeerLost: rank 1 has left\n")
