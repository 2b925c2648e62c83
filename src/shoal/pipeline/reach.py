"""What can be reached from a model by its attributes: containers, tensors, objects of any kind."""

from __future__ import annotations

from collections import deque
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

MAX_DEPTH, MAX_THINGS = 8, 100_000
"""Beyond a module: one may lead to a whole data set."""
_LEAVES = (type, FunctionType, MethodType, ModuleType, torch.device, torch.dtype, str, bytes)
_PLAIN = (bool, int, float, complex, type(None))


def reachable(model: nn.Module) -> list[Any]:
    """Itself and everything that it leads to, each once; no plain values."""
    found: dict[int, Any] = {}
    ahead: deque[tuple[Any, int]] = deque([(model, 0)])
    while ahead and len(found) < MAX_THINGS:
        thing, depth = ahead.popleft()
        if id(thing) in found or depth > MAX_DEPTH or isinstance(thing, _LEAVES + _PLAIN):
            continue
        found[id(thing)] = thing
        for inner in _inside(thing):
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
    return [content] if isinstance(content, dict) else []
