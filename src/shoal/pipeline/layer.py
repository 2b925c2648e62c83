"""One layer of a list: what to build, and its skips."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

COMBINES = ("add", "cat", "args")


class Layer:
    """What to build (`kind`, called with the arguments), or a module already built; and its skips.

    gives: names under which its output is kept for later layers.
    takes: kept values that it takes, besides the output of the layer before.
    combine: how they come together. "add": input + each value, in order. "cat": torch.cat along
    dim 1, input first. "args": the layer is called with them as further arguments. Or a
    module-level function, (input, *taken) -> input, that torch.fx can trace.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the inputs, where the list says so: checked against what the layers make."""

    def __init__(
        self,
        kind: Callable[..., nn.Module],
        /,
        *args: Any,
        gives: str | Sequence[str] = (),
        takes: str | Sequence[str] = (),
        combine: str | Callable[..., Any] = "add",
        **kwargs: Any,
    ) -> None:
        # Nothing is checked here: model_of reports every fault of the list at once.
        self.kind, self.args, self.kwargs = kind, args, kwargs
        self.gives, self.takes, self.combine = _names(gives), _names(takes), combine

    def build(self) -> nn.Module:
        """The module. Raises whatever the class raises."""
        if isinstance(self.kind, nn.Module):
            if self.args or self.kwargs:
                raise TypeError("it is built already and can have no arguments")
            return self.kind
        made: Any = self.kind(*self.args, **self.kwargs)
        if not isinstance(made, nn.Module):
            raise TypeError(f"it makes a {type(made).__name__}, not an nn.Module")
        return made

    def faults(self) -> list[str]:
        """What is wrong with this layer by itself, short of building it."""
        bad_names = [name for name in self.gives + self.takes if not is_name(name)]
        faults = [f"{name!r} is not a name: names are texts" for name in bad_names]
        if isinstance(self.combine, nn.Module):
            faults.append("combine is a module, whose weights nobody would train: use a function")
        elif self.combine not in COMBINES and not callable(self.combine):
            known = ", ".join(repr(name) for name in COMBINES)
            faults.append(f"combine is {self.combine!r}: it is one of {known} or a function")
        return faults


def combined(combine: str | Callable[..., Any], x: Any, taken: list[Any]) -> Any:
    """The input of a layer, and what it takes besides."""
    if callable(combine):
        return combine(x, *taken)
    return torch.cat((x, *taken), dim=1) if combine == "cat" else sum(taken, start=x)


def _names(names: Any) -> tuple[Any, ...]:
    return tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (names,)


def is_name(name: object) -> bool:
    return isinstance(name, str) and name != ""


def label_of(number: int, layer: Layer | None) -> str:
    if layer is None:
        return f"layer {number}"
    return f"layer {number} ({getattr(layer.kind, '__name__', type(layer.kind).__name__)})"
