"""What a stage did when, so that its idle share can be seen and compared with the formula."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

WORK = ("forward", "backward", "weights", "update")
"""Kinds of spans in which something is computed."""


class Span(NamedTuple):
    """A stretch of time."""

    kind: str
    """`forward`, `backward`, `weights`, `wait`, `send`, `update`."""
    micro_batch: int
    """-1 where it belongs to none."""
    begun_s: float
    ended_s: float


class Timeline:
    """The spans of the last steps; sums of all."""

    def __init__(self, num_kept: int = 10_000) -> None:
        self.spans: list[Span] = []
        self.seconds: dict[str, float] = {}
        self._num_kept = num_kept

    @property
    def busy_s(self) -> float:
        """At work, so far."""
        return sum(self.seconds.get(kind, 0.0) for kind in WORK)

    @property
    def waited_s(self) -> float:
        """For others, so far."""
        return self.seconds.get("wait", 0.0) + self.seconds.get("send", 0.0)

    @contextmanager
    def span(self, kind: str, micro_batch: int = -1) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            if len(self.spans) >= self._num_kept:
                del self.spans[: max(1, self._num_kept // 2)]
            self.spans.append(Span(kind, micro_batch, begun, ended))
            self.seconds[kind] = self.seconds.get(kind, 0.0) + ended - begun
