"""Large buffers over ZeroMQ: cut into pieces, sent without a copy, received into place.

[front]  [stamp, piece]  [stamp, piece] ...          stamp = message number, piece number

The front goes ahead, so that it has been read and checked while the first piece is on its way.
"""

from __future__ import annotations

import struct
import threading
import weakref
from typing import Any

import torch
import zmq

from shoal.errors import WireError
from shoal.wire.front import Front
from shoal.wire.inbox import Inbox
from shoal.wire.tree import memory_of, view_of

send: Any = zmq.backend.Socket.send
"""What every send comes to, without the step before it for options that nobody uses here."""
PIECE_BYTES = 2**20
LARGEST_LESSON_BYTES = 32 * 2**20 - 64 * 1024
STAMP = struct.Struct("<QI")


def keep_memory() -> None:
    """Let the C library keep the memory of pieces for the next ones.

    From the largest block that was freed it learns from where on to give memory back to the system
    at once (mallopt(3), M_MMAP_THRESHOLD); it begins at 128 KiB, and every piece would come with
    page faults. A block that is never touched costs nothing.
    """
    bytes(LARGEST_LESSON_BYTES)


class SentMemory:
    """Memory that ZeroMQ is sending from, until nobody refers to it any more.

    Tells as much as pyzmq's own trackers, for a tenth of their cost.
    """

    __slots__ = ("_free", "_watch")

    def __init__(self, array: Any) -> None:
        self._free = threading.Lock()
        self._free.acquire()
        self._watch = weakref.ref(array, lambda _: self._free.release())

    def is_free(self, limit_s: float = 0) -> bool:
        """Whether it is; after waiting for it so many seconds at most."""
        free = self._free.acquire(timeout=limit_s)
        if free:
            self._free.release()
        return free


def send_pieces(
    dealer: zmq.Socket[bytes], head: bytes, number: int, tensors: list[torch.Tensor]
) -> list[SentMemory]:
    """The front and all pieces behind it. Returns what tells that they have gone."""
    send(dealer, head, zmq.DONTWAIT)
    count = 0
    sent = []
    for tensor in tensors:
        array = memory_of(tensor)
        sent.append(SentMemory(array))
        pieces = [array] if tensor.nbytes <= PIECE_BYTES else cut(view_of(array))
        for piece in pieces:
            send(dealer, STAMP.pack(number, count), zmq.SNDMORE | zmq.DONTWAIT)
            send(dealer, piece, zmq.DONTWAIT, copy=False)
            count += 1
    return sent


def cut(view: memoryview) -> list[memoryview]:
    return [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)]


class Due:
    """A message whose front has come, and whose pieces come next."""

    def __init__(
        self, inbox: Inbox, peer: int, number: int, front: Front, small: list[bytearray]
    ) -> None:
        """small: what came with the front already."""
        self._inbox = inbox
        self._peer = peer
        self._number = number
        self._front = front
        self._count = 0
        self._is_one = len(front.sizes) == 1 and front.sizes[0] <= PIECE_BYTES
        if self._is_one:
            return
        self._arrival = inbox.arrive(peer, front)
        for (slot, _, _), content in zip(front.small, small, strict=True):
            self._arrival.take(slot, content)
        self._places = [p for slot in front.behind for p in cut(self._arrival.room(slot))]
        self._places.reverse()  # the next one last

    def check(self, stamp: memoryview) -> None:
        """What stands before the next piece."""
        if len(stamp) != STAMP.size or STAMP.unpack(stamp) != (self._number, self._count):
            raise WireError(f"something else came where piece {self._count} of a message was due")

    @property
    def place(self) -> memoryview | None:
        """Where the next piece goes. None: nowhere, its own memory will do."""
        return None if self._is_one else self._places[-1]

    def adopt(self, piece: zmq.Frame) -> None:
        """All of the message that was missing."""
        _check_size(len(piece), self._front.sizes[0])
        self._inbox.deliver_whole(self._peer, self._front, [piece.buffer])

    def fill(self, size: int) -> bool:
        """So many bytes came for the place; whether it was the last."""
        _check_size(size, len(self._places.pop()))
        self._count += 1
        if not self._places:
            self._inbox.deliver(self._arrival)
        return not self._places


def _check_size(actual: int, announced: int) -> None:
    if actual != announced:
        raise WireError(f"{actual} bytes came where {announced} were announced")
