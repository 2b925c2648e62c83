"""What a message over gloo begins with: its front, or the buffer that stands for it.

A front that has been said twice is not said again: from then on the first buffer goes in its place,
until a message has another front. So a steady stream of equal shapes is one piece of gloo's a
message, as if both sides knew the shape.

A receive of gloo's takes what is shorter than its room, and does not tell how much came. So the
room ends with a mark that nobody else knows:

    | ........................................... mark |    waiting
    | length  front ............................. mark |    a front came
    | the buffer, whole ............................... |    a buffer came
"""

from __future__ import annotations

import os
import struct
from typing import Any

import torch

from shoal.errors import WireError
from shoal.wire.front import MAX_FRONT_BYTES, Front, Memory
from shoal.wire.slots import allocate, bytes_of, view_of

LEAST_ROOM_BYTES = 32 * 1024
MOST_ROOM_BYTES = 4 * 2**20
MARK_BYTES = 16
MAX_PIECE_BYTES = LEAST_ROOM_BYTES - MARK_BYTES
"""Of a front that goes in one piece; the rest of a longer one goes in another."""

_LENGTH = struct.Struct("<I")
MOST_IN_ONE_PIECE_BYTES = MAX_PIECE_BYTES - _LENGTH.size
"""What `with_length` gets if it is to go in one piece."""
_SIGN = 1 << 31
"""Set in the length of what is no message but a sign."""


def with_length(front: bytes, *, is_sign: bool = False) -> bytes:
    """A front, or a sign, as it goes."""
    return _LENGTH.pack(len(front) | (_SIGN if is_sign else 0)) + front


def may_stand(buffers: list[Memory]) -> bool:
    """Whether the first of them may stand for a front: it fills a room that a front never does."""
    if not buffers or isinstance(buffers[0], torch.Tensor):
        return False
    return _fits(buffers[0].nbytes)


def _fits(size_bytes: int) -> bool:
    return LEAST_ROOM_BYTES <= size_bytes <= MOST_ROOM_BYTES


class Room:
    """Where what the next message begins with will be."""

    __slots__ = ("_mark", "content", "front", "place", "tensor", "work")

    def __init__(self, front: Front | None) -> None:
        """front: what has been said twice, and may be left out now."""
        self.front = front
        self.tensor: torch.Tensor | None = None
        """The buffer that may come, as what it is."""
        if front and front.behind:
            slot = front.slots[front.behind[0]]
            if _fits(slot.size_bytes) and not slot.is_on_gpu:
                self.tensor = allocate(slot)
        if self.tensor is None:
            self.place = torch.empty(LEAST_ROOM_BYTES, dtype=torch.uint8)
        else:
            self.place = bytes_of(self.tensor)
        self.content = view_of(self.place.numpy())
        self.work: Any = None
        """The receive that waits for it."""
        self._mark = b""

    def make_ready(self) -> None:
        self._mark = os.urandom(MARK_BYTES)
        self.content[-MARK_BYTES:] = self._mark

    @property
    def is_full(self) -> bool:
        """Whether it was no front that came."""
        return self.content[-MARK_BYTES:] != self._mark

    def read(self) -> tuple[bool, int, bytes]:
        """Whether it is a sign; how long it is; and it, or as much of it as goes in one piece."""
        (length,) = _LENGTH.unpack_from(self.content)
        is_sign, length = bool(length & _SIGN), length & ~_SIGN
        if not 0 < length <= MAX_FRONT_BYTES:
            raise WireError(f"a front of {length} bytes; {MAX_FRONT_BYTES} is the most")
        end = min(_LENGTH.size + length, MAX_PIECE_BYTES)
        return is_sign, length, bytes(self.content[_LENGTH.size : end])
