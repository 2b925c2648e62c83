"""What all stages of a replica do together: stage 0 announces each call, and the others agree.

A call that fails in one stage leaves the others in the midst of it: there is none after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from shoal.crew import Crew
from shoal.errors import ModelError, OutOfStepError, PeerLost, WireError, reason_of
from shoal.wire.link import Link

T = TypeVar("T")
NUM_TURNS = 8
"""Of calls that messages tell apart: no stage is as far ahead of another. The same tags come again,
and with them headers of messages that are known."""


class Calls:
    """Of one replica, seen from one of its ranks."""

    def __init__(self, link: Link, ranks: Sequence[int]) -> None:
        """ranks: of the replica's stages."""
        self._link = link
        self._ranks = ranks
        self.is_links_end = False
        """Whether a call that fails closes the link: it is for these calls only."""
        self._number = 0
        self._failed = ""

    @property
    def turn(self) -> int:
        """What tells the messages of this call from those of others."""
        return self._number % NUM_TURNS

    def announce(self, what: str, samples: int, *, is_training: bool | None, mark: int = 0) -> None:
        """In stage 0: a call begins, with a batch of so many samples.

        is_training: None where it does not matter. mark: of the target (alike.py).
        """
        self._begin()
        with together(self._link, what):
            for rank in self._ranks[1:]:
                announced = [what, self._number, samples, is_training, mark]
                self._link.isend(announced, rank, "begin")

    def hear(self, what: str, *, is_training: bool | None) -> tuple[int, int]:
        """In all others: the samples of the batch with which this call begins, and its mark."""
        self._begin()
        with together(self._link, what):
            *announced, mark = self._link.recv(self._ranks[0], "begin")
        samples: int = announced[2]
        expected = [what, self._number, samples, is_training]
        if announced != expected:
            raise ModelError(
                f"rank {self._link.rank} does {_told(expected)}; rank {self._ranks[0]} does "
                f"{_told(announced)}. Every rank must make the same calls of the pipeline."
            )
        return samples, mark

    def begin(self, what: str) -> None:
        """In all: a call that has no batch. Who makes another one hears so at once."""
        if self._link.rank == self._ranks[0]:
            self.announce(what, 0, is_training=None)
        else:
            self.hear(what, is_training=None)

    def count(self) -> None:
        """In all: a call without messages. Who leaves it out hears so in the next one."""
        self._begin()

    def _begin(self) -> None:
        self.check()
        self._number += 1

    def check(self) -> None:
        """That no call has failed."""
        if self._failed:
            raise ModelError(
                f"this pipeline cannot go on: {self._failed}, so its stages are at different "
                "places. Make a new one, with weights that you have kept."
            )

    def begun_by_all(self, crew: Crew, what: str, make: Callable[[], T]) -> T:
        """What every rank makes for itself; if one cannot, all are told."""
        fault: Exception | None = None
        try:
            made = make()
        except Exception as error:
            fault = error
        faults = crew.exchange(what, reason_of(fault) if fault is not None else "")
        for rank, told in enumerate(faults):
            if told:
                self._failed = f"{crew.roster[rank].who} could not make {what} ({told})"
                break
        if fault is not None:
            raise fault
        self.check()
        return made

    @contextmanager
    def to_its_end(self) -> Iterator[None]:
        """Of a call that all stages have begun: if it fails in one, nobody can go on from there.

        Nor should anybody wait, also where the script goes on after the error.
        """
        try:
            with together(self._link, "the same"):
                yield
        except BaseException as error:
            if self._link.size > 1:
                self._failed = f"call {self._number} failed with {reason_of(error)}"
                if self.is_links_end:
                    self._link.close_after(error)
            raise


@contextmanager
def together(link: Link, what: str) -> Iterator[None]:
    """What is done meanwhile is done by every rank, or one waits in vain."""
    try:
        yield
    except PeerLost as error:
        if not str(error).endswith("has left"):
            raise
        raise OutOfStepError(
            f"{error}, and this rank waited for it in a call of the pipeline: every rank must make "
            "the same calls"
        ) from None
    except WireError as error:
        if silence := link.silence():  # whom the one that we wait for waits for itself
            raise silence from None
        raise OutOfStepError(
            f"{error}. Has every rank called {what} of the pipeline? All of them must, also those "
            "that have no use for what it gives."
        ) from None


def _told(announced: Sequence[Any]) -> str:
    what, number, _, is_training = announced
    mode = "" if is_training is None else f", {'train' if is_training else 'eval'} mode"
    return f"{what} (call {number}{mode})"
