"""What a dist link knows of one peer, and a message that is on its way there."""

from __future__ import annotations

import copy
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shoal.errors import PeerLost
from shoal.wire import front
from shoal.wire.gpu_lane import GpuLane
from shoal.wire.link import Job, not_taken
from shoal.wire.terms import seconds
from shoal.wire.tree import Tree

if TYPE_CHECKING:
    from shoal.wire.dist_link import DistLink


@dataclass(eq=False)
class Peer:
    rank: int
    name: str
    group: Any
    other: int
    """The peer's rank within the group of two."""
    packer: front.Packer
    reader: front.FrontReader
    lane: GpuLane | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    outgoing: queue.SimpleQueue[Outgoing | None] = field(default_factory=queue.SimpleQueue)
    num_sent: int = 0
    num_received: int = 0
    heard_at: float = field(default_factory=time.monotonic)
    lost: PeerLost | None = None
    parting: PeerLost | None = None
    """Why we are breaking off, while gloo ends all that is under way with errors of its own."""
    has_goodbye: bool = False
    """Whether we have said it."""
    next_front: Any = None
    is_paused: bool = False
    """Nothing is received from it for the moment."""
    threads: list[threading.Thread] = field(default_factory=list)
    spare: dict[int, tuple[Any, torch.Tensor]] = field(default_factory=dict)
    """By length: a receive that waits for a piece, and where it will be."""


class Outgoing(Job):
    """A message that is being sent."""

    def __init__(self, link: DistLink, peer: Peer) -> None:
        self.works: list[tuple[Any, torch.Tensor]] = []
        """What is under way, with the memory it reads."""
        self._link = link
        self._peer = peer
        self._gone = False

    def finish(self) -> None:
        self._gone = True
        self.works = []
        self._link._inbox.stir()

    def done(self) -> bool:
        return self._link._wait_until(self._is_over, 0)  # which looks for peers that are hung

    def _is_over(self) -> bool:
        return self._gone or self._peer.lost is not None

    def wait(self, timeout_s: float | None = None) -> Tree:
        limit_s = seconds(timeout_s, self._link.timeout_s)
        if not self._link._wait_until(self._is_over, limit_s):
            raise not_taken(self._peer.name, limit_s)
        if not self._gone and self._peer.lost:
            raise copy.copy(self._peer.lost)
        return None
