"""A rank's output as whole lines, whatever it writes and however it writes it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

MAX_LINE_BYTES = 64 * 1024
TAIL_LINES = 40

_COLOUR = r"\x1b\[[0-9;:]*m"
_CONTROL = re.compile(rf"({_COLOUR})|[\x00-\x08\x0a-\x0c\x0e-\x1f\x7f-\x9f]")
"""Tabs are no harm, and progress bars need to return to the begin of their line."""


class Lines:
    """Cuts a stream of bytes into lines, and remembers the last ones.

    Put together again, they are the bytes that came: each has its end, where it had one.
    """

    def __init__(self, max_bytes: int | None = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = b""
        self._whole: deque[bytes] = deque()
        """Not taken yet."""
        self._last: deque[bytes] = deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> list[str]:
        """The last lines, as they may be shown."""
        return [shown(line) for line in self._last]

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Lines that are complete now. One longer than the limit comes in several pieces."""
        self.add(data)
        return iter(self.take, None)

    def add(self, data: bytes) -> None:
        """To be taken later. Whoever is interrupted meanwhile finds there what is left."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            *pieces, last = self._cut(line)
            self._whole += (*pieces, last + b"\n")
        *pieces, self._rest = self._cut(self._rest)
        self._whole += pieces

    def end(self) -> None:
        """Nothing more is added: what was left without an end is a line too."""
        if self._rest:
            self._whole.append(self._rest)
            self._rest = b""

    def take(self) -> bytes | None:
        """The next one that is complete, if there is one."""
        return self.keep(self._whole.popleft()) if self._whole else None

    def _cut(self, line: bytes) -> list[bytes]:
        step = self._max_bytes or len(line) or 1
        return [line[start : start + step] for start in range(0, len(line) or 1, step)]

    def finish(self) -> Iterator[bytes]:
        """What was left without an end."""
        self.end()
        return iter(self.take, None)

    def keep(self, line: bytes) -> bytes:
        """Remember it as one of the last."""
        self._last.append(line)
        return line


def text_of(line: bytes) -> str:
    """Without its end."""
    return line.removesuffix(b"\n").rstrip(b"\r").decode(errors="replace")


def under(head: str, text: str) -> str:
    """A line behind its head, which stays even if the line begins anew, as progress bars do."""
    return head + text.replace("\r", f"\r{head}")


def shown(line: bytes) -> str:
    """As a terminal may have it that belongs to someone else: colours are let through; what would
    move its cursor, clear its screen or name its window is spelt out."""
    return _CONTROL.sub(lambda found: found[1] or f"\\x{ord(found[0]):02x}", text_of(line))
