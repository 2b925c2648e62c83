"""What the ranks of a crew tell each other, by the store at which they met: a board of notes.

The store lives in the leader's process. If that is frozen or cut off, torch's client waits for its
answer for ever, whatever timeout it was given; so every question here has a deadline of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from shoal.rendezvous.bounded import bounded
from shoal.rendezvous.store import POLL_S

TURN_S = 0.5
"""How often a rank that waits for what others bring looks for one that has left."""
GRACE_S = 2.0
"""For the answers of a store that does answer, beyond what was to be waited for."""
SILENT = "the store of rank 0 does not answer: timed out"

T = TypeVar("T")


class Left(NamedTuple):
    """A rank that has left with an error."""

    rank: int
    why: str


class HasLeft(Exception):
    """One has left that was waited for."""

    def __init__(self, left: Left) -> None:
        super().__init__(left.why)
        self.left = left


class Roll(NamedTuple):
    """Who is still here."""

    silent: list[int]
    left: Left | None


class Board:
    """Of one crew, seen from one rank. Its methods raise dist.DistError if the store is lost."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._num_exchanged = 0
        self._is_given_up = False
        """A question is still waiting, and others would wait behind it."""

    def exchange(self, note: str, timeout_s: float) -> list[bytes]:
        """What every rank has brought to this exchange. Raises HasLeft."""
        self._num_exchanged += 1
        prefix = f"exchange/{self._num_exchanged}"
        return self._ask(lambda: self._exchange(prefix, note, timeout_s), timeout_s)

    def part_for(self, what: str) -> dist.Store:
        """A part of the store for one purpose. Every rank must ask for the same, in one order."""
        self._num_exchanged += 1
        return dist.PrefixStore(f"{what}/{self._num_exchanged}", self._store)

    def call_the_roll(self, limit_s: float) -> Roll:
        """Who does not answer so soon is silent. Not to the end where one is found to have left."""
        return self._ask(lambda: self._call_the_roll(limit_s), limit_s)

    def leave(self, why: str) -> None:
        """With an error."""
        self._ask(lambda: self._store.set(f"left/{self._rank}", why), 0)

    def wait_until_read(self, limit_s: float) -> None:
        """In the leader, which has left: until all others have looked for why, for so long."""
        deadline = time.monotonic() + limit_s
        others = [f"alive/{rank}" for rank in range(self._size) if rank != self._rank]
        while time.monotonic() < deadline and not self._store.check(others):
            time.sleep(POLL_S)

    def _ask(self, question: Callable[[], T], limit_s: float) -> T:
        silent = dist.DistNetworkError(SILENT)
        if self._is_given_up:
            raise silent
        return bounded(question, limit_s + GRACE_S, silent, self._give_up)

    def _give_up(self) -> None:
        self._is_given_up = True

    def _exchange(self, prefix: str, note: str, timeout_s: float) -> list[bytes]:
        self._store.set(f"{prefix}/{self._rank}", note)
        keys = [f"{prefix}/{rank}" for rank in range(self._size)]
        deadline = time.monotonic() + timeout_s
        while True:
            turn_s = min(deadline - time.monotonic(), TURN_S)
            try:
                self._store.wait(keys, timedelta(seconds=max(turn_s, 0.001)))
                told: list[bytes] = self._store.multi_get(keys)
                return told
            except dist.DistNetworkError:
                raise
            except RuntimeError:  # its turn is over; a file's store has no name for that
                if left := self._one_who_left():
                    raise HasLeft(left) from None
                if turn_s <= 0 or self._is_given_up:
                    raise

    def _call_the_roll(self, limit_s: float) -> Roll:
        self._store.set(f"alive/{self._rank}", "1")
        deadline = time.monotonic() + limit_s
        silent = [rank for rank in range(self._size) if rank != self._rank]
        while silent and time.monotonic() < deadline and not self._is_given_up:
            silent = [rank for rank in silent if not self._store.check([f"alive/{rank}"])]
            if left := self._one_who_left():
                return Roll(silent, left)
            time.sleep(POLL_S)
        return Roll(silent, None)

    def _one_who_left(self) -> Left | None:
        for rank in range(self._size):
            if self._store.check([f"left/{rank}"]):
                return Left(rank, self._store.get(f"left/{rank}").decode())
        return None
