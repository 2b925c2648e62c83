"""A message taken apart: a plan that holds the plain values, and the buffers that it points to.

    {"x": tensor, "step": 3}    plan      ["d", ["x", "step"], [["b", 0], 3]]
                                slots     [Slot("float32", [16, 128])]
                                buffers   [the tensor's bytes]

In a plan, scalars stand for themselves and every list begins with a letter that says what it is.
Long text and long bytes are buffers too, so that plans stay small. Nothing in a plan can name a
class or a function: there is nothing to execute.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy
import torch

from shoal.errors import WireError

Tree: TypeAlias = Any
"""dict, list, tuple, None, bool, int, float, str, bytes and tensors, nested."""

MAX_DEPTH = 64
MAX_OUTLINE_DEPTH = 8
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 2**48
INLINE_BYTES = 1024
"""Text and bytes up to this long stay in the plan."""
HUGE_BYTES = 4 * 2**20
ALIGNMENT = 64
"""Where torch puts its tensors. How matrix products round depends on it."""

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
_SCALARS = (bool, int, float, str)

_SMALLEST_INT, _LARGEST_INT = -(2**63), 2**64 - 1  # what the encoding holds as a number


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


Path = tuple[Any, ...]
"""The way to a place in a tree: keys and indices."""
Stays = Callable[[torch.Tensor], bool]
"""Which tensors are sent from where they are, instead of through host memory."""


class Parcel:
    """A message taken apart."""

    __slots__ = ("buffers", "plan", "slots", "stays")

    def __init__(self, stays: Stays | None = None) -> None:
        self.plan: Any = None
        self.slots: list[Slot] = []
        self.buffers: list[torch.Tensor] = []
        """Contiguous, in host memory (or staying). What lies so already is not copied."""
        self.stays = stays


# -- apart -----------------------------------------------------------------------------------------


def take_apart(tree: Tree, stays: Stays | None = None) -> Parcel:
    """Raises WireError, naming the place in the tree, for what cannot be sent."""
    parcel = Parcel(stays)
    parcel.plan = _plan(tree, parcel, ())
    return parcel


def _plan(value: Any, parcel: Parcel, path: Path) -> Any:
    if isinstance(value, torch.Tensor):
        if order := _order(value):
            back = [order.index(dimension) for dimension in range(len(order))]
            return ["p", back, _plan(value.permute(order), parcel, path)]
        if not value.is_nested and (fault := _shape_fault(value.shape)):
            raise WireError(f"{_place(path)}: a tensor of {fault} cannot be sent.")
        kind = DTYPE_NAMES.get(value.dtype, "")
        stays = parcel.stays is not None and parcel.stays(value)
        if not kind or not _lies_well(value, stays):
            plain = _plain(value, stays, path)
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


def _plain(tensor: torch.Tensor, stays: bool, path: Path) -> torch.Tensor:
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
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = plain if stays else plain.cpu()
    if plain.dtype == torch.complex32:
        plain = plain.view(torch.int32)  # the same bytes; torch warns of new complex32
    return plain.contiguous()


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


# -- checked and together --------------------------------------------------------------------------


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
        if fault := _shape_fault(slot.shape):
            raise WireError(f"buffer {number}: {fault}")
        total += slot.size_bytes
        if total > limit_bytes:
            raise WireError(f"the buffers need more than the limit of {limit_bytes} bytes")
    return total


def _shape_fault(shape: Sequence[int]) -> str:
    """What is wrong with a shape, if anything."""
    if len(shape) > MAX_DIMENSIONS:
        return f"{len(shape)} dimensions ({MAX_DIMENSIONS} is the most)"
    # Also where one extent is 0: torch multiplies the others all the same.
    if min(shape, default=0) < 0 or math.prod(extent or 1 for extent in shape) > MAX_ELEMENTS:
        return f"an impossible shape (more than {MAX_ELEMENTS:,} elements, zeros taken as ones)"
    return ""


def allocate(slot: Slot) -> torch.Tensor:
    """An empty tensor for a slot."""
    size = slot.size_bytes
    try:
        if size >= HUGE_BYTES:  # numpy asks for huge pages, which spares most page faults
            memory = numpy.empty(size + ALIGNMENT, dtype=numpy.uint8)
            begin = -memory.ctypes.data % ALIGNMENT
            room = torch.from_numpy(memory[begin : begin + size])
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


Build = Callable[[list[torch.Tensor]], Tree]


class Recipe(NamedTuple):
    """A plan that has been read: how to put a message together, as often as one likes."""

    build: Build
    """The message, of the tensors of its slots."""
    paths: dict[int, Path]
    """Where in the message each slot is that holds a tensor as it lies in memory."""


def read_plan(plan: Any, slots: list[Slot]) -> Recipe:
    """WireError if the plan is none that `take_apart` makes."""
    left = dict(enumerate(slots))
    paths: dict[int, Path] = {}
    try:
        build = _read(plan, left, paths, ())
    except (RecursionError, ValueError, TypeError) as error:
        raise WireError(f"the plan makes no sense: {error}") from error
    if left:
        raise WireError("a buffer came that the plan does not use")
    return Recipe(build, paths)


def _read(plan: Any, left: dict[int, Slot], paths: dict[int, Path], path: Path) -> Build:
    if not isinstance(plan, list):
        if plan is None or isinstance(plan, _SCALARS):
            return lambda tensors: plan
        raise WireError("the plan has something that no message has")
    if len(path) > MAX_DEPTH:
        raise WireError(f"the plan is nested more than {MAX_DEPTH} deep")
    match plan:
        case ["b", int(number)] if type(number) is int:
            return _read_buffer(number, left, paths, path)
        case ["p", list(order), ["b", int(number)]] if type(number) is int:
            return _read_permuted(order, number, left)
        case ["d", list(keys), list(values)]:
            names = [_read_key(key) for key in keys]
            items = [
                (name, _read(value, left, paths, (*path, name)))
                for name, value in zip(names, values, strict=True)
            ]
            if len(set(names)) != len(names):
                raise WireError("the plan has a dict with the same key twice")
            return lambda tensors: {key: build(tensors) for key, build in items}
        case [("l" | "t") as letter, list(inner)]:
            builds = [_read(each, left, paths, (*path, i)) for i, each in enumerate(inner)]
            if letter == "l":
                return lambda tensors: [build(tensors) for build in builds]
            return lambda tensors: tuple([build(tensors) for build in builds])
        case ["y" | "i", _]:
            value = _read_key(plan)
            return lambda tensors: value
    raise WireError("the plan has something that no message has")


def _read_buffer(number: int, left: dict[int, Slot], paths: dict[int, Path], path: Path) -> Build:
    kind = _take(number, left).kind
    if kind == TEXT:
        return lambda tensors: _content(tensors[number]).decode("utf-8", "surrogatepass")
    if kind == BYTES:
        return lambda tensors: _content(tensors[number])
    if kind == INT:
        return lambda tensors: int.from_bytes(_content(tensors[number]), "little", signed=True)
    paths[number] = path
    return operator.itemgetter(number)


def _read_permuted(order: list[Any], number: int, left: dict[int, Slot]) -> Build:
    """A tensor whose dimensions are in another order than its memory."""
    slot = _take(number, left)
    plain = all(type(each) is int for each in order)
    if slot.kind in PLAIN or not plain or sorted(order) != list(range(len(slot.shape))):
        raise WireError(f"buffer {number}: its dimensions cannot be put into that order")
    return lambda tensors: tensors[number].permute(order)


def _take(number: int, left: dict[int, Slot]) -> Slot:
    slot = left.pop(number, None)
    if slot is None:
        raise WireError("the plan points to a buffer that is not there, or has been used")
    return slot


def _read_key(key: Any) -> Any:
    if key is None or isinstance(key, _SCALARS):
        return key
    match key:
        case ["y", bytes(content)]:
            return content
        case ["s", bytes(content)]:
            return content.decode("utf-8", "surrogatepass")
        case ["i", str(digits)] if len(digits) <= 2 * INLINE_BYTES + len("-0x"):
            return int(digits, 16)
    raise WireError("the plan has a dict key, or a number, that no message has")


def _content(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


# -- places to be filled ---------------------------------------------------------------------------


def tensors_of(tree: Tree, path: Path = ()) -> dict[Path, torch.Tensor]:
    """Every tensor in a tree, by the way to it."""
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    found: dict[Path, torch.Tensor] = {}
    if isinstance(tree, dict):
        for key, value in tree.items():
            found |= tensors_of(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            found |= tensors_of(value, (*path, number))
    return found


def with_tensors(tree: Tree, tensors: dict[Path, torch.Tensor], path: Path = ()) -> Tree:
    """The same tree, with other tensors in it."""
    if isinstance(tree, torch.Tensor):
        return tensors[path]
    if isinstance(tree, dict):
        return {k: with_tensors(value, tensors, (*path, k)) for k, value in tree.items()}
    if isinstance(tree, list | tuple):
        inner = [with_tensors(value, tensors, (*path, n)) for n, value in enumerate(tree)]
        if type(tree) in (list, tuple):
            return type(tree)(inner)
        named: Any = getattr(tree, "_make", type(tree))  # a named tuple, or one of torch's own
        return named(inner)
    return tree


def detached(tree: Tree) -> Tree:
    """The same values, of which autograd knows nothing."""
    return with_tensors(tree, {path: t.detach() for path, t in tensors_of(tree).items()})
