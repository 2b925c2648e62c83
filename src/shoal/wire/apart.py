"""A message taken apart: a plan that holds the plain values, and the buffers that it points to.

    {"x": tensor, "step": 3}    plan      ["d", ["x", "step"], [["b", 0], 3]]
                                slots     [Slot("float32", [16, 128])]
                                buffers   [the tensor's bytes]

In a plan, scalars stand for themselves and every list begins with a letter that says what it is.
Long text and long bytes are buffers too, so that plans stay small. Nothing in a plan can name a
class or a function: there is nothing to execute. `together.py` is the way back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.errors import WireError
from shoal.wire.slots import BYTES, DTYPE_NAMES, DTYPES, INT, TEXT, Slot, as_tensor, shape_fault
from shoal.wire.tree import Path, Tree

MAX_DEPTH = 64
MAX_OUTLINE_DEPTH = 8
INLINE_BYTES = 1024
"""Text and bytes up to this long stay in the plan."""
_SMALLEST_INT, _LARGEST_INT = -(2**63), 2**64 - 1  # what the encoding holds as a number

Stays = Callable[[torch.Tensor], bool]
"""Which tensors are sent from where they are, instead of through host memory."""


class Parcel:
    """A message taken apart."""

    __slots__ = ("buffers", "limit_bytes", "plan", "slots", "stays")

    def __init__(self, stays: Stays | None = None, limit_bytes: int | None = None) -> None:
        self.plan: Any = None
        self.slots: list[Slot] = []
        self.buffers: list[torch.Tensor] = []
        """Contiguous, in host memory (or staying). What lies so already is not copied."""
        self.stays = stays
        self.limit_bytes = limit_bytes


def take_apart(tree: Tree, stays: Stays | None = None, limit_bytes: int | None = None) -> Parcel:
    """Raises WireError, naming the place in the tree, for what cannot be sent.

    limit_bytes: no tensor that is larger is copied.
    """
    parcel = Parcel(stays, limit_bytes)
    parcel.plan = _plan(tree, parcel, ())
    return parcel


def _plan(value: Any, parcel: Parcel, path: Path) -> Any:
    if isinstance(value, torch.Tensor):
        if order := _order(value):
            back = [order.index(dimension) for dimension in range(len(order))]
            return ["p", back, _plan(value.permute(order), parcel, path)]
        if not value.is_nested and (fault := shape_fault(value.shape)):
            raise WireError(f"{_place(path)}: a tensor of {fault} cannot be sent.")
        kind = DTYPE_NAMES.get(value.dtype, "")
        stays = parcel.stays is not None and parcel.stays(value)
        if not kind or not _lies_well(value, stays):
            plain = _plain(value, stays, path, parcel.limit_bytes)
            return _buffer(kind, list(value.shape), plain, parcel, stays)
        return _buffer(kind, list(value.shape), value, parcel, stays)
    if len(path) > MAX_DEPTH:
        raise WireError(
            f"{_place(path[:3])}...: nested more than {MAX_DEPTH} deep (a list inside itself?)."
        )
    if isinstance(value, dict):
        keys = [_key(key, path) for key in value]
        return ["d", keys, [_plan(v, parcel, (*path, k)) for k, v in value.items()]]
    match value:
        case list() | tuple():
            letter = "l" if isinstance(value, list) else "t"
            inner = [_plan(v, parcel, (*path, i)) for i, v in enumerate(value)]
            return [letter, inner]
        case None | bool():
            return value
        case float():
            return float(value)  # numpy.float64 is one, but not to the encoder
        case int():
            if _SMALLEST_INT <= value <= _LARGEST_INT:
                return int(value)
            size = value.bit_length() // 8 + 1
            if size <= INLINE_BYTES:
                return ["i", hex(value)]
            content = value.to_bytes(size, "little", signed=True)
            return _buffer(INT, [size], as_tensor(bytearray(content)), parcel)
        case str():
            encoded = value.encode("utf-8", "surrogatepass")
            if len(encoded) <= INLINE_BYTES and encoded.isascii():
                return encoded.decode()
            return _buffer(TEXT, [len(encoded)], as_tensor(bytearray(encoded)), parcel)
        case bytes() | bytearray() | memoryview():
            content = bytes(value)
            if len(content) <= INLINE_BYTES:
                return ["y", content]
            return _buffer(BYTES, [len(content)], as_tensor(bytearray(content)), parcel)
    module, name = type(value).__module__, type(value).__name__
    whole_name = name if module == "builtins" else f"{module}.{name}"
    raise WireError(
        f"{_place(path)}: {whole_name} cannot be sent. What can: dict, list, tuple, "
        "None, bool, int, float, str, bytes and tensors."
    )


def _place(path: Path) -> str:
    return "message" + "".join(f"[{step!r}]" for step in path)


def _key(key: Any, path: Path) -> Any:
    if type(key) is str and key.isascii() and len(key) <= INLINE_BYTES:
        return key
    if isinstance(key, bytes) and len(key) <= INLINE_BYTES:
        return ["y", key]
    if isinstance(key, str) and len(key.encode("utf-8", "surrogatepass")) <= INLINE_BYTES:
        return ["s", key.encode("utf-8", "surrogatepass")]
    if key is None or isinstance(key, bool):
        return key
    if isinstance(key, float):
        return float(key)
    if isinstance(key, int) and key.bit_length() // 8 < INLINE_BYTES:
        return int(key) if _SMALLEST_INT <= key <= _LARGEST_INT else ["i", hex(key)]
    raise WireError(
        f"{_place(path)}: a dict key must be None, bool, float, or int, str or bytes of at most "
        f"{INLINE_BYTES} bytes; got {type(key).__name__}."
    )


def _order(tensor: torch.Tensor) -> list[int] | None:
    """The order of dimensions in which its memory is in one piece, if that is not its own.

    Channels-last, for one: it is to lie there as it lies here, else sums would be made in another
    order, and be others by a rounding.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
    return order if tensor.permute(order).is_contiguous() else None


def lies_in_one_piece(tensor: torch.Tensor) -> bool:
    """Whether it arrives as it lies; else with its gaps closed, and repetitions copied."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return True  # which says nothing of its memory, nor can it be sent
    return tensor.is_contiguous() or _order(tensor) is not None


def _lies_well(tensor: torch.Tensor, stays: bool) -> bool:
    """Whether its memory can be sent as it is."""
    return (
        tensor.layout is torch.strided  # others cannot even be asked what follows
        and not tensor.is_nested
        and (tensor.is_cpu or stays)
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def _plain(tensor: torch.Tensor, stays: bool, path: Path, limit_bytes: int | None) -> torch.Tensor:
    """A tensor of the same values that lies well."""
    if tensor.layout != torch.strided or tensor.is_nested:
        what = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise WireError(
            f"{_place(path)}: a {what} tensor cannot be sent. Make it dense first, or send its "
            "parts as a list."
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise WireError(
            f"{_place(path)}: a tensor of {tensor.dtype} cannot be sent. Make it one of: "
            + ", ".join(DTYPES)
            + "."
        )
    if tensor.is_meta:
        raise WireError(f"{_place(path)}: a tensor on the meta device has no values to send.")
    if limit_bytes is not None and tensor.nbytes > limit_bytes:  # an expanded one may be any size
        raise WireError(
            f"{_place(path)}: a tensor of {tensor.nbytes} bytes; the limit is {limit_bytes}"
        )
    try:
        plain = tensor.detach().resolve_conj().resolve_neg()
        plain = plain if stays else plain.cpu()
        if plain.dtype == torch.complex32:
            plain = plain.view(torch.int32)  # the same bytes; torch warns of new complex32
        return plain.contiguous()
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise WireError(
            f"{_place(path)}: there is no memory for a copy of a tensor of {tensor.nbytes} bytes. "
            "It is expanded, has gaps, or is on a GPU, and is copied to be sent: send it in parts."
        ) from error


def _buffer(
    kind: str, shape: list[int], content: torch.Tensor, parcel: Parcel, stays: bool = False
) -> list[Any]:
    parcel.slots.append(Slot(kind, shape, stays))
    parcel.buffers.append(content)
    return ["b", len(parcel.slots) - 1]


def outline_of(tree: Tree, memory: list[Any], depth: int = 0) -> Any:
    """What trees with the same plan and the same slots have in common; None where it cannot tell.

    Costs a fraction of taking the tree apart. memory: gets the buffers, in their order, as
    `memory_of` has them.
    """
    kind = type(tree)
    if kind is torch.Tensor:
        try:
            array = tree.numpy()  # which fails for all that does not lie well, but one
        except (RuntimeError, TypeError, ValueError):
            return None
        if array.flags.c_contiguous:
            memory.append(array)
            return array.dtype.char, array.shape
        if (order := _order(tree)) is None:
            return None
        memory.append(array.transpose(order))
        return array.dtype.char, array.shape, tuple(order)
    outline: list[Any] = [kind]
    if kind is dict and depth < MAX_OUTLINE_DEPTH:
        for key, value in tree.items():
            inner = outline_of(value, memory, depth + 1)
            if inner is None or type(key) is not str:
                return None
            outline += key, inner
    elif kind in (list, tuple) and depth < MAX_OUTLINE_DEPTH:
        for value in tree:
            inner = outline_of(value, memory, depth + 1)
            if inner is None:
                return None
            outline.append(inner)
    elif kind is bool or tree is None:
        outline.append(tree)
    else:  # numbers differ from message to message, and long text is a buffer
        return None
    return tuple(outline)
