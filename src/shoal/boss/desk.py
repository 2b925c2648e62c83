"""The boss's end of the link to its workers: orders out, results in, trouble told at once."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from shoal.boss import answers
from shoal.boss.answers import Trouble
from shoal.boss.hiring import Staff
from shoal.boss.orders import Backward, Forward, Order, Place, ZeroGrad, as_message
from shoal.errors import PeerLost, WireError, WorkerError
from shoal.wire.inbox import ReceiveJob
from shoal.wire.link import HASTE_S
from shoal.wire.tree import Tree

log = logging.getLogger("shoal.boss")
T = TypeVar("T")
TEND_S = 0.25
"""How often calls are answered and reports read while the script does something else."""
FIND_S = 3.0
"""How long to look for who is lost, when a worker only says that it lost another."""


class Desk:
    """Talks with all workers. One thread at a time may order and wait."""

    def __init__(self, staff: Staff) -> None:
        self.link = staff.link
        self.link.align()
        self.names = staff.names
        self.ranks = range(1, self.link.size)
        self.seen_at = dict.fromkeys(self.ranks, time.monotonic())
        self.memory_bytes = dict.fromkeys(self.ranks, 0)
        self.steps = dict.fromkeys(self.ranks, 0)
        self.num_kept = dict.fromkeys(self.ranks, 0)
        self.is_busy = dict.fromkeys(self.ranks, False)
        self._troubles = {rank: self.link.irecv(rank, "trouble") for rank in self.ranks}
        self._reports = {rank: self.link.irecv(rank, "report") for rank in self.ranks}
        self._unreadable: set[int] = set()
        """Whose reports are none."""
        self._num_orders = dict.fromkeys(self.ranks, 0)
        self._is_torn = False
        """Whether workers wait for what will not come."""
        self._zero_grad: ZeroGrad | None = None
        self.num_aborts = 0
        """How often all workers were told to drop what was under way."""
        self._recovered = dict.fromkeys(self.ranks, 0)
        """The last time that each has."""
        self._is_over = threading.Event()
        self._tender = threading.Thread(target=self._tend, name="shoal-boss", daemon=True)
        self._tender.start()
        atexit.register(self.close)  # of a script that never closes its boss

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around an order and all that belongs to it, there and back.

        Where some of it was left out (it could not be sent, or Ctrl-C came), workers would wait for
        that, or answer the next order with what was meant for this one: they drop it first.
        """
        try:
            yield
        except (PeerLost, WorkerError):  # all have dropped it already, or never can
            raise
        except BaseException:
            self._is_torn = True
            raise

    def mend(self) -> None:
        """Before anything new: tell of trouble, and have workers drop what was left unfinished."""
        self._look_for_trouble()
        if self._is_torn:
            self._recover()

    def order(self, order: Order, tensors: Sequence[Tree] | None = None) -> None:
        """To all workers. tensors: for each, by stage."""
        if isinstance(order, ZeroGrad):
            # As a rule a backward pass comes next, which takes it along.
            self._zero_grad = order
            return
        if isinstance(order, Backward):
            order = msgspec.structs.replace(order, zero_grad=self._zero_grad)
            self._zero_grad = None
        self.order_each([order] * len(self.ranks), tensors)

    def order_each(self, orders: Sequence[Order], tensors: Sequence[Tree] | None) -> None:
        """To every worker an order of its own."""
        self.mend()
        if self._zero_grad is not None and not isinstance(orders[0], Forward | Place):
            self._tell_all([self._zero_grad] * len(self.ranks), None)
            self._zero_grad = None
        with self.whole():
            self._tell_all(orders, tensors)

    def _tell_all(self, orders: Sequence[Order], tensors: Sequence[Tree] | None) -> None:
        for rank in self.ranks:
            held = None if tensors is None else tensors[rank - 1]
            job = self.link.isend(as_message(orders[rank - 1], held), rank, "order")
            self._num_orders[rank] += 1  # also if Ctrl-C comes while it goes
            if tensors is not None:  # which are the caller's, who may change them
                job.wait()

    def send(self, tree: Tree, rank: int, tag: str) -> None:
        self.link.isend(tree, rank, tag)

    def recv(self, rank: int, tag: str, read: Callable[[Tree], T]) -> T:
        """What a worker sends; raises WorkerError as soon as any worker is in trouble."""
        job = self.link.irecv(rank, tag)
        if not self.link.wait_any([job, *self._troubles.values()], self.link.timeout_s):
            raise self._too_late([rank])
        if not job.is_over:
            self._look_for_trouble()
        return self._read(rank, tag, job.wait(0), read)

    def _read(self, rank: int, what: str, came: Tree, read: Callable[[Tree], T]) -> T:
        """What a worker has sent. It may be anything."""
        try:
            return read(came)
        except Exception as error:
            raise WireError(
                f"{self.names[rank]} sent something else than {what!r}: {error}. It does not work "
                "as a worker should: end it."
            ) from error

    # -- trouble -----------------------------------------------------------------------------------

    def _look_for_trouble(self) -> None:
        """Raise what a worker has told of, or that it is lost, after all have recovered."""
        told = {rank: job for rank, job in self._troubles.items() if job.is_over}
        if not told:
            return
        lost, troubles = self._sort(told)
        deadline = time.monotonic() + FIND_S
        while not lost and all(trouble.is_consequence for trouble in troubles.values()):
            # Somebody was lost to somebody; soon we shall know who.
            silent = [job for rank, job in self._troubles.items() if rank not in troubles]
            left_s = max(deadline - time.monotonic(), 0.0)
            if not silent or not self.link.wait_any(silent, left_s):
                # We hear all of them. But without each other they cannot even recover.
                raise PeerLost(
                    f"{troubles[min(troubles)].text}. The boss hears both: what is cut is the way "
                    "between these two."
                )
            lost, troubles = self._sort({r: j for r, j in self._troubles.items() if j.is_over})
        if lost:
            raise lost[0]
        rank, trouble = min(troubles.items(), key=lambda item: (item[1].is_consequence, item[0]))
        self._recover()
        raise WorkerError(self.names[rank], trouble.kind, trouble.text, trouble.traceback)

    def _sort(self, told: dict[int, ReceiveJob]) -> tuple[list[PeerLost], dict[int, Trouble]]:
        lost: list[PeerLost] = []
        troubles: dict[int, Trouble] = {}
        for rank, job in told.items():
            try:
                troubles[rank] = self._read(rank, "trouble", job.wait(0), answers.trouble)
            except PeerLost as error:
                lost.append(error)
            except WireError as error:
                troubles[rank] = Trouble("WireError", str(error), "", is_consequence=False)
        return lost, troubles

    def _recover(self) -> None:
        """Have all workers drop what is under way, and wait until they have."""
        self.num_aborts += 1
        for rank in self.ranks:
            self.link.isend([self.num_aborts, self._num_orders[rank]], rank, "abort")
        deadline = time.monotonic() + self.link.timeout_s
        for rank in self.ranks:
            while self._recovered[rank] < self.num_aborts:
                self._recovered[rank] = self._next_recovered(rank, deadline)
        self.link.discard(
            "trouble", "output ", "input gradient ", "loss ", "norms ", "state ", "times "
        )
        self._troubles = {rank: self.link.irecv(rank, "trouble") for rank in self.ranks}
        self._is_torn = False

    def _next_recovered(self, rank: int, deadline: float) -> int:
        """The number of the abort that this worker has done."""
        job = self.link.irecv(rank, "recovered")
        try:
            if not self.link.wait_any([job], max(deadline - time.monotonic(), 0.0)):
                late = [r for r in self.ranks if self._recovered[r] < self.num_aborts]
                raise self._too_late(late)
            came = job.wait(0)
        except BaseException:
            self.link.give_up(job)
            raise
        return self._read(rank, "recovered", came, answers.number)

    def _too_late(self, ranks: Sequence[int]) -> WireError:
        """Nothing came from these. They may wait for others, who are busy."""
        busy = [rank for rank, is_busy in self.is_busy.items() if is_busy]
        text = f"waited {self.link.timeout_s:g} s for {self._all_names(ranks)}; nothing came. "
        if busy:
            text += f"Busy, as last heard: {self._all_names(busy)}. "
        else:
            text += "A worker may be busy. "
        return WireError(f"{text}Boss(timeout_s=) says how long to wait.")

    def _all_names(self, ranks: Sequence[int]) -> str:
        return ", ".join(self.names[rank] for rank in ranks)

    # -- in between --------------------------------------------------------------------------------

    def _tend(self) -> None:
        while not self._is_over.wait(TEND_S):
            for _ in range(2 * self.link.size):  # each takes one message; as many may have come
                self.link.tend()
            for rank, job in self._reports.items():
                if not job.is_over or job.has_failed:
                    continue
                came = job.wait(0)
                self._reports[rank] = self.link.irecv(rank, "report")
                self._take_report(rank, came)

    def _take_report(self, rank: int, came: Tree) -> None:
        try:
            told = self._read(rank, "report", came, answers.report)
        except WireError as error:
            if rank not in self._unreadable:  # once: it comes every other second
                self._unreadable.add(rank)
                log.warning("%s", error)
            return
        self.memory_bytes[rank], self.steps[rank] = told.memory_bytes, told.step
        self.num_kept[rank], self.is_busy[rank] = told.num_kept, told.is_busy
        self.seen_at[rank] = time.monotonic()

    def is_lost(self, rank: int) -> bool:
        job = self._reports[rank]
        return job.is_over and job.has_failed

    def close(self, error: BaseException | None = None) -> None:
        atexit.unregister(self.close)
        self._is_over.set()
        self._tender.join()
        if error is None:
            self.link.close()
        elif isinstance(error, PeerLost):
            self.link.close_after(error)
        else:  # the other workers need no more of a WorkerError than its first line
            kind, first = type(error).__name__, str(error).partition("\n")[0]
            self.link.close(HASTE_S, f"{kind}: {first}" if first else kind)
