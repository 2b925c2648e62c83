"""Messages that went over ZeroMQ, and how it is known that their memory may be used again."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING

from shoal.errors import ShoalError
from shoal.wire.link import Job, not_taken
from shoal.wire.loans import LendJob, Loan
from shoal.wire.terms import seconds
from shoal.wire.tree import Tree
from shoal.wire.zmq_peer import Peer
from shoal.wire.zmq_pieces import SentMemory

if TYPE_CHECKING:
    from shoal.wire.zmq_link import ZmqLink

SEND_TURN_S = 0.005


class SendJob(Job):
    """Done when ZeroMQ has let go of every buffer."""

    def __init__(self, link: ZmqLink, peer: Peer, buffers: list[SentMemory]) -> None:
        self._link = link
        self._peer = peer
        self._buffers = buffers

    def done(self) -> bool:
        return self._link.tend(self._is_over)

    def _is_over(self) -> bool:
        is_nobodys = self._peer.is_gone or self._peer.deaf is not None
        return is_nobodys or all(buffer.is_free() for buffer in self._buffers)

    def wait(self, timeout_s: float | None = None) -> Tree:
        limit_s = seconds(timeout_s, self._link.timeout_s)
        deadline = time.monotonic() + limit_s
        for buffer in self._buffers:
            # Receive meanwhile: two ranks that send much to each other would else wait for ever.
            while not buffer.is_free(SEND_TURN_S):
                if self._peer.is_gone:
                    raise self._link.lost(self._peer.rank)
                if self._peer.deaf:
                    raise copy.copy(self._peer.deaf)
                if time.monotonic() > deadline:
                    raise not_taken(self._peer.name, limit_s)
                self._link.tend(self._is_over)
        return None


class ZmqLendJob(LendJob):
    """Whoever waits for it receives for all."""

    __slots__ = ("_link", "_peer")

    def __init__(self, link: ZmqLink, peer: Peer, loan: Loan) -> None:
        super().__init__(loan, peer.name, link.timeout_s)
        self._link = link
        self._peer = peer

    def _await(self, limit_s: float) -> bool:
        return self._link.tend(lambda: self.is_over, limit_s)

    def _why_not(self) -> ShoalError | None:
        if self._peer.is_gone:
            return self._link.lost(self._peer.rank)
        return copy.copy(self._peer.deaf)
