"""Ranks as processes of this host: whose traceback is shown, and that all of them end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from processes import ENOUGH_S, until

from shoal.launch import local
from shoal.launch.local import Interrupted, Listener, RankCommand, run_ranks

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

STUBBORN = """
import os, signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
os.write(1, b"%d\\n" % child.pid)
signal.pause()
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


@pytest.mark.parametrize("lives_on", [True, False])
def test_what_a_rank_has_logged_is_shown_when_another_fails(tmp_path: Path, lives_on: bool) -> None:
    """It was held, as a traceback may be the rank's last words, and then not shown at all."""
    logs = ECHO.replace(
        "shoal.errors.PeerLost: rank 1 has left", "ValueError: never mind\\nand so on"
    )
    scripts = (logs if lives_on else logs.replace("signal.pause()", ""), CAUSE)
    commands = [
        RankCommand(
            rank=rank,
            argv=[sys.executable, "-S", "-c", script, str(tmp_path / "said")],
            environment=os.environ,
        )
        for rank, script in enumerate(scripts)
    ]
    shown: list[bytes] = []
    cause = run_ranks(commands, Listener(on_line=lambda rank, stream, line: shown.append(line)))
    assert cause is not None
    assert cause.rank == 1
    assert {b"ValueError: never mind\n", b"and so on\n", b"ValueError: enough\n"} <= set(shown)


def test_what_ranks_started_ends_even_if_a_signal_follows_an_error() -> None:
    """As on a host whose launcher was killed: the pipe breaks under what ranks say, and the same
    moment somebody notices that nobody is there any more."""
    children: list[int] = []

    def on_line(rank: int, stream: str, line: bytes) -> None:
        children.append(int(line))
        # While the rank, which does not mind, is given time to end.
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        raise BrokenPipeError

    command = RankCommand(
        rank=0, argv=[sys.executable, "-S", "-c", STUBBORN], environment=os.environ
    )
    with pytest.raises(BrokenPipeError):
        run_ranks([command], Listener(on_line=on_line))
    until(lambda: not psutil.pid_exists(children[0]), "what the rank started has ended")


ENDLESS = f"""
import os, signal
os.write(2, b"Traceback (most recent call last):\\n" + b"more\\n" * {local.HELD_LINES})
signal.pause()
"""


def test_what_begins_like_a_traceback_and_does_not_end_is_not_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that went on and on had millions of lines held, and Ctrl-C waited for all of them."""
    monkeypatch.setattr(local, "TRACEBACK_HOLD_S", ENOUGH_S)
    argv = [sys.executable, "-S", "-c", ENDLESS]
    shown: list[bytes] = []
    deadline = time.monotonic() + ENOUGH_S / 2
    listener = Listener(
        on_line=lambda rank, stream, line: shown.append(line),
        is_stopped=lambda: len(shown) > local.HELD_LINES or time.monotonic() > deadline,
    )
    with pytest.raises(Interrupted):
        run_ranks([RankCommand(rank=0, argv=argv, environment=os.environ)], listener)
    assert len(shown) == local.HELD_LINES + 1
