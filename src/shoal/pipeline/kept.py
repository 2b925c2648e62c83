"""What plain things (a list, a dict, an object) have in them, to see whether somebody changes it.

A forward() that keeps what it computes in a list of its module does so with every batch. Read by
torch.fx it would do so once, with stand-ins of values: so its module is kept whole (trace.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from torch import nn

from shoal.pipeline.reach import cached_names, reachable, slots_of


def content_of(things: Sequence[Any]) -> Callable[[], list[Any]]:
    """What is in each of them at the time of a call, to be compared: which, not what is in these.

    Attributes that an object makes when it is first asked for them (functools.cached_property)
    are no change of it.
    """
    cached = {id(vars(thing)): cached_names(thing) for thing in things if _has_attributes(thing)}
    return lambda: [_content(thing, cached.get(id(thing), frozenset())) for thing in things]


class Kept:
    """What the attributes of a module lead to, other modules left out, as it is now."""

    def __init__(self, module: nn.Module) -> None:
        self._names: list[str] = []
        things: list[Any] = []
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE:
                found = reachable(value, into_modules=False)
                things += found
                self._names += [name] * len(found)
        self._content = content_of(things)
        self._before = self._content()

    def changed(self) -> str:
        """The first attribute in which something is other than it was; nothing: there is none."""
        for name, now, was in zip(self._names, self._content(), self._before, strict=True):
            if now != was:
                return name
        return ""


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _has_attributes(thing: Any) -> bool:
    return isinstance(getattr(thing, "__dict__", None), dict)


def _content(thing: Any, left_out: frozenset[str]) -> Any:
    match thing:
        case dict():
            return [(key, _Same(value)) for key, value in thing.items() if key not in left_out]
        case list() | deque():
            return [_Same(value) for value in thing]
        case set():
            return set(map(id, thing))
        case numpy.ndarray():
            return thing.tobytes()
    return {name: _Same(value) for name, value in slots_of(thing).items()}


class _Same:
    """Equal to itself only. It holds its thing, whose id nobody else can have meanwhile."""

    __slots__ = ("_thing",)

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._thing is other._thing

    __hash__ = None  # type: ignore[assignment]
