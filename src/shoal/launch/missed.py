"""Ranks that ended well while others wait to meet them. Only the launcher knows both."""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal.report import events

SURE_S = 2.0
"""So long after a rank has ended, nobody's word that it waits is from before: what ranks of several
hosts say comes in any order."""


class Missed:
    """Tells of each, once. It is no error: what a rank has started may join in its place."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._ended: dict[int, tuple[str, float]] = {}
        """By rank: its host, and when."""

    def note_end(self, rank: int, host: str) -> None:
        """Of a rank, with exit code 0."""
        self._ended[rank] = host, time.monotonic()

    def note_event(self, rank: int, line: bytes) -> None:
        """Of a rank that waits: one each second."""
        if not self._ended:
            return
        event = events.decode(line)
        if not isinstance(event, events.Waiting) or not event.text:
            return
        for each, (host, ended_at) in list(self._ended.items()):
            if time.monotonic() - ended_at > SURE_S:
                del self._ended[each]
                self._tell(
                    f"rank {each} ({host}) has ended with exit code 0, and rank {rank} still waits "
                    "to meet it. Did its script end before shoal.join()?"
                )
