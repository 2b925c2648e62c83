"""Signs: messages of one byte that say something of a rank, not of a tree; and how it leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import numpy
import zmq

from shoal.wire.zmq_jobs import SEND_TURN_S
from shoal.wire.zmq_peer import Peer
from shoal.wire.zmq_pieces import SentMemory

HELLO, BORROWER, GOODBYE, DROPPED, DEAF = b"h", b"b", b"g", b"d", b"x"
LENT, TAKEN = b"l", b"t"
"""Behind it a reason (goodbye, dropped, deaf), a front and addresses (lent), a message's number
(taken). A borrower says hello, and can read what is lent to it."""
MAX_REASON_LETTERS = 500


def say(peer: Peer, sign: bytes, reason: str) -> SentMemory | None:
    """What tells that it has gone; None if there is no connection any more."""
    text = (reason or " ").encode("utf-8", "replace")[:MAX_REASON_LETTERS]
    content: Any = numpy.frombuffer(text, dtype=numpy.uint8).copy()
    buffer = SentMemory(content)
    with peer.lock:
        peer.dealer.copy_threshold = 0  # so that this too is sent as it lies, and watched
        try:
            peer.dealer.send(sign, zmq.DONTWAIT | zmq.SNDMORE)
            peer.dealer.send(content, zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
    return buffer


def say_goodbye(
    peers: Collection[Peer],
    router: zmq.Socket[bytes],
    receive: Callable[[], None],
    farewell_s: float,
    reason: str,
) -> None:
    """To all who are there, and wait until it has gone, so long at most.

    receive: what has come. Who leaves because of an error does not wait for others to take what was
    lent.
    """
    deadline = time.monotonic() + farewell_s
    parting: list[tuple[Peer, SentMemory]] = []
    for peer in peers:
        is_there = peer.guest.is_connected and not peer.is_gone
        if is_there and (sent := say(peer, GOODBYE, reason)):
            parting.append((peer, sent))
    while parting and time.monotonic() < deadline:
        while router.poll(0) and time.monotonic() < deadline:
            receive()  # others may have to get rid of something first
        parting = [
            (peer, buffer)
            for peer, buffer in parting
            if not (peer.is_gone or peer.guest.broken_at)
            and (not buffer.is_free() or (peer.loans.lent and not reason))
        ]
        if parting and parting[0][1].is_free(SEND_TURN_S):
            router.poll(int(1000 * SEND_TURN_S))  # for "taken"
