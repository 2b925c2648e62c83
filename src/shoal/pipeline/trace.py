"""A model read by torch.fx: what it computes, in order, without running it.

A module that cannot be traced (its forward branches on a tensor's value, say) is kept whole, as
one call. Only when the model's own forward cannot be traced is that an error.
"""

from __future__ import annotations

import inspect
import linecache
import operator
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from shoal.errors import ModelError

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)

WAYS_OUT = (
    "Ways out: move that part into an nn.Module of its own (a module that cannot be read is kept "
    "whole, in one stage); or give the model as an nn.Sequential or a list of shoal.Layer."
)


class _Tracer(fx.Tracer):
    def __init__(self, whole: set[str]) -> None:
        super().__init__()
        self.failed: str = ""
        """The innermost module in which tracing failed."""
        self._whole = whole

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self._whole:
            return True
        return bool(super().is_leaf_module(m, module_qualified_name))

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self.path_of_module(m)
            raise


def trace(
    model: nn.Module, inputs: Sequence[str] | None = None, whole: set[str] | None = None
) -> fx.Graph:
    """The graph of `model`, as it computes in its present mode (train or eval).

    inputs: names of those parameters of `forward` that are given with every batch. Default: those
        that have no default. The others keep their defaults.
    whole: names of modules that are to be kept whole; gets those that have to be.
    """
    taken = list(inputs) if inputs is not None else _required(model)
    fixed = _fixed(model, taken)
    whole = set() if whole is None else whole
    while True:
        tracer = _Tracer(whole)
        try:
            graph = tracer.trace(model, fixed)
        except Exception as error:
            if tracer.failed and tracer.failed not in whole:
                whole.add(tracer.failed)
                continue
            raise ModelError(_unreadable(model, error)) from error
        return _without_guards(graph, model, fixed)


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def _required(model: nn.Module) -> list[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in _parameters(model).items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variadic
    ]


def _fixed(model: nn.Module, taken: list[str]) -> dict[str, Any]:
    parameters = _parameters(model)
    what = type(model).__name__
    faults = [
        f"{what}.forward has no input {name!r}; it has: {', '.join(parameters)}."
        for name in taken
        if name not in parameters
    ]
    for name in _required(model):
        if name not in taken:
            faults.append(f"{what}.forward needs its input {name!r}, which inputs= leaves out.")
    if faults:
        raise ModelError(faults)
    fixed = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name not in taken and parameter.default is not inspect.Parameter.empty
    }
    for name, default in fixed.items():
        if not isinstance(default, bool | int | float | str | None):
            faults.append(
                f"{what}.forward has an input {name!r} whose default is a "
                f"{type(default).__name__}: torch.fx fixes only plain values. Make it an attribute "
                "of the model, or name it in inputs= and give it with every batch."
            )
    if faults:
        raise ModelError(faults)
    return fixed


def _without_guards(graph: fx.Graph, model: nn.Module, fixed: dict[str, Any]) -> fx.Graph:
    """Without what fx adds to check that inputs which were fixed are not given after all."""
    stale = re.compile("|".join([*(rf"{re.escape(name)}_\d+" for name in fixed), r"\*.*"]))
    for node in reversed(list(graph.nodes)):
        guards = node.op == "call_function" and node.target in (
            torch._assert,
            torch.fx._symbolic_trace._assert_is_none,
            operator.eq,
        )
        is_stale = node.op == "placeholder" and stale.fullmatch(str(node.target))
        if (guards or is_stale) and not node.users:
            graph.erase_node(node)

    def must_stay(node: fx.Node) -> bool:
        kept = node.op in ("placeholder", "output", "call_module") or bool(node.is_impure())
        return kept or changes_in_place(node, model)

    graph.eliminate_dead_code(is_impure_node=must_stay)
    return graph


def changes_in_place(node: fx.Node, model: nn.Module) -> bool:
    """Whether a step overwrites its input, as ReLU(inplace=True) does."""
    target = node.target
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(target)), "inplace", False))
    if node.op not in ("call_method", "call_function"):
        return False
    if getattr(target, "__module__", "") == "_operator":
        return getattr(target, "__name__", "") in _OPERATORS_IN_PLACE
    name = str(target) if node.op == "call_method" else getattr(target, "__name__", "")
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return True
    return bool(node.kwargs.get("inplace"))


_OPERATORS_IN_PLACE = {f"i{name}" for name in ("add", "sub", "mul", "truediv", "pow", "and", "or")}


def _unreadable(model: nn.Module, error: Exception) -> str:
    """Where in the user's own file it stopped, and what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_TORCH, _HERE, "<"))]
    text = f"{type(model).__name__} cannot be read by torch.fx: {error}"
    if own:
        frame = own[-1]
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()
        text += f"\n  {frame.filename}:{frame.lineno}: {line}"
    return f"{text}\n{WAYS_OUT}"
