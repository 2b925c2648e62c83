"""Large buffers over ZeroMQ: cut into pieces, sent without a copy, received into place.

[front, buffer]                                 one buffer that is not too large: all at once
[front]  [stamp, piece]  [stamp, piece] ...     else; stamp = message number, piece number

What comes in many pieces is received into place, and its front goes ahead: it has been read and
checked, and the places are there, while the first piece is on its way.
"""

from __future__ import annotations

import struct
import threading
import weakref
from typing import Any

import zmq
import zmq.utils.garbage  # ends at exit: after all who register later, and still send then

from shoal.errors import WireError
from shoal.wire.front import Front, Memory
from shoal.wire.inbox import Inbox
from shoal.wire.slots import view_of

send: Any = zmq.backend.Socket.send
"""What every send comes to, without the step before it for options that nobody uses here."""
MORE, LAST = int(zmq.SNDMORE | zmq.DONTWAIT), int(zmq.DONTWAIT)
"""How frames are sent. Numbers, since enums take longer to be put together than a front."""
PIECE_BYTES = 2**20
WHOLE_BYTES = 4 * 2**20
"""At most, of a buffer that goes whole: the memory it comes in becomes the tensor's. Beyond this
ZeroMQ is slow with it."""
STAMP = struct.Struct("<QI")


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
    dealer: zmq.Socket[bytes], head: bytes, number: int, buffers: list[Memory]
) -> list[SentMemory]:
    """The front and all pieces behind it. Returns what tells that they have gone."""
    sent = list(map(SentMemory, buffers))
    if len(buffers) == 1 and buffers[0].nbytes <= WHOLE_BYTES:  # see `is_whole`
        send(dealer, head, MORE)
        send(dealer, buffers[0], LAST, copy=False)
        return sent
    send(dealer, head, LAST)
    count = 0
    for buffer in buffers:
        for piece in [buffer] if buffer.nbytes <= PIECE_BYTES else cut(view_of(buffer)):
            send(dealer, STAMP.pack(number, count), MORE)
            send(dealer, piece, LAST, copy=False)
            count += 1
    return sent


def is_whole(front: Front) -> bool:
    """Whether what is not in a front comes right behind it: one buffer, not too large."""
    return len(front.behind) == 1 and front.sizes[front.behind[0]] <= WHOLE_BYTES


def cut(view: memoryview) -> list[memoryview]:
    return [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)]


class Due:
    """A message whose front has come, and whose pieces come next."""

    def __init__(
        self, inbox: Inbox, peer: int, number: int, front: Front, small: list[bytearray]
    ) -> None:
        """small: what came with the front already."""
        self._inbox = inbox
        self._number = number
        self._count = 0
        self._arrival = inbox.arrive(peer, front)
        self._behind = front.behind
        for (slot, _, _), content in zip(front.small, small, strict=True):
            self._arrival.take(slot, content)
        self._places = [p for slot in front.behind for p in cut(self._arrival.room(slot))]
        self._places.reverse()  # the next one last

    def move_if_must(self) -> None:
        """Out of places that somebody brought and wants back; the other pieces go elsewhere."""
        if self._arrival.must_move:
            self._inbox.move(self._arrival)
            places = [p for slot in self._behind for p in cut(self._arrival.memory(slot))]
            self._places = places[self._count :][::-1]

    def check(self, stamp: memoryview) -> None:
        """What stands before the next piece."""
        if len(stamp) != STAMP.size or STAMP.unpack(stamp) != (self._number, self._count):
            raise WireError(f"something else came where piece {self._count} of a message was due")

    @property
    def place(self) -> memoryview:
        """Where the next piece goes."""
        return self._places[-1]

    def fill(self, size: int) -> bool:
        """So many bytes came for the place; whether it was the last."""
        check_size(size, len(self._places.pop()))
        self._count += 1
        if not self._places:
            self._inbox.deliver(self._arrival)
        return not self._places


def check_size(actual: int, announced: int) -> None:
    if actual != announced:
        raise WireError(f"{actual} bytes came where {announced} were announced")
