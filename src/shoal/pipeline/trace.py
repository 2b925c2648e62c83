"""A model read by torch.fx: what it computes, in order, without running it.

A module that cannot be read (its forward branches on a tensor's value, say), or that does what
torch.fx does not see (tracer.py), is kept whole, as one call: its own forward runs in its stage.
Only when the model's own forward is of that kind is that an error.
"""

from __future__ import annotations

import inspect
import operator
import re
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from shoal.errors import ModelError
from shoal.pipeline.fixed import FixedValues
from shoal.pipeline.keeping import as_it_was
from shoal.pipeline.kept import Kept
from shoal.pipeline.nodes import changes_in_place, inside, is_of_the_users, line_of
from shoal.pipeline.tracer import Tracer, changes
from shoal.pipeline.unseen import (
    Line,
    Reading,
    Unseen,
    fault_of_call,
    first_difference,
    users_line,
)

WAYS_OUT = (
    "Ways out: move that part into an nn.Module of its own (a module that cannot be read is kept "
    "whole, in one stage); or give the model as an nn.Sequential or a list of shoal.Layer."
)
_HINTS = {
    "slice indices": "A plain tensor or list cannot be cut to a length that comes with the batch; "
    "a buffer can: give the tensor to register_buffer in __init__",
    "'len' is not supported": "Write x.size(0) instead of len(x)",
    "cannot be interpreted as an integer": "A number that comes with the batch cannot count a "
    "Python loop, nor choose from a list: take one that the model has (self.length)",
    "cannot be iterated": "How many there will be is not known: name them (a, b = x.chunk(2)), "
    "or take them by number (parts[0])",
    "torch.finfo()": "Nobody knows the dtype of a value yet: write float('-inf'), or "
    "torch.finfo(self.fc.weight.dtype), of a weight",
    "float() argument": "x.mean() can be computed with as it is, without float()",
    "inputs to control flow": "A check can be read (assert x.dim() == 2, or if ...: raise) if it "
    "is one comparison; write several one after the other, without and, or, in",
    "AssertionError": "A check of its own fails while it is read, when nobody knows the value",
}
"""What to write instead, by what is said."""
_IS_FIXED = "has been specialized to have value"
"""In what torch.fx says of inputs that were fixed."""


def trace(
    model: nn.Module,
    inputs: Sequence[str] | None = None,
    whole: set[str] | None = None,
    values: FixedValues | None = None,
) -> fx.Graph:
    """The graph of `model`, as it computes in its present mode (train or eval).

    inputs: names of those parameters of `forward` that are given with every batch. Default: those
        that have no default. The others keep their defaults.
    whole: names of modules that are to be kept whole; gets those that have to be.
    values: gets the plain values that the steps were read with.
    """
    if fault := fault_of_call(model):
        raise ModelError(fault)
    if faults := _scripted(model):
        raise ModelError(faults)
    taken = list(inputs) if inputs is not None else _required(model)
    fixed = _fixed(model, taken)
    whole = set() if whole is None else whole
    values = values or FixedValues()
    while (graph := _read_twice(model, fixed, whole, values)) is None:
        pass
    graph = _without_guards(graph, model, fixed)
    if faults := _signature_faults(graph, model):
        raise ModelError(faults)
    return graph


def _scripted(model: nn.Module) -> list[str]:
    """A stage gets weights of its own, and torch.jit goes on computing with those it had."""
    return [
        f"{name or 'the model'} is made by torch.jit, which computes with the weights that it "
        "was made with, so that those of the stage would not be used: give the module that it was "
        "made from."
        for name, module in model.named_modules()
        if isinstance(module, torch.jit.ScriptModule)
        and not isinstance(_parent(model, name), torch.jit.ScriptModule)
    ]


def _parent(model: nn.Module, name: str) -> nn.Module | None:
    return model.get_submodule(name.rpartition(".")[0]) if name else None


def _signature_faults(graph: fx.Graph, model: nn.Module) -> list[str]:
    """What a forward takes or gives that cannot be told apart into values of a batch."""
    forward = f"{type(model).__name__}.forward"
    faults = [
        f"{forward} uses its {node.target}: which inputs a batch has must be said one by one, as "
        "in forward(self, x, mask).\n" + WAYS_OUT
        for node in graph.nodes
        if node.op == "placeholder" and str(node.target).startswith("*") and node.users
    ]
    if next(node for node in graph.nodes if node.op == "output").args[0] is None:
        faults.append(f"{forward} returns nothing: is there a return in it?")
    return faults


def _read_twice(
    model: nn.Module, fixed: dict[str, Any], whole: set[str], values: FixedValues
) -> fx.Graph | None:
    """With gradients and without, which must be the same.

    None: there is one more in `whole`, and the model is to be read anew.
    """
    readings: list[Reading] = []
    read_with = FixedValues()
    with as_it_was(model):
        kept = Kept(model)
        for has_gradients in (True, False):
            known = set(vars(model))
            with torch.set_grad_enabled(has_gradients):
                tracer = Tracer(model, whole)
                try:
                    graph = tracer.read(model, fixed)
                except ModelError:
                    raise
                except Exception as error:
                    if tracer.failed and tracer.failed not in whole:
                        whole.add(tracer.failed)
                        return None
                    raise ModelError(_unreadable(model, error)) from error
            made = {name: vars(model).pop(name) for name in set(vars(model)) - known}
            readings.append(Reading(graph, made))
            read_with.add(tracer.values)
        changed = kept.changed()
    different = first_difference(*readings)
    if different is not None:
        if keep_whole(different, whole):
            return None
        raise ModelError(
            f"{type(model).__name__}.forward does not do the same when it is called again: it "
            "depends on more than its inputs (what it keeps in a list, the time, "
            f"torch.is_grad_enabled()), which torch.fx does not see.{line_of(different)}\n"
            + WAYS_OUT
        )
    if changed:
        raise ModelError(_unreadable(model, Unseen(changes(changed))))
    for name, constant in readings[0].constants.items():
        setattr(model, name, constant)
    values.add(read_with)
    return readings[0].graph


def keep_whole(node: fx.Node, whole: set[str]) -> bool:
    """Adds the module in whose forward a step is. False: it is the model's own."""
    path = inside(node)
    if not path or path in whole:
        return False
    whole.add(path)
    return True


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
        guards = node.op == "call_function" and (
            node.target in (torch.fx._symbolic_trace._assert_is_none, operator.eq)
            or (node.target is torch._assert and _IS_FIXED in str(node.args[1:]))
        )
        is_stale = node.op == "placeholder" and stale.fullmatch(str(node.target))
        if (guards or is_stale) and not node.users:
            graph.erase_node(node)

    def must_stay(node: fx.Node) -> bool:
        kept = node.op in ("placeholder", "output", "call_module") or bool(node.is_impure())
        return kept or changes_in_place(node, model) or is_of_the_users(node)

    graph.eliminate_dead_code(is_impure_node=must_stay)
    return graph


def _unreadable(model: nn.Module, error: Exception) -> str:
    """Where in the user's own file it stopped, and what to do."""
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    what = type(model).__name__
    if isinstance(error, Unseen):
        text = f"{what}.forward {error}: torch.fx does not see that, and it would be lost."
    else:
        said = str(error).partition(". This can be attempted")[0] or type(error).__name__
        text = f"{what} cannot be read by torch.fx: {said.replace('StepProxy', 'Proxy')}"
        text += next((f". {hint}" for words, hint in _HINTS.items() if words in said), "")
    line = users_line(frames) or _line_of_forward(model)
    return "\n".join([text, *([f"  {line}"] if line else []), WAYS_OUT])


def _line_of_forward(model: nn.Module) -> Line | None:
    """Where it is written: what is wrong with what it gives was noticed outside of it."""
    code = getattr(type(model).forward, "__code__", None)
    return Line(code.co_filename, code.co_firstlineno) if code else None
