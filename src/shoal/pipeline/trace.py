"""A model read by torch.fx: what it computes, in order, without running it.

A module that cannot be read (its forward branches on a tensor's value, say), or that does what
torch.fx does not see (unseen.py), is kept whole, as one call: its own forward runs in its stage.
Only when the model's own forward is of that kind is that an error.
"""

from __future__ import annotations

import inspect
import operator
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import fx, nn

from shoal.errors import ModelError
from shoal.pipeline.dice import Dice
from shoal.pipeline.fixed import FixedValues
from shoal.pipeline.keeping import as_it_was
from shoal.pipeline.kept import Kept
from shoal.pipeline.nodes import INSIDE, LINE, changes_in_place, inside, is_of_the_users, line_of
from shoal.pipeline.reach import around, reachable
from shoal.pipeline.unseen import (
    BufferProxy,
    LeftOver,
    Line,
    Reading,
    StepAttribute,
    StepProxy,
    Unseen,
    WatchingWrites,
    fault_of_call,
    first_difference,
    is_users,
    memory_in,
    memory_of,
    surroundings,
    users_line,
    watching_attributes,
    watching_reads,
)

WAYS_OUT = (
    "Ways out: move that part into an nn.Module of its own (a module that cannot be read is kept "
    "whole, in one stage); or give the model as an nn.Sequential or a list of shoal.Layer."
)


def _gives_back(module: nn.Module) -> bool:
    """Whether it will always give back the very tensor it was given."""
    forth, back = module._forward_hooks, module._backward_hooks
    hooks = [forth, back, module._forward_pre_hooks, module._backward_pre_hooks]
    return type(module) is nn.Identity and not any(hooks)


class _Tracer(fx.Tracer):
    """Notes steps; raises Unseen where something else is done, which would be lost."""

    def __init__(self, model: nn.Module, whole: set[str]) -> None:
        super().__init__()
        self.values = FixedValues()
        self.failed: str = ""
        """The innermost module in which tracing failed."""
        self._first: Exception | None = None
        """Why it cannot be read, also where a forward() catches that."""
        self._whole = whole
        self._open: list[str] = []
        """The modules that are being read, the innermost last."""
        self._is_noting = False
        self._is_over = False
        self._qualname_counter = Counter()  # fx has one for all readings; two must number alike
        self._buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self._modules = {module: path for path, module in model.named_modules()}
        self._memory = memory_in(model)
        self._around = surroundings()
        self._dice = Dice([*reachable(model), *around(model)])

    def read(self, model: nn.Module, fixed: dict[str, Any]) -> fx.Graph:
        with (
            watching_attributes(self._check_attribute),
            watching_reads(self._note_read),
            WatchingWrites(self._check_write, self._check_question, self._check_draw),
        ):
            try:
                graph = self.trace(model, fixed)
            finally:
                self._is_over = True
        self._check_dice()
        if self._first is not None:  # and a forward() has caught it
            raise self._first
        return graph

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self._whole or m._backward_hooks or m._backward_pre_hooks:
            return True
        return bool(super().is_leaf_module(m, module_qualified_name))

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._check_around()
        path = self.path_of_module(m)
        parent, _, name = path.rpartition(".")
        self.values.note(parent, self.root.get_submodule(parent), name, m)
        if self.is_leaf_module(m, path):
            result = super().call_module(m, forward, args, kwargs)
            # One tensor is one value, whose gradients are added up in the order of its uses.
            return args[0] if args and _gives_back(m) else result
        self._open.append(path)
        kept = Kept(m)
        try:
            result = super().call_module(m, forward, args, kwargs)
            self._check_dice()
            if name := kept.changed():
                self._refuse(_changes(name))
        except Exception:
            self.failed = self.failed or path
            raise
        self._open.pop()
        return result

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return StepProxy(node, self)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if self._is_over:
            raise LeftOver
        if args[0] in (torch.autograd.grad, torch.autograd.backward):
            self._refuse(
                "computes gradients itself (torch.autograd.grad), which would end where its stage "
                "begins"
            )
        if kind.startswith("call_"):
            self._check_around()
        node = super().create_node(kind, *args, **kwargs)
        if node.kwargs.get("out") is not None:
            self._refuse("has a step write into another tensor (out=)")
        frames = traceback.walk_stack(sys._getframe(1))
        node.meta[LINE] = users_line(frames, until=_Tracer.read.__code__)
        node.meta[INSIDE] = self._open[-1] if self._open else ""
        return node

    def create_arg(self, a: Any) -> Any:
        if type(a) in (StepProxy, StepAttribute, BufferProxy) and a.tracer is not self:
            raise LeftOver
        is_made = isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter)
        if is_made and a.requires_grad and memory_of(a) not in self._memory:
            self._refuse(
                "computes with parameters that it does not take by name (as self.fc.weight is), "
                "so that they would get no gradients from it"
            )
        was_noting, self._is_noting = self._is_noting, True
        try:
            return super().create_arg(a)
        finally:
            self._is_noting = was_noting

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        name = self._buffers.get(id(attr_val))
        if name is None:
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        if name not in parameter_proxy_cache:
            path, _, own_name = name.rpartition(".")
            self.values.note(path, self.root.get_submodule(path), own_name, attr_val)
            parameter_proxy_cache[name] = self.create_proxy(
                "get_attr", name, (), {}, proxy_factory_fn=lambda n: BufferProxy(n, self, attr_val)
            )
        return parameter_proxy_cache[name]

    # -- what would be lost ------------------------------------------------------------------------

    def _check_around(self) -> None:
        now = surroundings()
        for what, state in self._around.items():
            if now[what] != state:
                self._refuse(f"takes a step inside {what}")
        self._check_dice()

    def _check_dice(self) -> None:
        if self._dice.were_thrown():
            self._refuse(_DRAWS)

    def _check_attribute(self, module: nn.Module, name: str) -> None:
        if module in self._modules and not self._is_noting:
            self._refuse(f"sets the attribute {name!r}, as it would not do with every batch")

    def _note_read(self, module: nn.Module, name: str, value: Any) -> None:
        if module in self._modules and is_users(frame := sys._getframe(2)):
            self.values.note(self._modules[module], module, name, value, frame.f_code)

    def _check_write(self, tensor: torch.Tensor, args: tuple[Any, ...]) -> None:
        is_step = any(isinstance(each, fx.Proxy) for each in args)
        is_models = memory_of(tensor) in self._memory
        if is_step and not is_models:
            self._refuse("changes in place a tensor that it made, which would be made only once")
        if is_models and not is_step:
            self._refuse("changes a tensor of the model, as it would not do with every batch")

    def _check_question(self, tensor: torch.Tensor) -> None:
        if memory_of(tensor) in self._memory:
            self._refuse("asks whether a weight is trained (requires_grad), which may change")

    def _check_draw(self) -> None:
        self._refuse(_DRAWS)

    def _refuse(self, what: str) -> NoReturn:
        self._stop(Unseen(what))

    def to_bool(self, obj: fx.Proxy) -> bool:
        try:
            return bool(super().to_bool(obj))
        except fx.proxy.TraceError as error:
            self._stop(error)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        try:
            return super().iter(obj)
        except fx.proxy.TraceError as error:
            self._stop(error)

    def _stop(self, error: Exception) -> NoReturn:
        self.failed = self.failed or (self._open[-1] if self._open else "")
        self._first = self._first or error
        raise self._first


def _changes(name: str) -> str:
    return f"changes what it keeps in {name!r}, as it would not do with every batch"


_DRAWS = "draws random numbers that would be the same ones for every batch"
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
                tracer = _Tracer(model, whole)
                try:
                    graph = tracer.read(model, fixed)
                except LeftOver:
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
        raise ModelError(_unreadable(model, Unseen(_changes(changed))))
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
        text = f"{what} cannot be read by torch.fx: {error}"
        if isinstance(error, TypeError) and "slice indices" in str(error):
            text += (
                ". A plain tensor or list cannot be cut to a length that comes with the batch; a "
                "buffer can: give the tensor to register_buffer in __init__"
            )
    line = users_line(frames) or _line_of_forward(model)
    return "\n".join([text, *([f"  {line}"] if line else []), WAYS_OUT])


def _line_of_forward(model: nn.Module) -> Line | None:
    """Where it is written: what is wrong with what it gives was noticed outside of it."""
    code = getattr(type(model).forward, "__code__", None)
    return Line(code.co_filename, code.co_firstlineno) if code else None
