"""What is lent between two ranks of one host, whatever transport carries the words about it.

    lender     [lent, front, offer] ─────────>    borrower, which reads it and delivers the message
               <───────── [taken, its number]

An offer is the addresses of the large buffers. How they are read, and what a seal is: lending.py.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from dataclasses import dataclass, field

import torch

from shoal.errors import ShoalError, WireError
from shoal.wire import lending
from shoal.wire.arrival import Arrival
from shoal.wire.front import Memory
from shoal.wire.lending import MOST_BYTES, Lender, TakenBack, is_readable
from shoal.wire.link import Job, not_taken
from shoal.wire.terms import seconds
from shoal.wire.tree import Tree

LEAST_BYTES = 256 * 1024
"""Less is sent in less time than it takes to say where it lies, and that it was taken."""

_ADDRESS = _NUMBER = struct.Struct("<Q")


def is_worth_lending(buffers: list[Memory], least_bytes: int | None = LEAST_BYTES) -> bool:
    """Less is sent, by two messages less; and so is more, which would take its time at once.

    least_bytes: None: nothing is worth it.
    """
    if least_bytes is None:
        return False
    size = sum(int(buffer.nbytes) for buffer in buffers)
    return least_bytes <= size <= MOST_BYTES and _lies_where_it_can_be_read(buffers)


def _lies_where_it_can_be_read(buffers: list[Memory]) -> bool:
    """Not so what CUDA's driver has mapped (pinned memory): no other process gets at it."""
    if not torch.cuda.is_initialized():
        return True
    return all(lending.can_be_read(buffer.ctypes.data) for buffer in buffers)


@dataclass
class Loan:
    """A message that was lent."""

    memory: list[Memory]
    is_taken: bool = False
    is_over: bool = False
    """It was taken, or taken back."""

    def end(self, *, is_taken: bool) -> None:
        self.memory = []
        self.is_taken = is_taken
        self.is_over = True


@dataclass
class Loans:
    """Between this rank and one other."""

    rank: int
    lender: Lender | None = None
    """Where the other lends memory that can be read here."""
    borrows: bool = False
    """Whether the other can read what is lent to it."""
    lent: dict[int, Loan] = field(default_factory=dict)
    """By number of the message: what it has not taken yet."""

    def lend(self, number: int, buffers: list[Memory]) -> tuple[Loan, bytes]:
        """What stands for it here, and the offer."""
        loan = self.lent[number] = Loan(buffers)
        return loan, b"".join(_ADDRESS.pack(buffer.ctypes.data) for buffer in buffers)

    def has_taken(self, number: bytes) -> None:
        """The message of that number, if it was lent."""
        if len(number) != _NUMBER.size:
            raise WireError(f"{len(number)} bytes came where {_NUMBER.size} were announced")
        (count,) = _NUMBER.unpack(number)
        if loan := self.lent.pop(count, None):
            loan.end(is_taken=True)

    def take_back(self) -> None:
        """All that was lent and not taken. Its seal must have been broken before."""
        loans = list(self.lent.values())
        self.lent.clear()
        for loan in loans:
            loan.end(is_taken=False)

    def borrow(self, arrival: Arrival, offer: bytes | memoryview) -> bool:
        """Fill an arrival with what lies there. False: it was taken back."""
        if self.lender is None:
            raise WireError("it lends what nobody can borrow")
        behind = arrival.front.behind
        if len(offer) != _ADDRESS.size * len(behind):
            due = _ADDRESS.size * len(behind)
            raise WireError(f"{len(offer)} bytes came where {due} were announced")
        places = [arrival.room(slot) for slot in behind]
        try:
            addresses = [at for (at,) in _ADDRESS.iter_unpack(offer)]
            lending.read(self.lender, self.rank, addresses, places)
        except TakenBack as error:
            if is_readable(self.lender, self.rank):
                raise WireError("it lent memory that it does not have") from error
            return False
        return True


def receipt(number: int) -> bytes:
    """For the message of that number; see `has_taken`."""
    return _NUMBER.pack(number)


class LendJob(Job):
    """Done when the other side has taken what was lent to it."""

    __slots__ = ("_loan", "_name", "_timeout_s")

    def __init__(self, loan: Loan, name: str, timeout_s: float) -> None:
        """name: of the other side. timeout_s: of waits that are not told otherwise."""
        self._loan = loan
        self._name = name
        self._timeout_s = timeout_s

    @property
    def is_over(self) -> bool:
        return self._loan.is_over

    def done(self) -> bool:
        return self._loan.is_over or self._await(0)

    def wait(self, timeout_s: float | None = None) -> Tree:
        limit_s = seconds(timeout_s, self._timeout_s)
        if not self._await(limit_s):
            raise not_taken(self._name, limit_s)
        if not self._loan.is_taken:
            raise self._why_not() or WireError("the link was closed")
        return None

    @abstractmethod
    def _await(self, limit_s: float) -> bool:
        """That it is over, so long at most; whether it is."""

    @abstractmethod
    def _why_not(self) -> ShoalError | None:
        """It was taken back, and not because this side has left."""
