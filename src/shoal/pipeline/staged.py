"""The steps of a stage as a module: its children and tensors are the model's, by the same names.

Like torch's fx.GraphModule, but for two things. The steps of both modes are in one module, so that
it has all that either of them uses. And it has no attributes of its own that a layer could not be
called (`code`, `graph`, `meta`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import fx, nn
from torch.fx.graph_module import _forward_from_src

from shoal.errors import ModelError

Stubborn = dict[str, tuple[bool, bool]]
"""Modules, by path, that do not follow train() and eval(): the mode that they then have."""
_GRAPHS, _FORWARDS, _STUBBORN = "graphs of the steps", "what takes them", "who keeps its mode"
"""Names that no attribute of a model's has."""


class StageModule(nn.Module):
    """Takes the steps of its mode, with the modules and tensors of a model."""

    def __init__(
        self,
        model: nn.Module,
        training: fx.Graph,
        evaluating: fx.Graph | None = None,
        stubborn: Stubborn | None = None,
    ) -> None:
        """evaluating: the steps in eval(); None: the same."""
        super().__init__()
        graphs = (training,) if evaluating is None else (training, evaluating)
        self.__dict__[_GRAPHS] = graphs
        paths = dict.fromkeys(path for graph in graphs for path in uses(graph))
        for path in paths:
            words = path.split(".")
            around = (".".join(words[:end]) for end in range(1, len(words) + 1))
            _adopt(self, model, next(each for each in around if each in paths))
        self.__dict__[_FORWARDS] = tuple(map(_compiled, graphs))
        self.training = model.training
        mine = {name for name, _ in self.named_modules(remove_duplicate=False)}
        self.__dict__[_STUBBORN] = {k: v for k, v in (stubborn or {}).items() if k in mine}

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        set_stubborn(self, self.__dict__[_STUBBORN])
        return self

    def forward(self, *given: Any) -> Any:
        forwards = self.__dict__[_FORWARDS]
        return forwards[0 if self.training else -1](self, *given)


def set_stubborn(stage: nn.Module, stubborn: Mapping[str, Sequence[bool]]) -> None:
    """After train() or eval() of a stage."""
    for path, modes in stubborn.items():
        stage.get_submodule(path).training = modes[0 if stage.training else 1]


def stubborn_in(module: StageModule) -> Stubborn:
    found: Stubborn = vars(module)[_STUBBORN]
    return found


def graphs_of(module: StageModule) -> tuple[fx.Graph, ...]:
    """For training and, where it has other steps, for evaluating."""
    found: tuple[fx.Graph, ...] = vars(module)[_GRAPHS]
    return found


def uses(graph: fx.Graph) -> Iterator[str]:
    """Paths of the modules that are called and of the tensors that are read."""
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            yield str(node.target)


def _compiled(graph: fx.Graph) -> Any:
    code = graph.python_code("self")
    try:
        return _forward_from_src(code.src, code.globals)
    except SyntaxError as error:
        raise ModelError(
            f"torch.fx writes steps down as a program, and this is none: {error.text}. Is a layer "
            "called like a word of Python's (class, lambda)? Call it otherwise."
        ) from error


def _adopt(stage: nn.Module, model: nn.Module, path: str) -> None:
    """The module or tensor of the model that is at `path`, with all that is inside."""
    *way, name = path.split(".")
    for step in way:
        model = _child(model, step)
        inner = stage._modules.get(step)
        if inner is None:
            inner = stage._modules[step] = nn.Module()
        stage = inner
    if name in model._modules:
        stage._modules[name] = model._modules[name]
    elif name in model._parameters:
        stage._parameters[name] = model._parameters[name]
    else:
        tensor = model._buffers[name] if name in model._buffers else getattr(model, name)
        is_state = name in model._buffers and name not in model._non_persistent_buffers_set
        if isinstance(tensor, torch.Tensor):
            stage.register_buffer(name, tensor, persistent=is_state)
        else:
            setattr(stage, name, tensor)


def _child(model: nn.Module, name: str) -> nn.Module:
    child = model._modules.get(name)
    return getattr(model, name) if child is None else child
