"""What the stages of a model would compute, compared with what the model would, without computing.

For models that are too large to be made for a comparison. Their tensors have shapes, and no values.
Each is known by how it comes about: by the step that gives it, and by how what that is given came
about. What comes of neither inputs nor weights is a constant, which may have been made before.
"""

from __future__ import annotations

import copy
import hashlib
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from shoal.pipeline.borders import Borders, names_by_memory
from shoal.pipeline.graph import Graph
from shoal.pipeline.routes import Routes
from shoal.pipeline.split import OUTPUT, stage_module, values_made
from shoal.pipeline.unseen import Line, memory_of, users_line
from shoal.wire.tree import Tree, tensors_of, with_tensors


def faults_of_stages(
    graph: Graph, routes: Routes, inputs: dict[str, Tree], mode: bool | None
) -> list[str]:
    """None: they are the model. Raises what the model raises, as some do where a step asks for
    values.

    mode: of the model; None: every part has its own.
    """
    without_values = FakeTensorMode(allow_non_fake_inputs=True)
    given = {name: _without_values(tree, without_values) for name, tree in inputs.items()}
    one, other = (_without_memory(graph, without_values, mode) for _ in range(2))
    with without_values, torch.no_grad():
        alone = _computed(one.model, given, lambda: one.model(**one.given(given)))
        borders = Borders(names_by_memory(other.model))
        in_stages = _computed(
            other.model, given, lambda: _output_of_stages(other, routes, given, borders)
        )
    is_same = alone.results == in_stages.results
    return [*borders.faults, *([] if is_same else [_told(alone, in_stages)])]


class _Steps(TorchDispatchMode):
    """Notes how tensors come about."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.taken: dict[str, tuple[str, Line | None]] = {}
        """The steps, by how what they give comes about: their names, and the user's lines."""
        self.results: dict[str, str] = {}
        """By what a user calls them: how the outputs, and the buffers, come about."""
        self._origins: dict[int, str] = {}
        """By a tensor's id; none of constants."""
        self._held: list[torch.Tensor] = []  # so that no other has the same id

    def note(self, tensor: torch.Tensor, origin: str) -> None:
        self._origins[id(tensor)] = origin
        self._held.append(tensor)

    def origin(self, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        kind = f"{value.dtype} {tuple(value.shape)}"
        return f"{self._origins.get(id(value), 'a constant')} {kind}"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = _by_name(func, args, kwargs or {})
        is_constant = not any(id(each) in self._origins for each in tree_iter(given))
        origin = f"{func} {tree_map(self.origin, given)}"
        made = func(*args, **(kwargs or {}))
        if is_constant:
            return made
        if func is torch.ops.aten.clone.default:  # stages copy what they change in place
            self.note(made, self._origins[id(args[0])])
            return made
        self.taken[origin] = str(func), users_line(traceback.walk_stack(sys._getframe(1)))
        for number, tensor in enumerate([*_written(func, given), *tree_iter(made)]):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor, hashlib.sha256(f"{number} of {origin}".encode()).hexdigest())
        return made


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All that a step is given, also what was left out and has a default."""
    names = [argument.name for argument in func._schema.arguments]
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _written(func: Any, given: dict[str, Any]) -> Iterable[Any]:
    """What a step changes in place."""
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tree_iter(given.get(argument.name))


def _computed(model: nn.Module, given: dict[str, Tree], compute: Callable[[], Any]) -> _Steps:
    """compute: gives the output."""
    steps = _Steps()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        steps.note(tensor, name)
    for name, tree in given.items():
        for path, tensor in tensors_of(tree).items():
            steps.note(tensor, f"input {name} {path}")
    with steps:
        output = compute()
    for path, tensor in tensors_of(output).items():
        name = "the output" + "".join(f"[{key!r}]" for key in path)
        steps.results[name] = steps.origin(tensor)
    for name, buffer in model.named_buffers():
        steps.results[f"the buffer {name}"] = steps.origin(buffer)
    return steps


def _output_of_stages(
    graph: Graph, routes: Routes, given: dict[str, Tree], borders: Borders
) -> Any:
    values: dict[str, Any] = dict(given)
    for number in range(routes.num_stages):
        module = stage_module(graph, routes, number)
        taken = [port.value for port in routes.ports[number]] if number else graph.inputs
        with borders.crossed():
            came = [_message(values[name]) for name in taken]
        own = {memory_of(tensor) for tensor in [*module.parameters(), *module.buffers()]}
        with borders.around(number, own):
            made = module(*came)
        values |= dict(zip(values_made(graph, routes, number), made, strict=True))
    return values[OUTPUT]


def _message(tree: Tree) -> Tree:
    return with_tensors(tree, {path: tensor.clone() for path, tensor in tensors_of(tree).items()})


def _without_memory(graph: Graph, without_values: FakeTensorMode, mode: bool | None) -> Graph:
    """A copy, whose weights and buffers have shapes only."""
    model = graph.model
    known: dict[int, Any] = {}
    with without_values:
        for tensor in [*model.parameters(), *model.buffers()]:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            is_weight = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
    made = copy.deepcopy(model, known)
    return replace(graph, model=made if mode is None else made.train(mode))


def _without_values(tree: Tree, mode: FakeTensorMode) -> Tree:
    found: dict[Any, torch.Tensor] = {
        path: mode.from_tensor(tensor.detach()) for path, tensor in tensors_of(tree).items()
    }
    return with_tensors(tree, found)


def _told(alone: _Steps, in_stages: _Steps) -> str:
    """The first result that comes about otherwise, and the first step that is another one."""
    both = alone.results | in_stages.results
    result = next(n for n in both if alone.results.get(n) != in_stages.results.get(n))
    for one, other, who, whom in (
        (alone, in_stages, "the model", "the stages"),
        (in_stages, alone, "the stages", "the model"),
    ):
        for origin, (step, line) in one.taken.items():
            if origin not in other.taken:
                where = f"\n  {line}" if line else ""
                return (
                    f"{result} comes about otherwise: {step}, a step of {who}, is none of {whom}."
                    + where
                )
    return f"{result} is the result of another step."
