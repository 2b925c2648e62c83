"""Functions that make tensors, called with what comes with the batch.

`torch.zeros(x.size(0), 16)` is a step, as `torch.zeros((x.size(0), 16))` is; but torch's own parser
of arguments takes the first for numbers, and never asks torch.fx.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _device

_FUNCTIONS = ("zeros", "ones", "empty", "rand", "randn", "tensor", "as_tensor")
_METHODS = ("expand", "new_zeros", "new_ones", "new_empty")


@contextmanager
def watching_makers() -> Iterator[None]:
    """Meanwhile, each call that makes a tensor of values of the batch is a step."""
    # Torch keeps what it finds when these are first asked.
    torch.overrides.get_overridable_functions()
    _device._device_constructors()
    kind: Any = torch.Tensor
    functions = {name: getattr(torch, name) for name in _FUNCTIONS}
    for name, make in functions.items():
        setattr(torch, name, _noted(make, "call_function", make))
    methods = {name: vars(kind).get(name) for name in _METHODS}
    for name in methods:
        setattr(kind, name, _noted(getattr(kind, name), "call_method", name))
    try:
        yield
    finally:
        for name, make in functions.items():
            setattr(torch, name, make)
        for name, method in methods.items():
            if method is None:  # torch.Tensor has it from the class that it is derived from
                delattr(kind, name)
            else:
                setattr(kind, name, method)


def _noted(make: Callable[..., Any], kind: str, target: Any) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_or_note(*args: Any, **kwargs: Any) -> Any:
        for proxy in _proxies_in([*args, *kwargs.values()]):
            return proxy.tracer.create_proxy(kind, target, args, kwargs)
        return make(*args, **kwargs)

    return make_or_note


def _proxies_in(values: Iterable[Any]) -> Iterator[fx.Proxy]:
    for each in values:
        if isinstance(each, fx.Proxy):
            yield each
        elif isinstance(each, list | tuple):
            yield from _proxies_in(each)
