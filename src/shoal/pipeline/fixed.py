"""What a forward() was read with, and has in stages for good: values of its module, and Nones.

A script that sets `model.tau`, `model.cfg.tau` or `model.act` between steps would change nothing
there. So it is told.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Iterator, Sequence
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, NamedTuple, Union

import numpy
import torch
from torch import nn

from shoal.errors import ModelError
from shoal.pipeline.reach import cached_names, slots_of
from shoal.wire.tree import Path, Tree

MOST_VALUES = 100
"""Of a list or dict that is compared with each step."""
MOST_DEPTH = 4

_Told = Union[str, "_Itself", list["_Told"], dict[str, "_Told"], None]
"""Of a value, to be compared with what is told of it later."""


class _Fixed(NamedTuple):
    module: weakref.ref[nn.Module]
    name: str
    before: _Told
    words: frozenset[str]
    """In the code that asked: of an object's attributes, and a dict's keys, only these count."""


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
        words = _words(code) if code is not None else frozenset()
        known = self._values.get(what)
        if known is None or not words <= known.words:
            words |= known.words if known is not None else frozenset()
            self._values[what] = _Fixed(weakref.ref(module), name, _told(value, words), words)

    def add(self, others: FixedValues) -> None:
        self._values |= others._values

    def check(self) -> None:
        """Raises ModelError if one is another now."""
        for what, (reference, name, before, words) in self._values.items():
            module = reference()
            if module is None:
                continue
            found = _held(module, name)
            if found and (now := _told(found[0], words)) != before:
                raise ModelError(
                    f"{what} of the model was {_shown(before)} when it was read, and is "
                    f"{_shown(now)} now: its stages go on with what it was. Make it a buffer and "
                    "change what is in it (model.tau.fill_(2), or pipe.load_state_dict), or an "
                    "input of forward(); or move the part that uses it into an nn.Module of its "
                    "own that cannot be read, and is kept whole."
                )


def _held(module: nn.Module, name: str) -> list[Any]:
    """What a module has by that name, or its class; nothing, if it is computed."""
    for names in (vars(module), module._buffers, module._modules):
        if name in names:
            return [names[name]]
    own = inspect.getattr_static(module, name, None)
    return (
        [own] if isinstance(own, bool | int | float | complex | str | list | tuple | dict) else []
    )


_OF_CLASSES = (bool, int, float, complex, str, list, tuple, dict)


def _words(code: CodeType) -> frozenset[str]:
    """Names of attributes and texts in a function, and in those that are written in it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    texts = [each for each in code.co_consts if isinstance(each, str)]
    return frozenset([*code.co_names, *texts]).union(*map(_words, inner))


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
        is_large = isinstance(thing, torch.Tensor | nn.Module)
        self._name = str(thing) if is_large else thing.__name__
        self._thing = weakref.ref(thing) if is_large else lambda: thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._thing() is other._thing()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return " ".join(self._name.split())


def _told(value: Any, words: frozenset[str], depth: int = 0) -> _Told:
    """To be compared with what is told of it later. None: it is not compared."""
    if isinstance(value, bool | int | float | complex | str | bytes | numpy.generic | Enum | None):
        return repr(value)
    if isinstance(value, torch.Tensor | FunctionType | BuiltinFunctionType | type):
        return _Itself(value)
    if isinstance(value, nn.Module) and not depth:
        return _Itself(value)
    if isinstance(value, nn.Module | logging.Logger) or depth == MOST_DEPTH:
        return None
    if isinstance(value, set | frozenset) and len(value) <= MOST_VALUES:
        value = sorted(value, key=repr)
    if isinstance(value, list | tuple) and len(value) <= MOST_VALUES:
        return [_told(each, words, depth + 1) for each in value]
    if isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
        return [_told(each, words, depth + 1) for each in parts]
    is_dict = isinstance(value, dict)
    own = value if is_dict else {**getattr(value, "__dict__", {}), **slots_of(value)}
    cached = frozenset() if is_dict else cached_names(value)
    own = {key: each for key, each in own.items() if key not in cached}
    asked = {key: each for key, each in own.items() if key in words}
    if not asked:  # it is given to somebody, who may ask for any
        shows_more = bool(cached & words) or any(
            isinstance(getattr(type(value), word, None), property) for word in words
        )
        asked = {k: v for k, v in own.items() if is_dict or _is_plain(k, v, shows_more)}
    if len(asked) > MOST_VALUES:
        return None
    shown = repr if is_dict else str
    return {shown(key): _told(each, words, depth + 1) for key, each in asked.items()} or None


def _is_plain(name: str, value: Any, may_be_private: bool) -> bool:
    is_open = may_be_private or not name.startswith("_")
    return is_open and isinstance(value, bool | int | float | complex | str)


def _shown(told: _Told) -> str:
    if isinstance(told, list):
        text = f"[{', '.join(map(_shown, told))}]"
    elif isinstance(told, dict):
        text = "{" + ", ".join(f"{key}: {_shown(each)}" for key, each in told.items()) + "}"
    else:
        text = "something" if told is None else str(told)
    return text if len(text) <= 60 else f"{text[:56]} ..."
