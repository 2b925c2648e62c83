"""Large buffers over ZeroMQ: cut into pieces, sent without a copy, received into place.

[front, piece]  [stamp, piece]  [stamp, piece] ...          stamp = message number, piece number
"""

from __future__ import annotations

import struct
import threading
import weakref
from typing import Any

import torch
import zmq

from shoal.errors import WireError
from shoal.wire.tree import memory_of, view_of

PIECE_BYTES = 2 * 2**20
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
    count = 0
    sent = []
    for tensor in tensors:
        array = memory_of(tensor)
        sent.append(SentMemory(array))
        pieces = [array] if tensor.nbytes <= PIECE_BYTES else cut(view_of(array))
        for piece in pieces:
            stamp = STAMP.pack(number, count) if count else head
            dealer.send(stamp, zmq.SNDMORE | zmq.DONTWAIT)
            dealer.send(piece, zmq.DONTWAIT, copy=False)
            count += 1
    return sent


def cut(view: memoryview) -> list[memoryview]:
    return [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)]


def fill(place: memoryview, frame: zmq.Frame) -> None:
    if len(frame) != len(place):
        raise WireError(f"{len(frame)} bytes came where {len(place)} were announced")
    place[:] = frame.buffer
