"""What a model holds besides its weights, put back as it was after the model has been tried.

To read a model, or to compare it with its stages, its forward() is called. That may count calls,
collect values, move running means and draw random numbers, as it should with every batch that it is
trained with, and with no other.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

from shoal.pipeline.dice import Dice
from shoal.pipeline.reach import around, reachable, slots_of

PutBack = Callable[[], None]


@contextmanager
def as_it_was(model: nn.Module, other: Any = None, *, with_weights: bool = False) -> Iterator[None]:
    """Afterwards all that `model` holds, and the random numbers of this process, are as before.

    other: that may hold something as well, such as a loss.

    with_weights: the values of parameters too, of which there is a copy meanwhile.
    """
    held = [*reachable(model), *reachable(other)]
    dice = Dice([*held, *around(model)])
    put_backs: list[PutBack] = []
    for thing in held:
        if isinstance(thing, dict | set | list | deque):
            put_backs.append(_contents(thing))
        elif isinstance(thing, nn.Parameter):
            put_backs.append(_gradient(thing))
        elif isinstance(thing, numpy.ndarray):
            put_backs.append(_elements(thing))
        elif slots := slots_of(thing):
            put_backs.append(functools.partial(_set_slots, thing, slots))
        if isinstance(thing, torch.Tensor) and (
            with_weights or not isinstance(thing, nn.Parameter)
        ):
            put_backs += _values(thing)
    torch.clear_autocast_cache()  # of weights, which may be others meanwhile
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for put_back in put_backs:
            put_back()
        dice.put_back()


def _contents(it: Any) -> PutBack:
    content = it.copy()

    def put_back() -> None:
        if isinstance(it, set):
            is_same = it == content
        elif isinstance(it, dict):
            is_same = list(it) == list(content) and _are_same(it.values(), content.values())
        else:
            is_same = len(it) == len(content) and _are_same(it, content)
        if not is_same:
            it.clear()
            it.extend(content) if isinstance(it, list | deque) else it.update(content)

    return put_back


def _elements(array: Any) -> PutBack:
    values = array.copy()

    def put_back() -> None:
        if array.flags.writeable:
            array[...] = values

    return put_back


def _set_slots(thing: Any, slots: dict[str, Any]) -> None:
    for name, value in slots.items():
        if getattr(thing, name, None) is not value:
            object.__setattr__(thing, name, value)


def _are_same(some: Any, others: Any) -> bool:
    return all(one is other for one, other in zip(some, others, strict=True))


def _gradient(weight: nn.Parameter) -> PutBack:
    gradient, needs = weight.grad, weight.requires_grad

    def put_back() -> None:
        weight.grad = gradient
        if weight.requires_grad != needs:
            weight.requires_grad_(needs)

    return put_back


def _values(tensor: torch.Tensor) -> list[PutBack]:
    if (
        nn.parameter.is_lazy(tensor)
        or tensor.is_meta
        or tensor.is_inference()
        or tensor.layout is not torch.strided
    ):
        return []
    values = tensor.detach().clone()

    def put_back() -> None:  # torch does not count what its layers change (running means)
        if not torch.equal(tensor.data, values):
            tensor.data.copy_(values)

    return [put_back]
