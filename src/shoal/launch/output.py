"""A rank's output as whole lines, whatever it writes and however it writes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

MAX_LINE_BYTES = 64 * 1024
TAIL_LINES = 40


class Lines:
    """Cuts a stream of bytes into lines, and remembers the last ones."""

    def __init__(self, max_bytes: int | None = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = b""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> Iterator[str]:
        """Lines that are complete now. One longer than the limit comes in several pieces."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            for piece in self._cut(line):
                yield self._keep(piece)
        *pieces, self._rest = self._cut(self._rest)
        for piece in pieces:
            yield self._keep(piece)

    def _cut(self, line: bytes) -> list[bytes]:
        step = self._max_bytes or len(line) or 1
        return [line[start : start + step] for start in range(0, len(line) or 1, step)]

    def finish(self) -> Iterator[str]:
        """What was left without an end."""
        if self._rest:
            line, self._rest = self._rest, b""
            yield self._keep(line)

    def _keep(self, line: bytes) -> str:
        text = line.rstrip(b"\r").decode(errors="replace")
        self.tail.append(text)
        return text
