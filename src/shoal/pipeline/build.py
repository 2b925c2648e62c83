"""From what a user gives as a model to a module that can be read and cut: made, and checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shoal.errors import ModelError
from shoal.pipeline.graph import Graph
from shoal.pipeline.layers import model_of
from shoal.pipeline.meta import is_on_meta, weights_on_meta
from shoal.pipeline.unseen import memory_of
from shoal.settings import kind_of
from shoal.wire.tree import Tree, tensors_of

Model = nn.Module | Sequence[Any] | Callable[[], Any]
"""A module, a list of layers, or what makes one of them."""


def as_module(model: Model, seed: int = 0, example: Tree = None) -> nn.Module:
    """A callable is called so that the whole model need not fit here; seed: of what it draws.

    example: inputs of a batch, whose shape a list of layers is held against.
    """
    if isinstance(model, nn.Module):
        if is_on_meta(model):
            what = type(model).__name__
            raise ModelError(
                f"the {what} is on the meta device, where its weights have no values. Give what "
                f"makes it instead, as lambda: {what}(...), outside of torch.device: it is called "
                "on meta, and the weights of each stage are made on its rank."
            )
        return model
    if callable(model):
        what = getattr(model, "__name__", str(model))
        with weights_on_meta() as beginnings, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                made = model()
            except Exception as error:
                beginnings.check_error(error, what)
                raise
            if not isinstance(made, nn.Module | list | tuple):
                raise ModelError(
                    f"{what} gave {kind_of(made)}; it must give an nn.Module or a list of layers."
                )
            module = made if isinstance(made, nn.Module) else as_module(made, example=example)
        beginnings.check(module, what)
        return module
    if isinstance(model, str | bytes | dict) or not isinstance(model, Sequence):
        raise ModelError(
            f"{kind_of(model)} is no model: give an nn.Module, a list of layers, or what "
            "makes one of them."
        )
    shapes = [tuple(tensor.shape) for tensor in tensors_of(example).values()]
    return model_of(model, shapes[0] if len(shapes) == 1 else None)


def check_state(model: nn.Module) -> None:
    """Can every stage have its part of the model's state?"""
    state = model.state_dict()
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    faults = [
        f"{name} has no shape yet: call the model once, model(x), before it is cut."
        for name in state
        if name not in others and is_lazy(state[name])
    ]
    faults += [
        f"{name} (get_extra_state) is no tensor, and nothing else goes from rank to rank with a "
        "model. Make a buffer of it, or leave it out of the state."
        for name in others
    ]
    if faults := faults + _overlaps(model):
        raise ModelError(faults)


def _overlaps(model: nn.Module) -> list[str]:
    """Parameters and buffers that have some memory in common, and are not the same."""
    found: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.layout is torch.strided and not is_lazy(tensor) and tensor.numel():
            found.setdefault(memory_of(tensor), []).append((name, tensor))
    return [
        f"{one} and {other} have a part of their memory in common: what is trained in one stage "
        "would not change the other. Make one parameter or buffer, of which forward() takes parts."
        for tensors in found.values()
        for (one, first), (other, second) in itertools.combinations(tensors, 2)
        if _form(first) != _form(second) and _overlap(first, second)
    ]


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (begin, end), (other_begin, other_end) = map(_span, (one, other))
    return begin < other_end and other_begin < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    begin, size = tensor.storage_offset(), tensor.element_size()
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(begin * size), int((begin + reach + 1) * size)


def check_stages(graph: Graph, num_stages: int) -> None:
    num_units = len(graph.units)
    if num_stages > num_units:
        shown = ", ".join(graph.names()[:10]) + (", ..." if num_units > 10 else "")
        raise ModelError(
            f"{num_stages} stages for a model of {num_units} step{'s' * (num_units != 1)} "
            f"({shown}): every stage needs at least one."
        )
