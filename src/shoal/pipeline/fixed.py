"""What a forward() was read with, and has in stages for good: values of its module, and Nones.

A script that sets `model.tau`, `model.cfg.tau` or `model.act` between steps would change nothing
there. So it is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from shoal.errors import ModelError
from shoal.wire.tree import Path, Tree

MOST_VALUES = 100
"""Of a list or dict that is compared with each step."""
MOST_DEPTH = 4


class _Fixed(NamedTuple):
    module: weakref.ref[nn.Module]
    name: str
    before: Any
    words: Iterable[str]
    """Names in the code that asked: of an object's attributes only these count."""


class FixedValues:
    """Of the modules of a model that were read."""

    def __init__(self) -> None:
        self._values: dict[str, _Fixed] = {}
        """By what a user calls it."""

    def note(
        self, path: str, module: nn.Module, name: str, value: Any, code: CodeType | None = None
    ) -> None:
        """That forward() has asked for it. path: of the module. code: that asked."""
        what = f"{path}.{name}".strip(".")
        if what not in self._values:
            words = code.co_names if code is not None else ()
            self._values[what] = _Fixed(weakref.ref(module), name, _told(value, words), words)

    def add(self, others: FixedValues) -> None:
        self._values |= others._values

    def check(self) -> None:
        """Raises ModelError if one is another now."""
        for what, (reference, name, before, words) in self._values.items():
            module = reference()
            own = {} if module is None else vars(module)
            holder = own if name in own else own.get("_buffers", {})
            if name in holder and (now := _told(holder[name], words)) != before:
                raise ModelError(
                    f"{what} of the model was {_shown(before)} when it was read, and is "
                    f"{_shown(now)} now: its stages go on with what it was. Make it a buffer and "
                    "change what is in it (model.tau.fill_(2), or pipe.load_state_dict), or an "
                    "input of forward(); or move the part that uses it into an nn.Module of its "
                    "own that cannot be read, and is kept whole."
                )


class FixedNones:
    """Which inputs are None: a forward() that asks `mask is None` was read with one answer."""

    def __init__(self, inputs: Sequence[tuple[str, str]]) -> None:
        """inputs: each as a value of the graph, and as `forward` calls it."""
        self._names = dict(inputs)
        self._before: set[Path] | None = None
        """Of the first batch."""

    def check(self, named: dict[str, Tree]) -> None:
        """Raises ModelError if it is another than in the first batch. named: inputs, by value."""
        now = set(_nones(named))
        if self._before is None:
            self._before = now
        for path in sorted(now ^ self._before, key=str):
            what = self._names[str(path[0])] + "".join(f"[{key!r}]" for key in path[1:])
            is_now = "is None, and was not" if path in now else "is not None, and was"
            raise ModelError(
                f"x: {what} {is_now} in the first batch. Stages take the same steps for every "
                "batch, and a forward() may take others where an input is None. Give a tensor "
                "that stands for it (a mask that masks nothing); or cut the model twice, for "
                "either case."
            )


def _nones(tree: Tree, path: Path = ()) -> Iterator[Path]:
    if tree is None:
        yield path
    inner = tree.items() if isinstance(tree, dict) else ()
    for key, value in enumerate(tree) if isinstance(tree, list | tuple) else inner:
        yield from _nones(value, (*path, key))


class _Itself:
    """What is compared by being the same thing."""

    def __init__(self, thing: Any) -> None:
        is_tensor = isinstance(thing, torch.Tensor)
        self._name = str(thing) if is_tensor else thing.__name__
        self._thing = weakref.ref(thing) if is_tensor else lambda: thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._thing() is other._thing()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return " ".join(self._name.split())


_Told = str | _Itself | list["_Told"] | dict[str, "_Told"] | None


def _told(value: Any, words: Iterable[str], depth: int = 0) -> _Told:
    """To be compared with what is told of it later. None: it is not compared."""
    if isinstance(value, bool | int | float | complex | str | bytes | numpy.generic | None):
        return repr(value)
    if isinstance(value, torch.Tensor | FunctionType | BuiltinFunctionType | type):
        return _Itself(value)
    if isinstance(value, nn.Module) or depth == MOST_DEPTH:
        return None
    if isinstance(value, list | tuple) and len(value) <= MOST_VALUES:
        return [_told(each, words, depth + 1) for each in value]
    if isinstance(value, dict) and len(value) <= MOST_VALUES:
        return {repr(key): _told(each, words, depth + 1) for key, each in value.items()}
    own = getattr(value, "__dict__", {})
    asked = {name: own[name] for name in words if name in own}
    return {name: _told(each, words, depth + 1) for name, each in asked.items()} or None


def _shown(told: _Told) -> str:
    if isinstance(told, list):
        text = f"[{', '.join(map(_shown, told))}]"
    elif isinstance(told, dict):
        text = "{" + ", ".join(f"{key}: {_shown(each)}" for key, each in told.items()) + "}"
    else:
        text = "something" if told is None else str(told)
    return text if len(text) <= 60 else f"{text[:56]} ..."
