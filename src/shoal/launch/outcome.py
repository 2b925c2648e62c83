"""Of several ranks that ended badly, which was the cause? Pure."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import EXIT_FAILED, EXIT_USAGE, PeerLost
from shoal.report import events

PEER_LOST_WORDS = (
    "PeerLost",
    "Connection closed by peer",
    "Connection reset by peer",
    "DistNetworkError",
    "DistBackendError",
)


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    host: str
    pid: int
    return_code: int
    message: str = ""
    """What the rank itself said was wrong."""
    traceback: str = ""
    is_consequence: bool = False
    """It only lost a peer."""

    @property
    def exit_code(self) -> int:
        return self.return_code if self.return_code > 0 else EXIT_FAILED

    @property
    def who(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def how(self) -> str:
        if self.return_code >= 0:
            return f"ended with exit code {self.return_code}"
        try:
            name = signal.Signals(-self.return_code).name
        except ValueError:
            name = f"signal {-self.return_code}"
        hint = {
            "SIGKILL": " (by hand, or by the system when memory runs out)",
            "SIGSEGV": " (a crash in native code)",
        }.get(name, "")
        return f"was killed by {name}{hint}"


def cause_of(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The first that failed on its own account; `ends` in the order they were seen."""
    failed = [end for end in ends if end.return_code != 0]
    return next((end for end in failed if not end.is_consequence), failed[0] if failed else None)


def end_in(rank: int, line: bytes) -> RankEnd | None:
    """What an event says of its rank's failure, if it does."""
    event = events.decode(line)
    if not isinstance(event, events.Failed):
        return None
    return RankEnd(
        rank=rank,
        host=event.host,
        pid=0,
        return_code=event.exit_code,
        message=event.message,
        traceback=event.traceback,
        is_consequence=event.is_consequence,
    )


def is_consequence(stderr_tail: Sequence[str]) -> bool:
    """Whether the last error on a script's stderr is that of a rank that lost a peer.

    Also where the script made an error of its own of it: then both stand there.
    """
    last = next((line for line in reversed(stderr_tail) if line.strip()), "")
    return any(word in last for word in PEER_LOST_WORDS) or any(
        f"{PeerLost.__module__}.{PeerLost.__name__}: " in line for line in stderr_tail
    )


def describe(end: RankEnd) -> str:
    """The paragraph that is shown once."""
    if end.message and not end.traceback and end.return_code == EXIT_USAGE:
        # Nothing is wrong with the rank: what it was asked to do is at fault.
        is_elsewhere = end.host != socket.gethostname()
        found = f", as {end.who} found" if is_elsewhere else ""
        return f"this cannot be run{found}:\n{end.message}"
    text = f"{end.who} {end.how}."
    if end.message and not end.traceback:  # a traceback ends with it
        text += f"\n{end.message}"
    return text
