"""Reads one model, step by step, and stops where something is done that torch.fx would lose."""

from __future__ import annotations

import itertools
import operator
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import fx, nn

from shoal.errors import ModelError
from shoal.pipeline.checks import check_in, may_catch, needed
from shoal.pipeline.dice import Dice
from shoal.pipeline.fixed import FixedValues
from shoal.pipeline.kept import Kept
from shoal.pipeline.makers import watching_makers
from shoal.pipeline.nodes import INSIDE, LINE
from shoal.pipeline.reach import around, reachable
from shoal.pipeline.stand_ins import BufferProxy, StepAttribute, StepProxy
from shoal.pipeline.unseen import (
    LeftOver,
    Unseen,
    WatchingWrites,
    is_users,
    memory_in,
    memory_of,
    surroundings,
    users_line,
    watching_attributes,
    watching_reads,
)

_READING = threading.RLock()
"""Held while a model is read: what is watched meanwhile is the whole process's."""


def _gives_back(module: nn.Module) -> bool:
    """Whether it will always give back the very tensor it was given."""
    forth, back = module._forward_hooks, module._backward_hooks
    hooks = [forth, back, module._forward_pre_hooks, module._backward_pre_hooks]
    return type(module) is nn.Identity and not any(hooks)


class Tracer(fx.Tracer):
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
            _READING,
            watching_attributes(self._check_attribute),
            watching_reads(self._note_read),
            watching_makers(),
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
                self._refuse(changes(name))
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
        if getattr(args[0], "__module__", "").startswith("torch.distributed"):
            raise _talks_to_ranks(args[0].__name__)
        if kind.startswith("call_"):
            self._check_around()
        node = super().create_node(kind, *args, **kwargs)
        if node.kwargs.get("out") is not None:
            self._refuse("has a step write into another tensor (out=)")
        frames = traceback.walk_stack(sys._getframe(1))
        node.meta[LINE] = users_line(frames, until=Tracer.read.__code__)
        node.meta[INSIDE] = self._open[-1] if self._open else ""
        return node

    def create_arg(self, a: Any) -> Any:
        if type(a) in (StepProxy, StepAttribute, BufferProxy) and a.tracer is not self:
            raise LeftOver
        if isinstance(a, torch.Generator):
            self._check_draw()
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
        if (answer := self._answer_of_check(obj, sys._getframe(2))) is not None:
            holds = obj if answer else self.create_proxy("call_function", operator.not_, (obj,), {})
            where = check_in(sys._getframe(2))
            text = f"{type(self.root).__name__}.forward refuses this batch: {where}"
            self.create_proxy("call_function", torch._assert, (holds, text), {})
            return answer
        try:
            return bool(super().to_bool(obj))
        except fx.proxy.TraceError as error:
            self._stop(error)

    def _answer_of_check(self, obj: fx.Proxy, frame: FrameType) -> bool | None:
        """None: it is none, or somebody may catch what it raises, and go on with something else."""
        if not is_users(frame):
            return None
        above = itertools.takewhile(
            lambda each: each[0].f_code is not Tracer.read.__code__, traceback.walk_stack(frame)
        )
        if any(is_users(each) and may_catch(each) for each, _ in above):
            return None
        return needed(frame, obj.node.target)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        try:
            return super().iter(obj)
        except fx.proxy.TraceError as error:
            self._stop(error)

    def _stop(self, error: Exception) -> NoReturn:
        self.failed = self.failed or (self._open[-1] if self._open else "")
        self._first = self._first or error
        raise self._first


def _talks_to_ranks(name: str) -> ModelError:
    """Not to be kept whole: it would wait for ranks that are elsewhere."""
    line = users_line(traceback.walk_stack(sys._getframe(1)))
    return ModelError(
        f"a forward() calls torch.distributed.{name}, which waits for another rank. Stages pass on "
        "by themselves what later ones need: write the model as for one process, without it."
        + (f"\n  {line}" if line else "")
    )


def changes(name: str) -> str:
    return f"changes what it keeps in {name!r}, as it would not do with every batch"


_DRAWS = "draws random numbers that would be the same ones for every batch"
