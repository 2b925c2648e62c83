"""Plain values as trees of what any encoding holds, and back; nothing in them can be executed.

    (x[:, 0], torch.float32, inf)    ["t", [["n", 0], ["dtype", "float32"], ["f", "inf"]]]

None, bool, int, float and str stand for themselves. Every list begins with a letter or a word that
says what it is. What is plain by itself alone (a value of another step, a function) is given by the
caller, as is its way back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from shoal.errors import ModelError
from shoal.wire.slots import DTYPE_NAMES, DTYPES

Literal: TypeAlias = Any
"""None, bool, int, float, str, and lists of them that begin with what they are."""
Build = Callable[[list[Any]], Any]
"""The value, made anew each time, from the values of the steps so far."""

MAX_DEPTH = 32
_SCALARS = (bool, int, float, str, type(None))
_SMALLEST_INT, _LARGEST_INT = -(2**63), 2**63 - 1  # what every encoding holds as a number
_DIGITS = re.compile(r"-?0x[0-9a-f]{1,1000}")
_DEVICE = re.compile(r"[a-z]{1,16}(:[0-9]{1,4})?")
_FORMATS = {
    name: getattr(torch, name)
    for name in ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")
}
_LAYOUTS = {"strided": torch.strided, "sparse_coo": torch.sparse_coo}
_NAMED: dict[str, dict[str, Any]] = {
    "dtype": DTYPES,
    "memory_format": _FORMATS,
    "layout": _LAYOUTS,
}
_NAMES: dict[Any, Literal] = {
    **{dtype: ["dtype", name] for dtype, name in DTYPE_NAMES.items()},
    **{value: ["memory_format", name] for name, value in _FORMATS.items()},
    **{value: ["layout", name] for name, value in _LAYOUTS.items()},
}


class NotPlain(Exception):
    """A value that is no plain one. The text says what it is."""


def refuse(value: Any) -> Literal:
    """Nothing is plain but what always is."""
    raise NotPlain(f"a {type(value).__module__}.{type(value).__qualname__}")


def written(value: Any, other: Callable[[Any], Literal] = refuse, depth: int = 0) -> Literal:
    """Raises NotPlain. other: writes down what is plain to the caller alone."""
    if depth > MAX_DEPTH:
        raise NotPlain(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, numpy.generic):  # numpy's numbers are numbers
        value = value.item()

    def inner(each: Any) -> Literal:
        return written(each, other, depth + 1)

    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _written_text(value)
    if kind is int:
        return value if _SMALLEST_INT <= value <= _LARGEST_INT else ["i", hex(value)]
    if kind is float:
        return value if math.isfinite(value) else ["f", repr(value)]
    if kind is complex:
        return ["c", inner(value.real), inner(value.imag)]
    if kind is slice:
        return ["s", inner(value.start), inner(value.stop), inner(value.step)]
    if value is ...:
        return ["e"]
    for letter, kinds in (("t", (tuple,)), ("z", (torch.Size,)), ("l", (list, immutable_list))):
        if kind in kinds:
            return [letter, [inner(each) for each in value]]
    if kind in (dict, immutable_dict):
        if any(type(key) not in _SCALARS for key in value):
            raise NotPlain("a dict whose keys are no plain values")
        return ["d", [inner(key) for key in value], [inner(each) for each in value.values()]]
    if kind is torch.device:
        return ["device", str(value)]
    if kind in (torch.dtype, torch.memory_format, torch.layout) and value in _NAMES:
        return list(_NAMES[value])
    return other(value)


def _written_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NotPlain("text that is no Unicode") from None
    return text


def read(literal: Literal, other: Callable[[list[Any]], Build | None], depth: int = 0) -> Build:
    """Believes nothing: raises ModelError for all that `written` does not make.

    other: the way back of what was plain to the caller alone; None for what it does not know.
    """
    if type(literal) in _SCALARS:
        return lambda values: literal
    if type(literal) is not list or not literal or depth > MAX_DEPTH:
        raise ModelError(f"{_shown(literal)} is no plain value.")

    def inner(each: Literal) -> Build:
        return read(each, other, depth + 1)

    match literal:
        case [("t" | "l" | "z") as letter, list(items)]:
            return _collection(letter, [inner(each) for each in items])
        case ["d", list(keys), list(items)] if len(keys) == len(items):
            names = [inner(key)([]) for key in keys if type(key) in _SCALARS or _is_number(key)]
            if len(names) == len(keys):
                builds = [inner(each) for each in items]
                pairs = list(zip(names, builds, strict=True))
                return lambda values: {name: build(values) for name, build in pairs}
        case ["s", _, _, _]:
            start, stop, step = map(inner, literal[1:])
            return lambda values: slice(start(values), stop(values), step(values))
        case ["e"]:
            return lambda values: ...
        case ["c", real, imaginary]:
            numbers = [inner(each)([]) for each in (real, imaginary) if _is_number(each)]
            if len(numbers) == 2 and all(type(each) is float for each in numbers):
                return lambda values: complex(*numbers)
        case ["f", ("nan" | "inf" | "-inf") as text]:
            return lambda values: float(text)
        case ["i", str(digits)] if _DIGITS.fullmatch(digits):
            number = int(digits, 16)
            return lambda values: number
        case ["device", str(name)] if _DEVICE.fullmatch(name):
            device = _device(name)
            return lambda values: device
        case [("dtype" | "memory_format" | "layout") as kind, str(name)] if name in _NAMED[kind]:
            return lambda values: _NAMED[kind][name]
    build = other(literal)
    if build is None:
        raise ModelError(f"{_shown(literal)} is no plain value.")
    return build


def _collection(letter: str, builds: list[Build]) -> Build:
    if letter == "l":
        return lambda values: [build(values) for build in builds]
    if letter == "t":
        return lambda values: tuple([build(values) for build in builds])
    return lambda values: torch.Size([build(values) for build in builds])


def _is_number(literal: Literal) -> bool:
    return type(literal) is float or (
        type(literal) is list and len(literal) == 2 and literal[0] in ("f", "i")
    )


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"torch knows no device {name!r}.") from error


def _shown(literal: Literal) -> str:
    """What it begins with: it may be as long and as deep as it likes."""
    if isinstance(literal, list) and literal:
        return f"[{_shown(literal[0]) if type(literal[0]) is str else ''}...]"
    return repr(literal)[:80] if type(literal) in _SCALARS else f"a {type(literal).__name__}"
