"""What a dist link knows of one peer, and a message that is on its way there."""

from __future__ import annotations

import copy
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shoal.errors import PeerLost
from shoal.wire import front
from shoal.wire.dist_arrivals import Arrivals
from shoal.wire.gpu_lane import GpuLane
from shoal.wire.link import Job, not_taken
from shoal.wire.terms import seconds
from shoal.wire.tree import Tree

if TYPE_CHECKING:
    from shoal.wire.dist_link import DistLink


A_MOMENT_S = 0.002
"""A wait that is over so soon is nobody else's business."""


@dataclass(eq=False)
class Peer:
    rank: int
    name: str
    group: Any
    other: int
    """The peer's rank within the group of two."""
    packer: front.Packer
    arrivals: Arrivals
    lane: GpuLane | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """For what is sent."""
    outgoing: queue.SimpleQueue[Outgoing | None] = field(default_factory=queue.SimpleQueue)
    num_sent: int = 0
    said: bytes = b""
    """The front of the last message, without its number."""
    is_repeated: bool = False
    """It was that of the message before, too."""
    lost: PeerLost | None = None
    parting: PeerLost | None = None
    """Why we are breaking off, while gloo ends all that is under way with errors of its own."""
    has_goodbye: bool = False
    """Whether we have said it."""
    is_paused: bool = False
    """Nothing is received from it for the moment."""
    threads: list[threading.Thread] = field(default_factory=list)

    def may_leave_out(self, said: bytes) -> bool:
        """Whether it knows what a front would say: it was said twice, and nothing else since."""
        return self.is_repeated and said == self.said

    def has_begun(self, outgoing: Outgoing, said: bytes | None) -> None:
        """It is on its way. said: by the front of a message; None: it is a sign."""
        self.outgoing.put(outgoing)
        if said is not None:
            self.said, self.is_repeated = said, said == self.said
            self.num_sent += 1


class Outgoing(Job):
    """A message that is being sent."""

    __slots__ = ("_bell", "_link", "_peer", "pieces", "works")

    def __init__(self, link: DistLink, peer: Peer, pieces: list[torch.Tensor]) -> None:
        self.pieces = pieces
        """What is sent: memory that is being read."""
        self.works: list[Any] = []
        """One for each that is under way. Empty when all have gone."""
        self._link = link
        self._peer = peer
        self._bell = threading.Lock()
        self._bell.acquire()

    def finish(self) -> None:
        self.works, self.pieces = [], []
        self._bell.release()
        self._link._inbox.stir()

    def done(self) -> bool:
        return self._link._wait_until(self._is_over, 0)  # which looks for peers that are hung

    def _is_over(self) -> bool:
        return not self.works or self._peer.lost is not None

    def wait(self, timeout_s: float | None = None) -> Tree:
        limit_s = seconds(timeout_s, self._link.timeout_s)
        # Mostly it has gone in a moment, and nobody else needs to know that we wait.
        if self._bell.acquire(timeout=min(limit_s, A_MOMENT_S)):
            self._bell.release()
            return None
        if not self._link._wait_until(self._is_over, limit_s):
            raise not_taken(self._peer.name, limit_s)
        if self.works and self._peer.lost:
            raise copy.copy(self._peer.lost)
        return None
