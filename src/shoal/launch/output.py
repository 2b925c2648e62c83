"""A rank's output as whole lines, whatever it writes and however it writes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

MAX_LINE_BYTES = 64 * 1024
TAIL_LINES = 40


class Lines:
    """Cuts a stream of bytes into lines, and remembers the last ones."""

    def __init__(self) -> None:
        self._rest = b""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> Iterator[str]:
        """Lines that are complete now. A line without an end is cut at 64 KiB."""
        self._rest += data
        while True:
            end = self._rest.find(b"\n")
            if end < 0 and len(self._rest) < MAX_LINE_BYTES:
                return
            if end < 0 or end > MAX_LINE_BYTES:
                line, self._rest = self._rest[:MAX_LINE_BYTES], self._rest[MAX_LINE_BYTES:]
            else:
                line, self._rest = self._rest[:end], self._rest[end + 1 :]
            yield self._keep(line)

    def finish(self) -> Iterator[str]:
        """What was left without an end."""
        if self._rest:
            line, self._rest = self._rest, b""
            yield self._keep(line)

    def _keep(self, line: bytes) -> str:
        text = line.rstrip(b"\r").decode(errors="replace")
        self.tail.append(text)
        return text
