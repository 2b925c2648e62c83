"""A message taken apart: a plan that holds the plain values, and the buffers that it points to.

    {"x": tensor, "step": 3}    plan      ["d", ["x", "step"], [["b", 0], 3]]
                                slots     [Slot("float32", [16, 128])]
                                buffers   [the tensor's bytes]

In a plan, scalars stand for themselves and every list begins with a letter that says what it is.
Long text and long bytes are buffers too, so that plans stay small. Nothing in a plan can name a
class or a function: there is nothing to execute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import torch

from shoal.errors import WireError

Tree: TypeAlias = Any
"""dict, list, tuple, None, bool, int, float, str, bytes and tensors, nested."""

MAX_DEPTH = 64
MAX_DIMENSIONS = 64
INLINE_BYTES = 1024
"""Text and bytes up to this long stay in the plan."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
        "complex128", "complex64", "complex32",
        "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
    )
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TEXT, BYTES = "text", "bytes"

_SMALLEST_INT, _LARGEST_INT = -(2**63), 2**64 - 1  # what the encoding holds as a number


class Slot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one buffer is."""

    kind: str
    """A dtype's name, or `text`, or `bytes`."""
    shape: list[int]

    @property
    def size_bytes(self) -> int:
        item = 1 if self.kind in (TEXT, BYTES) else DTYPES[self.kind].itemsize
        return item * math.prod(self.shape)


@dataclass(frozen=True)
class Parcel:
    """A message taken apart."""

    plan: Any
    slots: list[Slot]
    buffers: list[torch.Tensor]
    """One dimension of uint8 each, in host memory. A tensor that is so already is not copied."""


# -- apart -----------------------------------------------------------------------------------------


def take_apart(tree: Tree) -> Parcel:
    """Raises WireError, naming the place in the tree, for what cannot be sent."""
    parcel = Parcel(None, [], [])
    plan = _plan(tree, parcel, "message", 0)
    return Parcel(plan, parcel.slots, parcel.buffers)


def _plan(value: Any, parcel: Parcel, where: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise WireError(f"{where}: nested more than {MAX_DEPTH} deep (a list inside itself?).")
    match value:
        case None | bool() | float():
            return value
        case int():
            return value if _SMALLEST_INT <= value <= _LARGEST_INT else ["i", hex(value)]
        case str():
            encoded = value.encode("utf-8", "surrogatepass")
            if len(encoded) <= INLINE_BYTES and encoded.isascii():
                return value
            return _buffer(TEXT, [len(encoded)], _bytes_tensor(encoded), parcel)
        case bytes() | bytearray() | memoryview():
            content = bytes(value)
            if len(content) <= INLINE_BYTES:
                return ["y", content]
            return _buffer(BYTES, [len(content)], _bytes_tensor(content), parcel)
        case torch.Tensor():
            return _tensor(value, parcel, where)
        case dict():
            keys = [_key(key, where) for key in value]
            inner = [_plan(v, parcel, f"{where}[{k!r}]", depth + 1) for k, v in value.items()]
            return ["d", keys, inner]
        case list() | tuple():
            letter = "l" if isinstance(value, list) else "t"
            inner = [_plan(v, parcel, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
            return [letter, inner]
    raise WireError(
        f"{where}: a {type(value).__name__} cannot be sent. What can: dict, list, tuple, None, "
        "bool, int, float, str, bytes and tensors."
    )


def _key(key: Any, where: str) -> Any:
    if isinstance(key, bytes) and len(key) <= INLINE_BYTES:
        return ["y", key]
    if isinstance(key, str) and len(key.encode("utf-8", "surrogatepass")) <= INLINE_BYTES:
        return key if key.isascii() else ["s", key.encode("utf-8", "surrogatepass")]
    if key is None or isinstance(key, bool | float):
        return key
    if isinstance(key, int):
        return key if _SMALLEST_INT <= key <= _LARGEST_INT else ["i", hex(key)]
    raise WireError(
        f"{where}: a dict key must be None, bool, int, float, or str or bytes of at most "
        f"{INLINE_BYTES} bytes; got {type(key).__name__}."
    )


def _tensor(tensor: torch.Tensor, parcel: Parcel, where: str) -> Any:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPE_NAMES:
        raise WireError(
            f"{where}: a {tensor.dtype} tensor of layout {tensor.layout} cannot be sent. Make it "
            "dense first, of one of: " + ", ".join(DTYPES) + "."
        )
    if tensor.is_meta:
        raise WireError(f"{where}: a tensor on the meta device has no values to send.")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if plain.dtype == torch.complex32:
        plain = plain.view(torch.int32)  # the same bytes; torch warns of every new complex32
    content = bytes_of(plain.contiguous())
    return _buffer(DTYPE_NAMES[tensor.dtype], list(tensor.shape), content, parcel)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, seen as one dimension of uint8."""
    # Not view(-1): a contiguous tensor of one element may have any stride, and keeps it.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _buffer(kind: str, shape: list[int], content: torch.Tensor, parcel: Parcel) -> list[Any]:
    parcel.slots.append(Slot(kind, shape))
    parcel.buffers.append(content)
    return ["b", len(parcel.slots) - 1]


def _bytes_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


# -- checked and together --------------------------------------------------------------------------


def check_slots(slots: list[Slot], limit_bytes: int) -> int:
    """The bytes that these slots need; WireError if any is absurd or all exceed the limit.

    Called before anything is allocated: slots come from the other side.
    """
    total = 0
    for number, slot in enumerate(slots):
        if slot.kind not in DTYPES and slot.kind not in (TEXT, BYTES):
            raise WireError(f"buffer {number}: unknown kind {slot.kind[:40]!r}")
        plain = slot.kind in (TEXT, BYTES)
        if len(slot.shape) > MAX_DIMENSIONS or (plain and len(slot.shape) != 1):
            raise WireError(f"buffer {number}: {len(slot.shape)} dimensions")
        if any(extent < 0 or extent > 2**62 for extent in slot.shape):
            raise WireError(f"buffer {number}: impossible shape")
        total += slot.size_bytes
        if total > limit_bytes:
            raise WireError(f"the buffers need more than the limit of {limit_bytes} bytes")
    return total


def allocate(slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty tensor for a slot, and its bytes to be received into."""
    room = torch.empty(slot.size_bytes, dtype=torch.uint8)
    return room.view(DTYPES.get(slot.kind, torch.uint8)).view(slot.shape), room


def put_together(plan: Any, slots: list[Slot], tensors: list[torch.Tensor]) -> Tree:
    """The message again. Raises WireError where the plan is not one that `take_apart` makes."""
    used = [False] * len(slots)
    try:
        tree = _build(plan, slots, tensors, used, 0)
    except (RecursionError, ValueError, TypeError) as error:
        raise WireError(f"the plan makes no sense: {error}") from error
    if not all(used):
        raise WireError("a buffer came that the plan does not use")
    return tree


def _build(
    plan: Any, slots: list[Slot], tensors: list[torch.Tensor], used: list[bool], depth: int
) -> Tree:
    if depth > MAX_DEPTH:
        raise WireError(f"the plan is nested more than {MAX_DEPTH} deep")
    if plan is None or isinstance(plan, bool | int | float | str):
        return plan
    match plan:
        case ["i", str(digits)] if len(digits) <= 2 * INLINE_BYTES:
            return int(digits, 16)
        case ["y", bytes(content)]:
            return content
        case ["b", int(number)] if 0 <= number < len(slots) and not used[number]:
            used[number] = True
            if slots[number].kind == TEXT:
                return _content(tensors[number]).decode("utf-8", "surrogatepass")
            return _content(tensors[number]) if slots[number].kind == BYTES else tensors[number]
        case ["l", list(items)]:
            return [_build(item, slots, tensors, used, depth + 1) for item in items]
        case ["t", list(items)]:
            return tuple(_build(item, slots, tensors, used, depth + 1) for item in items)
        case ["d", list(keys), list(values)] if len(keys) == len(values):
            made = {
                _build_key(key): _build(value, slots, tensors, used, depth + 1)
                for key, value in zip(keys, values, strict=True)
            }
            if len(made) != len(keys):
                raise WireError("the plan has a dict with the same key twice")
            return made
    raise WireError("the plan has something that no message has")


def _build_key(key: Any) -> Any:
    if key is None or isinstance(key, bool | int | float | str):
        return key
    match key:
        case ["y", bytes(content)]:
            return content
        case ["s", bytes(content)]:
            return content.decode("utf-8", "surrogatepass")
        case ["i", str(digits)] if len(digits) <= 2 * INLINE_BYTES:
            return int(digits, 16)
    raise WireError("the plan has a dict key that no message has")


def _content(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
