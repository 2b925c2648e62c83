"""The front of a message: what goes before its large buffers, in one piece.

    message number (8) | length of header (4) | header | plan, if not in the header | small buffers

Small buffers are copied here, since a copy costs less than a frame of its own; large ones go
behind, as they lie. Sender and receiver know from the sizes alone which is which.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, TypeAlias

import torch

from shoal.errors import WireError
from shoal.wire.apart import Parcel, Stays, outline_of, take_apart
from shoal.wire.header import MAX_HEADER_BYTES, MAX_PLAN_BYTES, decode, decode_plan, encode
from shoal.wire.slots import Shape, Slot, memory_of, shaper
from shoal.wire.together import Recipe, read_plan
from shoal.wire.tree import Tree

SMALL_BYTES = 64 * 1024
"""A buffer below this is small, as long as all small ones together stay below the next."""
MAX_SMALL_BYTES = 2**20

_PREFIX = struct.Struct("<QI")
_NUMBER_BYTES = 8
MAX_FRONT_BYTES = _PREFIX.size + MAX_HEADER_BYTES + MAX_PLAN_BYTES + MAX_SMALL_BYTES
MAX_REMEMBERED = 256
MAX_REMEMBERED_BYTES = 4096


class Front(NamedTuple):
    """What the header of a front says, read and checked."""

    tag: str
    slots: list[Slot]
    recipe: Recipe
    small: list[tuple[int, int, int]]
    """Slots whose bytes came along: number, and where in the front they begin and end."""
    behind: list[int]
    """Numbers of the slots whose bytes come behind, in order."""
    size: int
    sizes: list[int]
    """Bytes of each slot."""
    shapers: list[Shape]
    """Of each slot: what makes its tensor of memory that is ours alone."""

    def build(self, tensors: list[torch.Tensor]) -> Tree:
        """The message, of the tensors of its slots."""
        try:
            return self.recipe.build(tensors)
        except ValueError as error:
            raise WireError(f"text that is none: {error}") from error


Memory: TypeAlias = Any
"""What goes behind a front: a buffer as `memory_of` has it, or a tensor that stays on its GPU."""


def pack(parcel: Parcel, tag: str, number: int, limit_bytes: int) -> tuple[bytes, list[Memory]]:
    """The front, and what goes behind it."""
    buffers = parcel.buffers
    sizes = [buffer.nbytes for buffer in buffers]
    total = sum(sizes)
    if total > limit_bytes:
        raise WireError(f"a message of {total} bytes; the limit is {limit_bytes}")
    header, plan = encode(parcel, tag, total)
    prefix = _PREFIX.pack(number, len(header))
    if total < SMALL_BYTES and parcel.stays is None:
        return b"".join([prefix, header, plan, *map(memory_of, buffers)]), []
    small, behind = _sorted(sizes, parcel.slots)
    packed = [memory_of(buffers[each]) for each in small]
    return b"".join([prefix, header, plan, *packed]), [
        buffers[each] if parcel.slots[each].is_on_gpu else memory_of(buffers[each])
        for each in behind
    ]


class Packer:
    """Makes the fronts for one peer.

    A tree of the same outline as an earlier one has the same header, which need not be made again.
    """

    def __init__(self, limit_bytes: int, stays: Stays | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._stays = stays
        self._headers: dict[Any, tuple[bytes, bool]] = {}
        """With whether all buffers are small."""

    def pack(self, tree: Tree, tag: str, number: int) -> tuple[bytes, list[Memory]]:
        """Like `pack`, of a tree."""
        memory: list[Memory] = []
        outline = outline_of(tree, memory) if self._stays is None else None
        if outline is None:
            return pack(
                take_apart(tree, self._stays, self._limit_bytes), tag, number, self._limit_bytes
            )
        known = self._headers.get((tag, outline))
        if known is None:
            head, behind = pack(
                take_apart(tree, None, self._limit_bytes), tag, number, self._limit_bytes
            )
            header = _header_in(head)
            if len(behind) in (0, len(memory)) and len(header) <= MAX_REMEMBERED_BYTES:
                if len(self._headers) >= MAX_REMEMBERED:
                    self._headers.clear()
                self._headers[tag, outline] = header, not behind
            return head, behind
        header, is_small = known
        prefix = _PREFIX.pack(number, len(header))
        if is_small:
            return b"".join([prefix, header, *memory]), []
        return prefix + header, memory


def without_number(head: bytes) -> bytes:
    """What a front says of its message, whichever it is."""
    return head[_NUMBER_BYTES:]


def _header_in(head: bytes) -> bytes:
    _, length = _PREFIX.unpack_from(head)
    return head[_PREFIX.size : _PREFIX.size + length]


class FrontReader:
    """Reads the fronts of one peer.

    A front of the same layout as an earlier one need not be checked again, which is what makes a
    steady stream of small messages cheap.
    """

    def __init__(self, limit_bytes: int, *, has_gpu: bool = False) -> None:
        self._limit_bytes = limit_bytes
        self._has_gpu = has_gpu
        self._seen: dict[bytes, Front] = {}

    def read(self, data: memoryview) -> tuple[int, Front]:
        """The message's number, counted from 0, and all else.

        Believe nothing: raises WireError for whatever `pack` would not have made.
        """
        if len(data) < _PREFIX.size:
            raise WireError(f"a front of {len(data)} bytes is none")
        number, length = _PREFIX.unpack_from(data)
        if length > MAX_HEADER_BYTES:
            raise WireError(f"a header of {length} bytes; {MAX_HEADER_BYTES} is the most")
        header_bytes = bytes(data[_PREFIX.size : _PREFIX.size + length])
        front = self._seen.get(header_bytes)
        if front is None:
            front = self._read(header_bytes, data)
        if front.size != len(data):
            raise WireError(f"a front of {len(data)} bytes; its header makes it {front.size}")
        return number, front

    def _read(self, header_bytes: bytes, data: memoryview) -> Front:
        header = decode(header_bytes, self._limit_bytes)
        at = _PREFIX.size + len(header_bytes)
        remember = len(header_bytes) <= MAX_REMEMBERED_BYTES and not header.plan_bytes
        if header.plan_bytes:
            plan = data[at : at + header.plan_bytes]
            header = decode_plan(header, plan, self._limit_bytes)
            at += header.plan_bytes
        if not self._has_gpu and any(slot.is_on_gpu for slot in header.slots):
            raise WireError("a buffer for a GPU, and this side of the link has none")
        sizes = [slot.size_bytes for slot in header.slots]
        numbers, behind = _sorted(sizes, header.slots)
        small = []
        for each in numbers:
            small.append((each, at, at + sizes[each]))
            at += sizes[each]
        recipe = read_plan(header.plan, header.slots)
        shapers = [shaper(slot) for slot in header.slots]
        front = Front(header.tag, header.slots, recipe, small, behind, at, sizes, shapers)
        if remember:
            if len(self._seen) >= MAX_REMEMBERED:
                self._seen.clear()
            self._seen[header_bytes] = front
        return front


def _sorted(sizes: list[int], slots: list[Slot]) -> tuple[list[int], list[int]]:
    """Which buffers go in the front, and which behind."""
    small, behind, room = [], [], MAX_SMALL_BYTES
    for number, size in enumerate(sizes):
        if size < SMALL_BYTES and size <= room and not slots[number].is_on_gpu:
            small.append(number)
            room -= size
        else:
            behind.append(number)
    return small, behind
