"""What links say in their log."""

from __future__ import annotations

import pytest
from processes import until


class Log:
    """The lines of the logger `shoal.wire`, so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    @property
    def lines(self) -> list[str]:
        return [r.getMessage() for r in self._caplog.records if r.name == "shoal.wire"]

    def one(self, *words: str) -> str:
        """Wait for a line: it has these words, and there is no other."""
        until(lambda: self.lines, "a line in the log")
        assert len(self.lines) == 1, self.lines
        for each in words:
            assert each in self.lines[0]
        return self.lines[0]
