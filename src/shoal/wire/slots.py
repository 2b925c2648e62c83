"""The buffers of a message: what each is said to be (a slot), and the memory of a tensor.

Slots come from the other side: they are checked before anything is allocated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy
import torch

from shoal.errors import WireError
from shoal.wire.blocks import ALIGNMENT, Blocks, fresh

MAX_DIMENSIONS = 64
MAX_ELEMENTS = 2**48
HUGE_BYTES = 4 * 2**20
LARGEST_LESSON_BYTES = 32 * 2**20 - 64 * 1024

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
        "complex128", "complex64", "complex32",
        "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
        "float4_e2m1fn_x2",
    )
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TEXT, BYTES, INT = "text", "bytes", "int"
PLAIN = (TEXT, BYTES, INT)
"""Kinds of buffers that hold no tensor."""
_NUMPY_KINDS = {name: numpy.dtype(name) for name in DTYPES if name in numpy.sctypeDict}
_NUMPY = {DTYPES[name] for name in _NUMPY_KINDS}
_LONG = [name for name, dtype in DTYPES.items() if dtype.itemsize > 8]


class Slot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one buffer is."""

    kind: str
    """A dtype's name, or `text`, `bytes` or `int`."""
    shape: list[int]
    is_on_gpu: bool = False
    """Goes from GPU to GPU, where the transport can do that."""

    @property
    def size_bytes(self) -> int:
        item = 1 if self.kind in PLAIN else DTYPES[self.kind].itemsize
        return item * math.prod(self.shape)


def check_slots(slots: list[Slot], limit_bytes: int) -> int:
    """The bytes that these slots need; WireError if any is absurd or all exceed the limit.

    Called before anything is allocated: slots come from the other side.
    """
    total = 0
    for number, slot in enumerate(slots):
        plain = slot.kind in PLAIN
        if not plain and slot.kind not in DTYPES:
            raise WireError(f"buffer {number}: unknown kind {slot.kind[:40]!r}")
        if plain and len(slot.shape) != 1:
            raise WireError(f"buffer {number}: {len(slot.shape)} dimensions")
        if fault := shape_fault(slot.shape):
            raise WireError(f"buffer {number}: {fault}")
        total += slot.size_bytes
        if total > limit_bytes:
            raise WireError(f"the buffers need more than the limit of {limit_bytes} bytes")
    return total


def shape_fault(shape: Sequence[int]) -> str:
    """What is wrong with a shape, if anything."""
    if len(shape) > MAX_DIMENSIONS:
        return f"{len(shape)} dimensions ({MAX_DIMENSIONS} is the most)"
    # Also where one extent is 0: torch multiplies the others all the same.
    if min(shape, default=0) < 0 or math.prod(extent or 1 for extent in shape) > MAX_ELEMENTS:
        return f"an impossible shape (more than {MAX_ELEMENTS:,} elements, zeros taken as ones)"
    return ""


# -- memory ----------------------------------------------------------------------------------------


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, seen as one dimension of uint8."""
    if tensor.dtype == torch.complex32:
        tensor = tensor.view(torch.int32)
    # Not view(-1): a contiguous tensor of one element may have any stride, and keeps it.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor as an array of numpy's, of whatever dtype and shape."""
    return (tensor if tensor.dtype in _NUMPY else bytes_of(tensor)).numpy()


def view_of(array: Any) -> memoryview:
    """The memory of an array, as bytes."""
    return memoryview(array.reshape(-1).view(numpy.uint8))


def as_tensor(content: Any) -> torch.Tensor:
    """Memory that is ours alone, seen as bytes of a tensor."""
    if not len(content):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(content, dtype=torch.uint8)


def allocate(slot: Slot, blocks: Blocks | None = None) -> torch.Tensor:
    """An empty tensor for a slot. blocks: where memory may come from that was used before."""
    size = slot.size_bytes
    try:
        if size >= HUGE_BYTES:  # numpy asks for huge pages, which spares most page faults
            room = torch.from_numpy(blocks.take(size) if blocks else fresh(size))
        else:
            room = torch.empty(size, dtype=torch.uint8)
    except (MemoryError, RuntimeError) as error:
        raise WireError(f"there is no memory for a tensor of {size} bytes") from error
    return room.view(DTYPES.get(slot.kind, torch.uint8)).view(slot.shape)


def shaped(slot: Slot, content: Any) -> torch.Tensor:
    """Memory that is ours alone, as the tensor that a slot says it is. Not copied.

    But for numbers that are longer than a word: torch's own code for them crashes where they do not
    begin at a multiple of their size, and ZeroMQ's memory does not.
    """
    if not len(content):
        return allocate(slot)
    if slot.kind in _LONG:
        tensor = allocate(slot)
        view_of(memory_of(tensor))[:] = content
        return tensor
    tensor = torch.frombuffer(content, dtype=DTYPES.get(slot.kind, torch.uint8))
    return tensor if len(slot.shape) == 1 else tensor.view(slot.shape)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same, where torch would have put it."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


Shape = Callable[[Any], torch.Tensor]


def shaper(slot: Slot) -> Shape:
    """`shaped`, for one slot, in one call of torch's."""
    kind, shape = _NUMPY_KINDS.get(slot.kind), tuple(slot.shape)
    if kind is None or not slot.size_bytes or slot.kind in _LONG:
        return functools.partial(shaped, slot)
    if len(shape) == 1:
        return functools.partial(torch.frombuffer, dtype=DTYPES[slot.kind])
    return lambda content: torch.from_numpy(numpy.ndarray(shape, kind, content))


def keep_memory() -> None:
    """Let the C library keep the memory of what came for what comes next.

    From the largest block that was freed it learns from where on to give memory back to the system
    at once (mallopt(3), M_MMAP_THRESHOLD); it begins at 128 KiB, and every large tensor would come
    with page faults. A block that is never touched costs nothing.
    """
    bytes(LARGEST_LESSON_BYTES)
