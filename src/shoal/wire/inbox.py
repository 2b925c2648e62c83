"""Where messages wait for those who asked for them, and those who ask for messages to come.

Per (peer, tag) there is a queue of messages or a queue of askers, never both. What arrives goes
straight into the buffers of the first asker, where it brought some that fit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.errors import ShoalError, WireError
from shoal.wire.tree import Slot, Tree, allocate, bytes_of, put_together, take_apart

Key = tuple[int, str]
WaitUntil = Callable[[Callable[[], bool], float], bool]
"""Wait for a condition that this inbox changes, so many seconds at most; whether it is met."""


@dataclass
class Arrival:
    """A message on its way in: room for its buffers, filled by the transport."""

    peer: int
    tag: str
    plan: Any
    slots: list[Slot]
    tensors: list[torch.Tensor]
    rooms: list[torch.Tensor]
    """The bytes of `tensors`, to be received into."""
    job: ReceiveJob | None


@dataclass
class _Queue:
    messages: deque[Tree] = field(default_factory=deque)
    jobs: deque[ReceiveJob] = field(default_factory=deque)


class Inbox:
    """Filled by a transport, emptied by whoever waits. Threads may do both at once."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.wait_until: WaitUntil = self._wait_until
        """How to wait for a condition. A transport without a thread of its own puts its pump here:
        whoever waits for a message does the receiving."""
        self._changed = threading.Condition()
        self._queues: dict[Key, _Queue] = {}
        self._arriving: list[Arrival] = []
        self._lost: dict[int, ShoalError] = {}
        self._closed = False

    # -- those who ask -----------------------------------------------------------------------------

    def expect(self, peer: int, tag: str, into: Tree) -> ReceiveJob:
        job = ReceiveJob(self, peer, tag, into)
        with self._changed:
            queue = self._queues.setdefault((peer, tag), _Queue())
            if queue.messages:
                job._finish(queue.messages.popleft())
            elif error := self._trouble(peer):
                job._fail(error)
            else:
                queue.jobs.append(job)
        return job

    # -- the transport -----------------------------------------------------------------------------

    def arrive(self, peer: int, tag: str, plan: Any, slots: list[Slot]) -> Arrival:
        """Room for a message whose header has come and has been checked."""
        with self._changed:
            queue = self._queues.setdefault((peer, tag), _Queue())
            job = queue.jobs.popleft() if queue.jobs else None
            arrival = Arrival(peer, tag, plan, slots, [], [], job)
            self._arriving.append(arrival)
        offered = job._offer(slots) if job else None
        for number, slot in enumerate(slots):
            if offered is not None:
                tensor = offered[number]
                arrival.rooms.append(bytes_of(tensor))
            else:
                tensor, room = allocate(slot)
                arrival.rooms.append(room)
            arrival.tensors.append(tensor)
        return arrival

    def deliver(self, arrival: Arrival) -> None:
        """The buffers are full. Raises WireError if they make no message."""
        try:
            tree = put_together(arrival.plan, arrival.slots, arrival.tensors)
        except WireError as error:
            self.lose(arrival.peer, error)
            raise
        with self._changed:
            self._arriving.remove(arrival)
            queue = self._queues[arrival.peer, arrival.tag]
            if arrival.job is not None and not arrival.job._given_up:
                arrival.job._finish(tree)
            elif queue.jobs:  # someone asked while it came
                queue.jobs.popleft()._finish(tree)
            else:
                queue.messages.append(tree)
            self._changed.notify_all()

    def lose(self, peer: int, error: ShoalError) -> None:
        """Nothing more will come from `peer`. What has come can still be had."""
        with self._changed:
            self._lost.setdefault(peer, error)
            self._fail_jobs([peer], error)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            peers = [peer for peer, _ in self._queues]
            self._fail_jobs(peers, WireError("the link was closed"))

    def _fail_jobs(self, peers: list[int], error: ShoalError) -> None:
        for (peer, _), queue in self._queues.items():
            if peer in peers:
                for job in queue.jobs:
                    job._fail(error)
                queue.jobs.clear()
        for arrival in self._arriving:
            if arrival.peer in peers and arrival.job is not None:
                arrival.job._fail(error)
        self._arriving = [each for each in self._arriving if each.peer not in peers]
        self._changed.notify_all()

    def _trouble(self, peer: int) -> ShoalError | None:
        return WireError("the link was closed") if self._closed else self._lost.get(peer)

    def withdraw(self, job: ReceiveJob) -> bool:
        """A wait that is over its deadline does not take a later message away.

        False if the message came in the last moment.
        """
        with self._changed:
            if job.done():
                return False
            job._given_up = True
            queue = self._queues[job.peer, job.tag]
            if job in queue.jobs:
                queue.jobs.remove(job)
            return True

    def _wait_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, limit_s)


class ReceiveJob:
    """Someone who asked for a message."""

    def __init__(self, inbox: Inbox, peer: int, tag: str, into: Tree) -> None:
        self.peer, self.tag = peer, tag
        self._inbox = inbox
        self._into = into
        self._done = False
        self._given_up = False
        self._tree: Tree = None
        self._error: ShoalError | None = None

    def done(self) -> bool:
        return self._done

    def wait(self, timeout_s: float | None = None) -> Tree:
        limit_s = self._inbox.timeout_s if timeout_s is None else timeout_s
        if not self._inbox.wait_until(self.done, limit_s) and self._inbox.withdraw(self):
            tag = f" with tag {self.tag!r}" if self.tag else ""
            raise WireError(
                f"waited {limit_s:g} s for a message{tag} from rank {self.peer}; none came"
            )
        if self._error is not None:
            raise self._error
        return self._tree

    # Called with the inbox's lock held.

    def _finish(self, tree: Tree) -> None:
        try:
            self._tree = tree if self._into is None else _fill(self._into, tree)
        except WireError as error:
            self._error = error
        self._done = True

    def _fail(self, error: ShoalError) -> None:
        self._error, self._done = error, True

    def _offer(self, slots: list[Slot]) -> list[torch.Tensor] | None:
        """The tensors of `into`, if what comes can be received right into them."""
        if self._into is None:
            return None
        wanted = take_apart(self._into)
        tensors = _tensors_of(self._into)
        fits = wanted.slots == slots and all(
            t.device.type == "cpu" and t.is_contiguous() for t in tensors
        )
        return tensors if fits and len(tensors) == len(slots) else None


def _tensors_of(tree: Tree) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    inner = tree.values() if isinstance(tree, dict) else tree
    return (
        [t for v in inner for t in _tensors_of(v)] if isinstance(tree, dict | list | tuple) else []
    )


def _fill(into: Tree, tree: Tree) -> Tree:
    """`into`, holding what came. Tensors that were received in place are left as they are."""
    targets, sources = _tensors_of(into), _tensors_of(tree)
    expected = [(t.dtype, tuple(t.shape)) for t in targets]
    actual = [(t.dtype, tuple(t.shape)) for t in sources]
    if expected != actual:
        raise WireError(f"into= has tensors {expected}, what came has {actual}")
    for target, source in zip(targets, sources, strict=True):
        if target.data_ptr() != source.data_ptr() or target.device != source.device:
            target.copy_(source)
    return into
