"""Where messages wait for those who asked for them, and those who ask for messages to come.

Per (peer, tag) there is a queue of messages or a queue of askers, never both. What arrives goes
straight into the buffers of the first asker, where it brought some that fit.
"""

from __future__ import annotations

import copy
import operator
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.errors import PeerSilent, ShoalError, WireError
from shoal.wire.arrival import Arrival
from shoal.wire.blocks import Blocks
from shoal.wire.front import Front
from shoal.wire.slots import aligned
from shoal.wire.terms import seconds
from shoal.wire.tree import Path, Tree, tensors_of, with_tensors

Key = tuple[int, str]
WaitUntil = Callable[[Callable[[], bool], float], bool]
"""Wait for a condition that this inbox changes, so many seconds at most; whether it is met."""
WaitFor = Callable[["ReceiveJob", float], bool]
"""The same, for a message."""


MAX_IDLE_QUEUES = 1000
MAX_BACKLOG_BYTES = 64 * 2**20
BARE_MESSAGE_BYTES = 1024
"""About what a message takes that holds next to nothing."""


@dataclass
class _Queue:
    messages: deque[tuple[Tree, int]] = field(default_factory=deque)
    """With the bytes that each holds."""
    jobs: deque[ReceiveJob] = field(default_factory=deque)


class Inbox:
    """Filled by a transport, emptied by whoever waits. Threads may do both at once."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.wait_until: WaitUntil = self.wait_for_others
        """How to wait for a condition. A transport without a thread of its own puts its pump here:
        whoever waits for a message does the receiving."""
        self.wait_for: WaitFor = lambda job, limit_s: self.wait_until(job._is_done, limit_s)
        """How to wait for one message, where there is a better way for that."""
        self.is_aligned = False
        """Whether tensors are copied that did not come to lie where torch puts its own."""
        self._lock = threading.Lock()
        self._waiting: list[threading.Lock] = []
        """Of those who wait for others: each is released when something has changed."""
        self._queues: dict[Key, _Queue] = {}
        self._arriving: set[Arrival] = set()
        self._lost: dict[int, ShoalError] = {}
        self._backlog: dict[int, int] = defaultdict(int)
        """Bytes that have come from each peer and that nobody has asked for."""
        self._closed = False
        self._blocks = Blocks()

    # -- those who ask -----------------------------------------------------------------------------

    def expect(self, peer: int, tag: str, into: Tree) -> ReceiveJob:
        job = ReceiveJob(self, peer, tag, into)
        with self._lock:
            queue = self._queue(peer, tag)
            if queue.messages:
                tree, size = queue.messages[0]
                if job._finish(tree):
                    queue.messages.popleft()
                    self._backlog[peer] -= size
            elif self._closed or peer in self._lost:
                job._fail(WireError("the link was closed") if self._closed else self._lost[peer])
            else:
                queue.jobs.append(job)
            self._wake()
        return job

    # -- the transport -----------------------------------------------------------------------------

    def arrive(self, peer: int, front: Front) -> Arrival:
        """A message whose front has come and has been checked."""
        arrival = Arrival(peer, front, self.is_aligned, self._blocks)
        with self._lock:
            jobs = self._queue(peer, front.tag).jobs
            if jobs:
                arrival.assign(jobs.popleft())
            self._arriving.add(arrival)
        return arrival

    def deliver_whole(self, peer: int, front: Front, contents: list[Any]) -> None:
        """A message that came at once; contents: of each slot, as `Arrival.take` wants them."""
        with self._lock:
            queue = self._queue(peer, front.tag)
            if not queue.jobs or queue.jobs[0]._into is None:
                tensors = list(map(operator.call, front.shapers, contents))
                if self.is_aligned:
                    tensors = list(map(aligned, tensors))
                tree = front.build(tensors)
                self._hand_over(queue, tree, peer, front)
                return
        arrival = self.arrive(peer, front)
        for number, content in enumerate(contents):
            arrival.take(number, content)
        self.deliver(arrival)

    def has_places_for(self, peer: int, front: Front) -> bool:
        """Whether who gets the message, if somebody has asked for it, has brought places."""
        with self._lock:
            jobs = self._queue(peer, front.tag).jobs
            return bool(jobs) and jobs[0]._into is not None

    def deliver_ready(self, peer: int, front: Front, tensors: list[torch.Tensor]) -> None:
        """A message whose tensors are there."""
        with self._lock:
            queue = self._queue(peer, front.tag)
            self._hand_over(queue, front.build(tensors), peer, front)

    def deliver(self, arrival: Arrival) -> None:
        """The slots are full. Raises WireError if they make no message."""
        with self._lock:
            if arrival not in self._arriving:
                return  # the peer was lost meanwhile, and whoever asked has been told
            if arrival.must_move:
                arrival.move()
            tree = arrival.message()
            self._arriving.remove(arrival)
            job = arrival.job
            is_waited_for = job is not None and not job._given_up
            if job and is_waited_for and job._finish(tree, arrival.is_in_place):
                self._wake()
            else:
                queue = self._queue(arrival.peer, arrival.front.tag)
                self._hand_over(queue, tree, arrival.peer, arrival.front)

    def _hand_over(self, queue: _Queue, tree: Tree, peer: int, front: Front) -> None:
        """To whoever asks, now or later. With the lock held."""
        if not self._give(queue, tree):
            behind = sum(front.sizes[slot] for slot in front.behind)
            size = BARE_MESSAGE_BYTES + front.size + behind
            queue.messages.append((tree, size))
            self._backlog[peer] += size

    def _give(self, queue: _Queue, tree: Tree) -> bool:
        """To the first of those who wait whom it fits, if any. With the lock held."""
        self._wake()
        while queue.jobs:
            if queue.jobs.popleft()._finish(tree):
                return True
        return False

    def has_room(self, peer: int) -> bool:
        """Whether it is time to receive more from `peer`: little is waiting, or someone is."""
        if self._closed or self._backlog[peer] < MAX_BACKLOG_BYTES:
            return True
        queues = self._queues.copy()  # whoever asks for a new tag meanwhile adds to them
        return any(queue.jobs for (p, _), queue in queues.items() if p == peer)

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody waits for someone else to receive."""
        return bool(self._waiting)

    def stir(self) -> None:
        """Wake those who wait for someone else to receive: it is their turn."""
        if self._waiting:
            with self._lock:
                self._wake()

    def _wake(self) -> None:
        """With the lock held. Whoever waits needs it no more to go on: not so a Condition's."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each.release()

    def _queue(self, peer: int, tag: str) -> _Queue:
        queue = self._queues.get((peer, tag))
        if queue is None:
            if len(self._queues) >= MAX_IDLE_QUEUES:  # tags may be as many as messages
                busy = {key: q for key, q in self._queues.items() if q.messages or q.jobs}
                self._queues = busy
            queue = self._queues[peer, tag] = _Queue()
        return queue

    def lose(self, peer: int, error: ShoalError) -> None:
        """Nothing more will come from `peer`. What has come can still be had."""
        with self._lock:
            self._lost.setdefault(peer, error)
            self._fail_jobs([peer], error)

    def lost(self, peer: int) -> ShoalError:
        """Why nothing more will come from `peer`. To be raised."""
        return copy.copy(self._lost[peer])

    @property
    def silence(self) -> PeerSilent | None:
        """Of a peer that will never answer again, if there is one."""
        errors = tuple(self._lost.values())
        return next((error for error in errors if isinstance(error, PeerSilent)), None)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def discard(self, beginnings: tuple[str, ...]) -> None:
        """Nobody wants what has come, or will still wait for what comes, with such a tag."""
        with self._lock:
            for (peer, tag), queue in self._queues.items():
                if tag.startswith(beginnings):
                    self._backlog[peer] -= sum(size for _, size in queue.messages)
                    queue.messages.clear()
                    for job in queue.jobs:
                        job._given_up = True
                    queue.jobs.clear()

    def close(self) -> None:
        with self._lock:
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
        self._arriving = {each for each in self._arriving if each.peer not in peers}
        self._wake()

    def is_filling(self, job: ReceiveJob) -> bool:
        """Whether a message is on its way right into the places that a job brought."""
        return any(each.job is job and each.is_in_place for each in tuple(self._arriving))

    def move(self, arrival: Arrival) -> None:
        """Give the places of an arrival back to whoever brought them."""
        with self._lock:
            arrival.move()
            self._wake()

    def withdraw(self, job: ReceiveJob) -> None:
        """Nobody will wait for this job any more: it must not take a message away."""
        with self._lock:
            job._given_up = True
            queue = self._queue(job.peer, job.tag)
            if job in queue.jobs:
                queue.jobs.remove(job)
            if job._done and job._error is None:  # it came in the last moment, first in its queue
                tree = job._tree if job._into is None else _copied(job._tree)
                if not self._give(queue, tree):
                    queue.messages.appendleft((tree, 0))

    def wait_for_others(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Wait for what another thread delivers."""
        deadline = time.monotonic() + limit_s
        bell = threading.Lock()
        bell.acquire()
        while not condition():
            with self._lock:
                if condition():
                    return True
                self._waiting.append(bell)
            left = deadline - time.monotonic()
            if left <= 0 or not bell.acquire(timeout=left):
                with self._lock:
                    if bell in self._waiting:
                        self._waiting.remove(bell)
                return condition()
        return True


class ReceiveJob:
    """Someone who asked for a message."""

    __slots__ = ("_done", "_error", "_given_up", "_inbox", "_into", "_tree", "peer", "tag")

    def __init__(self, inbox: Inbox, peer: int, tag: str, into: Tree) -> None:
        self.peer, self.tag = peer, tag
        self._inbox = inbox
        self._into = into
        self._done = False
        self._given_up = False
        self._tree: Tree = None
        self._error: ShoalError | None = None

    @property
    def is_over(self) -> bool:
        """Whether it is here, or will never be. Moves nothing along."""
        return self._done

    @property
    def has_failed(self) -> bool:
        """Whether it will never be here. Then it is over, too."""
        return self._done and self._error is not None

    def done(self) -> bool:
        """Whether it is here. Asking moves things along, where nobody else does."""
        return self._done or self._inbox.wait_until(self._is_done, 0)

    def _is_done(self) -> bool:
        return self._done

    def wait(self, timeout_s: float | None = None) -> Tree:
        """What came. Over its deadline it raises, and can be waited for again."""
        limit_s = seconds(timeout_s, self._inbox.timeout_s)
        if not self._inbox.wait_for(self, limit_s):
            tag = f" with tag {self.tag!r}" if self.tag else ""
            raise WireError(
                f"waited {limit_s:g} s for a message{tag} from rank {self.peer}; none came"
            )
        if self._error is not None:
            raise copy.copy(self._error)  # whoever is told keeps no track of others who were
        return self._tree

    # Called with the inbox's lock held.

    def _finish(self, tree: Tree, is_in_place: bool = False) -> bool:
        """False: it does not fit the places that were brought; it is for the next who asks."""
        fault = ""
        if self._into is None or is_in_place:
            self._tree = tree
        else:
            fault = _misfit(self._into, tree) or self._fill(tree)
        if fault:
            tag = f" with tag {self.tag!r}" if self.tag else ""
            self._error = WireError(
                f"{fault}. The message{tag} from rank {self.peer} waits for the next recv()."
            )
        self._done = True  # last: whoever waits does not hold the lock
        return not fault

    def _fill(self, tree: Tree) -> str:
        """Put what came, which fits, into the places that were brought; why not, if not."""
        try:
            self._tree = _filled(self._into, tree)
        except RuntimeError as error:  # of torch's: whoever asked is at fault, not who receives
            return f"into= cannot be filled: {error}"
        return ""

    def _fail(self, error: ShoalError) -> None:
        self._error, self._done = error, True


def _misfit(into: Tree, tree: Tree) -> str:
    """Why the places of `into` are not those of what came, if they are not."""
    expected, actual = (
        {path: (t.dtype, tuple(t.shape)) for path, t in tensors_of(each).items()}
        for each in (into, tree)
    )
    if expected == actual:
        return ""
    return f"into= has {_described(expected)}; what came has {_described(actual)}"


def _filled(into: Tree, tree: Tree) -> Tree:
    """What came, with its tensors in the places of `into`, which fit."""
    places, tensors = tensors_of(into), tensors_of(tree)
    with torch.inference_mode():  # also into tensors that were made so
        for path, place in places.items():
            place.copy_(tensors[path])
    return with_tensors(tree, places)


def _copied(tree: Tree) -> Tree:
    """The same values, in other memory."""
    return with_tensors(tree, {path: t.detach().clone() for path, t in tensors_of(tree).items()})


def _described(tensors: dict[Path, tuple[torch.dtype, tuple[int, ...]]]) -> str:
    shown = [
        f"{''.join(f'[{step!r}]' for step in path)} {str(dtype)[6:]} {shape}".strip()
        for path, (dtype, shape) in list(tensors.items())[:5]
    ]
    more = f" and {len(tensors) - 5} more" if len(tensors) > 5 else ""
    return "tensors " + ", ".join(shown) + more if shown else "no tensors"
