"""What goes to one peer over gloo: messages and signs, in order, and what of them has left.

gloo does not tell whether a send is over. But where one has gone to the system in one piece, as
most do, the system tells (`Outflow`), and nobody need wait for it in a thread.
"""

from __future__ import annotations

import operator
import queue
import threading
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch

from shoal.wire import first_piece, front
from shoal.wire.connections import Outflow
from shoal.wire.dist_arrivals import FOR_EVER
from shoal.wire.dist_parts import PIECE_BYTES, Parts, parts_of
from shoal.wire.dist_signs import lent
from shoal.wire.gpu_lane import GpuLane
from shoal.wire.loans import Loan, Loans, is_worth_lending
from shoal.wire.tree import Tree

MOST_UNSEEN = 32
MOST_UNSEEN_BYTES = 64 * 1024
_HAVE_GONE = operator.methodcaller("wait", FOR_EVER)
"""Of works that have, or soon will."""


class Departure:
    """A message or sign on its way."""

    __slots__ = ("bell", "is_over", "pieces", "works")

    def __init__(self, pieces: list[torch.Tensor]) -> None:
        self.pieces = pieces
        """What is sent: memory that is being read."""
        self.works: list[Any] = []
        """One for each that is under way."""
        self.is_over = False
        """It has gone, and its memory is free."""
        self.bell = threading.Lock()
        """Released when it has."""
        self.bell.acquire()

    def finish(self) -> None:
        self.works, self.pieces = [], []
        self.is_over = True
        self.bell.release()


class Departures:
    """To one peer. Whoever begins one holds `lock`; a thread sees them off."""

    def __init__(
        self,
        group: Any,
        other: int,
        packer: front.Packer,
        lane: GpuLane | None,
        outflow: Outflow | None,
        loans: Loans,
    ) -> None:
        """other: the peer's rank within the group of two. outflow: of its connection, if known."""
        self._loans = loans
        self.lock = threading.Lock()
        self.is_torn = False
        """A message was begun and not all of it will go."""
        self._group = group
        self._other = other
        self._packer = packer
        self._lane = lane
        self._outflow = outflow
        self._under_way: queue.SimpleQueue[Departure | None] = queue.SimpleQueue()
        self._unseen: list[Departure] = []
        """What nobody waits for: small messages and signs. The thread is not woken up for each."""
        self._num_begun = self._num_over = 0
        """Of those that were put there, and those that have gone."""
        self._num_messages = 0
        self._said = b""
        """The front of the last message, without its number; whether that of the one before was the
        same."""
        self._is_repeated = False

    def begin(self, tree: Tree, tag: str, least_lent_bytes: int) -> Departure | Loan | None:
        """A message. None: no memory of `tree` is needed any more."""
        head, buffers = self._packer.pack(tree, tag, self._num_messages)
        if (
            self._loans.borrows
            and is_worth_lending(buffers, least_lent_bytes)
            and (loan := self._lend(head, buffers))
        ):
            return loan
        said = front.without_number(head)
        if self._is_repeated and said == self._said and first_piece.may_stand(buffers):
            head = b""  # the other side knows what it would say: it was said twice, and none since
        parts = parts_of(head, buffers)
        departure = self._begin(parts, is_message=True, said=said, is_awaited=bool(buffers))
        return departure if buffers else None

    def _lend(self, head: bytes, buffers: list[front.Memory]) -> Loan | None:
        """What is said of it goes in one piece, or not at all."""
        number = self._num_messages
        loan, offer = self._loans.lend(number, buffers)
        try:
            text = lent(head, offer)
            if len(text) <= first_piece.MOST_IN_ONE_PIECE_BYTES:
                self._begin(parts_of(text, [], is_sign=True), is_message=True)
                return loan
        finally:
            if self._num_messages == number:  # it was not said, and will not be
                self._loans.lent.pop(number, None)
        return None

    def begin_sign(self, text: bytes) -> None:
        self._begin(parts_of(text, [], is_sign=True))

    def end(self) -> None:
        """Nothing comes behind what has begun."""
        self._wake()
        self._under_way.put(None)

    def _begin(
        self,
        parts: Parts,
        *,
        is_message: bool = False,
        said: bytes | None = None,
        is_awaited: bool = False,
    ) -> Departure:
        """said: by a front that the other side will remember."""
        made = Departure([*parts.pieces, *parts.on_gpu])
        places = [[piece] for piece in parts.pieces]
        given_bytes = self._given_bytes(parts)
        gone: list[bool] = []
        try:
            # Not by Python: Ctrl-C, which a script may catch, comes before all of them or behind.
            made.works.extend(map(self._group.send, places, repeat(self._other), parts.tags))
            if self._lane:
                made.works += [self._lane.send(buffer) for buffer in parts.on_gpu]
            if given_bytes is not None and self._has_gone(made.pieces[0], given_bytes):
                gone.extend(map(_HAVE_GONE, made.works))  # not by Python, either
        finally:
            if len(made.works) == len(made.pieces):
                self._num_messages += is_message
                if said is not None:
                    self._said, self._is_repeated = said, said == self._said
                self._has_begun(made, has_gone=bool(gone), is_awaited=is_awaited)
            elif made.works:
                self.is_torn = True
        return made

    def _has_begun(self, departure: Departure, *, has_gone: bool, is_awaited: bool) -> None:
        if has_gone:
            departure.finish()
        else:
            self._num_begun += 1
            self._unseen.append(departure)
            is_much = sum(piece.nbytes for piece in departure.pieces) > MOST_UNSEEN_BYTES
            if is_awaited or is_much or len(self._unseen) >= MOST_UNSEEN:
                self._wake()

    def _given_bytes(self, parts: Parts) -> int | None:
        """To the system so far, where that will tell whether these have gone: one long piece, with
        nothing before it that is still under way. All else that gloo sends is short."""
        is_one = len(parts.pieces) == 1 and not parts.on_gpu
        if not is_one or self._outflow is None or self._num_begun != self._num_over:
            return None
        is_long = parts.pieces[0].nbytes >= first_piece.LEAST_ROOM_BYTES
        return self._outflow.given_bytes() if is_long else None

    def _has_gone(self, piece: torch.Tensor, given_bytes: int) -> bool:
        """given_bytes: before it."""
        assert self._outflow is not None
        now = self._outflow.given_bytes()
        return now is not None and now - given_bytes >= piece.nbytes

    def _wake(self) -> None:
        """Have the thread see off what it has not seen yet."""
        unseen, self._unseen = self._unseen, []
        for departure in unseen:
            self._under_way.put(departure)

    # -- the thread --------------------------------------------------------------------------------

    def see_off(self, idle_s: float) -> Iterator[int | None]:
        """Wait for each to go, the oldest first: the bytes of every piece that has, and 0 for the
        end of a message. None: there was nothing to wait for, for so long. Raises RuntimeError."""
        while True:
            try:
                departure = self._under_way.get(timeout=idle_s)
            except queue.Empty:
                yield None
                with self.lock:
                    self._wake()
                continue
            if departure is None:
                return
            works = list(zip(departure.works, departure.pieces, strict=True))
            if all(piece.nbytes < PIECE_BYTES for _, piece in works):
                works = works[::-1]  # what began last mostly ends last: one wait, not several
            for work, piece in works:
                work.wait(FOR_EVER)
                yield piece.nbytes
            departure.finish()
            self._num_over += 1
            yield 0

    def close(self) -> None:
        """Let go of what gloo has of us."""
        self._group = None
