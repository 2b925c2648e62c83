"""Two good ranks that talk with each other all the while, whatever a third one does."""

from __future__ import annotations

import threading

import torch
from processes import until

from shoal.closing import Closing
from shoal.errors import ShoalError
from shoal.wire.link import Link

TAG = "chat"
LARGE = torch.arange(700_000, dtype=torch.float64)  # cut into pieces by every transport
ROUNDS = 12
"""Of them one is large."""


class Chat(Closing):
    """A thread at each end: `first` says a number, `second` gives it back."""

    def __init__(self, first: Link, second: Link) -> None:
        self._ends = first, second
        self._count = 0
        self._ending = False
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(talk,), daemon=True)
            for talk in (self._ask, self._answer)
        ]
        for thread in self._threads:
            thread.start()

    def goes_on(self) -> None:
        """Return when enough messages have gone each way from now on."""
        begun = self._count

        def enough() -> bool:
            if self._error is not None:
                raise AssertionError("the good ranks were disturbed") from self._error
            return self._count >= begun + ROUNDS

        until(enough, "the good ranks go on talking")

    def close(self) -> None:
        self._ending = True
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def _guarded(self, talk) -> None:
        try:
            talk()
        except (ShoalError, AssertionError, RuntimeError, MemoryError) as error:
            self._error = error

    def _ask(self) -> None:
        link, peer = self._ends[0], self._ends[1].rank
        while not self._ending:
            what = LARGE if self._count % ROUNDS == 0 else torch.tensor(self._count)
            link.send(what, to=peer, tag=TAG)
            assert torch.equal(link.recv(peer, tag=TAG), what)
            self._count += 1
        link.send(None, to=peer, tag=TAG)

    def _answer(self) -> None:
        link, peer = self._ends[1], self._ends[0].rank
        while (what := link.recv(peer, tag=TAG)) is not None:
            link.send(what, to=peer, tag=TAG)
