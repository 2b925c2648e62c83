"""What can be reached from a model by its attributes: containers, tensors, objects of any kind."""

from __future__ import annotations

import functools
import logging
import sys
from collections import deque
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

MAX_DEPTH, MAX_THINGS = 8, 100_000
"""Beyond a module: one may lead to a whole data set."""
_LEAVES = (
    *(type, FunctionType, MethodType, ModuleType, logging.Logger),
    *(torch.device, torch.dtype, str, bytes),
)
_PLAIN = (bool, int, float, complex, type(None))
_SKIPPED = frozenset([*_LEAVES, *_PLAIN])
"""By their very type, which is soon asked: a tokenizer has tens of thousands of words."""


def reachable(model: Any, *, into_modules: bool = True) -> list[Any]:
    """Itself and everything that it leads to, each once; no plain values, nor tuples of these.

    into_modules: else those that are met on the way are left out.
    """
    found: dict[int, Any] = {}
    ahead: deque[tuple[Any, int]] = deque([(model, 0)])
    while ahead and len(found) < MAX_THINGS:
        thing, depth = ahead.popleft()
        if id(thing) in found or depth > MAX_DEPTH or isinstance(thing, _LEAVES + _PLAIN):
            continue
        if not into_modules and isinstance(thing, nn.Module):
            continue
        found[id(thing)] = thing
        for inner in _inside(thing):
            kind = type(inner)
            if kind in _SKIPPED or (kind is tuple and all(type(e) in _SKIPPED for e in inner)):
                continue
            ahead.append((inner, 0 if isinstance(inner, nn.Module) else depth + 1))
    return list(found.values())


def _inside(thing: Any) -> list[Any]:
    match thing:
        case torch.Tensor():
            return []
        case dict():
            return list(thing.values())
        case set() | list() | deque() | tuple():
            return list(thing)
    content = getattr(thing, "__dict__", None)
    inside: list[Any] = [content] if isinstance(content, dict) else []
    return [*inside, *slots_of(thing).values()]


def slots_of(thing: Any) -> dict[str, Any]:
    """By name: what an object has in its `__slots__`."""
    names: list[str] = []
    for kind in type(thing).__mro__ if type(thing).__module__ != "builtins" else ():
        own = vars(kind).get("__slots__", ())
        mangled = f"_{kind.__name__.lstrip('_')}__"
        names += [
            mangled + name[2:] if name.startswith("__") and not name.endswith("__") else name
            for name in ([own] if isinstance(own, str) else own)
        ]
    found = {name: getattr(thing, name, _MISSING) for name in names if name not in _NO_SLOTS}
    return {name: value for name, value in found.items() if value is not _MISSING}


def cached_names(thing: Any) -> frozenset[str]:
    """Of an object's attributes: those that come up when they are first asked for, and stay."""
    kinds = type(thing).__mro__
    return frozenset(
        name
        for kind in kinds
        for name, value in vars(kind).items()
        if isinstance(value, functools.cached_property)
    )


def around(model: nn.Module) -> list[Any]:
    """What the functions of a model's classes can reach by name: globals of the files that they are
    in, and what stands around them."""
    kinds = {type(module) for module in model.modules()}
    own = [kind for kind in kinds if not kind.__module__.startswith("torch.")]
    found: list[Any] = []
    for kind in own:
        found += vars(sys.modules.get(kind.__module__, object)).values()
        cells = getattr(kind.forward, "__closure__", None) or ()
        found += [cell.cell_contents for cell in cells if cell != CellType()]
    return found


_MISSING = object()
_NO_SLOTS = ("__dict__", "__weakref__")
