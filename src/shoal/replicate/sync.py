"""What every sync is: a way to replace a buffer, on every rank, by its mean over the ranks."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist

from shoal.replicate.post import GroupPost, Post


@dataclass(frozen=True)
class Peers:
    """The ranks that hold copies of the same weights, and this one's place among them."""

    ranks: tuple[int, ...]
    me: int
    group: dist.ProcessGroup | None = None
    post: Post = field(default_factory=GroupPost)
    """How chunks go from rank to rank."""

    @property
    def size(self) -> int:
        return len(self.ranks)


class Pending(Protocol):
    """A mean under way."""

    def wait(self) -> object: ...


class Sync(ABC):
    """Starts means; every rank must start the same buffers in the same order."""

    name: ClassVar[str]
    scales_first: ClassVar[bool] = True
    """True: takes gradients already divided by the number of ranks, and only sums."""

    on_host: ClassVar[bool] = False
    """True: sends point to point, which only host memory does on every backend."""

    def __init__(self, peers: Peers, timeout_s: float) -> None:
        self.peers = peers
        self.timeout_s = timeout_s
        self.bytes_sent = 0
        """Payload this rank has sent, by the algorithm's own count."""

    @abstractmethod
    def start(self, buffer: torch.Tensor) -> Pending:
        """Begin. The buffer belongs to the sync until the returned object's wait() is over."""

    def close(self) -> None:  # noqa: B027 (a choice: not every sync holds something)
        """Give back what the sync holds."""


class Courier:
    """One thread that runs a sync's sends and receives in order, while the backward goes on.

    Backward passes and transfers both release the interpreter lock, so one Python thread is
    enough for them to overlap.
    """

    def __init__(self, timeout_s: float) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]
        self._jobs = queue.SimpleQueue()
        self._timeout_s = timeout_s
        self._thread = threading.Thread(target=self._run, name="shoal-sync", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> CourierJob:
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return CourierJob(future, self._timeout_s)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(1.0)


class CourierJob:
    """One job of a courier. Waiting is interruptible, unlike waiting inside torch."""

    def __init__(self, future: Future[None], timeout_s: float) -> None:
        self._future = future
        self._timeout_s = timeout_s

    def wait(self) -> None:
        # The transfers inside have the group's timeout; twice that means they never ended.
        self._future.result(timeout=2 * self._timeout_s)
