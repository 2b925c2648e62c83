"""Messages that went over ZeroMQ, and how it is known that their memory may be used again."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING

from shoal.errors import WireError
from shoal.wire.link import Job, not_taken
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


class LendJob(Job):
    """Done when the other side has taken what was lent to it."""

    def __init__(self, link: ZmqLink, peer: Peer, number: int) -> None:
        """number: of the message."""
        self._link = link
        self._peer = peer
        self._number = number
        self._loan = peer.lent[number]

    def done(self) -> bool:
        return self._link.tend(self._is_over)

    def _is_over(self) -> bool:
        return self._number not in self._peer.lent

    def wait(self, timeout_s: float | None = None) -> Tree:
        limit_s = seconds(timeout_s, self._link.timeout_s)
        if not self._link.tend(self._is_over, limit_s):
            raise not_taken(self._peer.name, limit_s)
        if self._loan.is_taken:
            return None
        if self._peer.is_gone:
            raise self._link.lost(self._peer.rank)
        raise copy.copy(self._peer.deaf) if self._peer.deaf else WireError("the link was closed")
