"""What every link is: messages to and from any rank, in order per (peer, tag), with deadlines."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

from shoal.closing import Closing
from shoal.errors import PeerSilent, ShoalError, WireError, reason_of
from shoal.interrupts import Held
from shoal.wire.inbox import Inbox, ReceiveJob
from shoal.wire.slots import keep_memory
from shoal.wire.terms import check_places, check_seconds, check_way
from shoal.wire.tree import Tree

FAREWELL_S = 10.0
HASTE_S = 0.5
"""After an error: how long what was sent may take to get away."""


class Job(ABC):
    """A message under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether wait() would return at once (or raise at once)."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> Tree:
        """The message that came; None for a message that went. Raises when the deadline is over."""


Job.register(ReceiveJob)


class _Done(Job):
    """A message that has gone."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> Tree:
        return None


DONE = _Done()


class Link(Closing):
    """Carries trees of tensors between this rank and the others of its crew."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        """How long a wait lasts at most, where it is not told otherwise."""
        self._inbox = Inbox(timeout_s)
        self._process = os.getpid()
        keep_memory()

    def send(self, tree: Tree, to: int, tag: str = "", timeout_s: float | None = None) -> None:
        """Returns when `tree` may be changed again; it may not have arrived yet."""
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)  # before anything goes
        self.isend(tree, to, tag).wait(timeout_s)

    def recv(
        self, source: int, tag: str = "", into: Tree = None, timeout_s: float | None = None
    ) -> Tree:
        """The next message from `source` with this tag.

        into: a tree with tensors to be filled, instead of new ones: as many as come, in the same
            places, of the same dtypes and shapes. They are in what is returned.
        """
        job: ReceiveJob | None = None
        try:
            with Held():  # or Ctrl-C would leave behind who takes a message away, for nobody
                job = self._ask(source, tag, into)
            return job.wait(timeout_s)
        except BaseException:
            if job is not None:
                self.give_up(job)
            raise

    def irecv(self, source: int, tag: str = "", into: Tree = None) -> ReceiveJob:
        """Like recv, but at once: `job.done()`, `job.wait()`."""
        job: ReceiveJob | None = None
        try:
            with Held():
                job = self._ask(source, tag, into)
        except BaseException:
            if job is not None:
                self.give_up(job)
            raise
        return job

    def _ask(self, source: int, tag: str, into: Tree) -> ReceiveJob:
        self._check(source, tag)
        if into is not None:
            check_places(into)
        return self._inbox.expect(source, tag, into)

    def _check(self, other: int, tag: str) -> None:
        """Before anything of a message to or from another rank is done."""
        self._check_process()
        check_way(other, tag, self.rank, self.size)

    def _check_process(self) -> None:
        if self.is_inherited:
            raise WireError(
                f"this link of rank {self.rank} belongs to process {self._process}, and this is "
                f"process {os.getpid()}, which was forked from it: it has none of its threads, and "
                "what it says on the same connections would break them. Let the parent send and "
                "receive."
            )

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that opened the link."""
        return os.getpid() != self._process

    def align(self) -> None:
        """From now on tensors that come lie where torch puts its own, if need be by a copy.

        For results that are to be the same to the bit: how torch's matrix products round depends
        on where their operands begin.
        """
        self._inbox.is_aligned = True

    def wait_any(self, jobs: Sequence[ReceiveJob], timeout_s: float) -> bool:
        """Until one of these is done, if that is soon enough; whether one is."""
        return self._inbox.wait_until(lambda: any(job.is_over for job in jobs), timeout_s)

    def give_up(self, job: ReceiveJob) -> None:
        """Nobody will wait for it any more: what it would have got goes to the next who asks.

        The places that it brought are free again afterwards: nothing more is written there.
        """
        with Held():
            self._inbox.withdraw(job)
        self._inbox.wait_until(lambda: not self._inbox.is_filling(job), self.timeout_s)

    def discard(self, *beginnings: str) -> None:
        """What has come, and is waited for, with a tag that begins so: forget it."""
        self._inbox.discard(beginnings)

    @property
    def is_closed(self) -> bool:
        return self._inbox.is_closed

    def lost(self, rank: int) -> ShoalError:
        """Why nothing more will come from a rank that is lost. To be raised."""
        return self._inbox.lost(rank)

    def silence(self, limit_s: float = 0.0) -> PeerSilent | None:
        """Of a rank that will never answer again, if there is one, or soon turns out to be.

        Looks for it: who has talked to other ranks only has not noticed.
        """
        if not self.is_closed:
            self._inbox.wait_until(lambda: self._inbox.silence is not None, limit_s)
        return self._inbox.silence

    @abstractmethod
    def isend(self, tree: Tree, to: int, tag: str = "", *, lend: bool = False) -> Job:
        """Like send, but at once. The tensors must not be changed until the job is done.

        lend: that may be when the other has received it, however long that takes. Where both are on
            one host, large tensors are then not sent, but read from where they lie.
        """

    def lends_to(self, rank: int) -> bool:
        """Whether what is lent to that rank is read from where it lies."""
        return False

    def close(self, farewell_s: float = FAREWELL_S, reason: str = "") -> None:
        """Waits that are under way end with an error.

        farewell_s: how long, at most, what was sent may still take to get away.
        reason: the error that this rank ends with, for the others to read.
        """
        self._inbox.close()

    def close_after(self, error: BaseException) -> None:
        """Leave at once, telling the others why."""
        self.close(HASTE_S, reason_of(error))


def has_left(name: str, reason: str) -> str:
    return f"{name} has left" + (f": it ended with {reason}" if reason else "")


def not_taken(name: str, limit_s: float) -> WireError:
    return WireError(
        f"waited {limit_s:g} s for {name} to take a message; it did not. It still may: until then "
        "the tensors of that message must stay as they are"
    )
