"""What workers tell their boss, read without believing it.

Each reader returns what its name says, or raises whatever it stumbles over: the desk, which knows
whose answer it was, makes one error of that.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
import torch

from shoal.pipeline.lying import unpacked
from shoal.wire.tree import Tree, tensors_of

Count = Annotated[int, msgspec.Meta(ge=0)]
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What would steer a terminal."""


class Report(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a worker is doing; it says so now and then."""

    memory_bytes: Count
    step: Count
    num_kept: Count
    is_busy: bool


class Trouble(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What went wrong on a worker."""

    kind: str
    """The name of the exception's class."""
    text: str
    traceback: str
    is_consequence: bool
    """Of something that went wrong elsewhere."""


def report(tree: Tree) -> Report:
    return msgspec.convert(tree, Report)


def trouble(tree: Tree) -> Trouble:
    told = msgspec.convert(tree, Trouble)
    texts = {
        name: _STEERING.sub("?", getattr(told, name)) for name in ("kind", "text", "traceback")
    }
    return msgspec.structs.replace(told, **texts)


def number(tree: Tree) -> int:
    return msgspec.convert(tree, int)


def times(tree: Tree) -> tuple[float, float]:
    """How long it has worked, and waited."""
    return msgspec.convert(tree, tuple[float, float])


def tensor(tree: Tree) -> torch.Tensor:
    if not isinstance(tree, torch.Tensor):
        raise TypeError(f"a {type(tree).__name__} is no tensor")
    return tree


def tensors(tree: Tree) -> dict[str, torch.Tensor]:
    """By name."""
    return {name: tensor(value) for name, value in tree.items()}


def output(tree: Tree) -> tuple[Tree, list[bool]]:
    """Of one micro-batch; and of each tensor in it, whether it wants a gradient."""
    made, needs = tree
    if len(needs) != len(tensors_of(made)):
        raise ValueError("it does not say of every tensor whether it wants a gradient")
    return made, msgspec.convert(needs, list[bool])


def gradients(tree: Tree) -> list[list[torch.Tensor | None]]:
    """Of the inputs, by micro-batch."""
    found = [[unpacked(each) for each in part] for part in tree]
    return [[None if each is None else tensor(each) for each in part] for part in found]
