"""A message put together again: a plan from the other side, checked and read.

Believes nothing: whatever `take_apart` (apart.py) would not have made is a WireError.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shoal.errors import WireError
from shoal.wire.apart import INLINE_BYTES, MAX_DEPTH
from shoal.wire.slots import BYTES, INT, PLAIN, TEXT, Slot
from shoal.wire.tree import Path, Tree

_SCALARS = (bool, int, float, str)

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
            if len(items) == 1:  # most messages are so, and a comprehension is a call more
                key, of_key = items[0]
                return lambda tensors: {key: of_key(tensors)}
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
