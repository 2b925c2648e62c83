"""What a message is: a tree of plain values and tensors; ways to go through one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeAlias

import torch

Tree: TypeAlias = Any
"""dict, list, tuple, None, bool, int, float, str, bytes and tensors, nested."""
Path = tuple[Any, ...]
"""The way to a place in a tree: keys and indices."""


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


def arrives_as_it_is(tree: Tree) -> bool:
    """Whether a message can hold it, and makes nothing else of it (a tuple of a named tuple)."""
    if type(tree) in (list, tuple, torch.Size):
        return all(map(arrives_as_it_is, tree))
    if type(tree) in (dict, OrderedDict):
        return all(map(arrives_as_it_is, tree.values()))
    if isinstance(tree, torch.Tensor):
        return tree.layout == torch.strided
    return isinstance(tree, bool | int | float | str | bytes | None)


def detached(tree: Tree) -> Tree:
    """The same values, of which autograd knows nothing."""
    return with_tensors(tree, {path: t.detach() for path, t in tensors_of(tree).items()})
