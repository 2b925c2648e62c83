"""Whether a stage computes with what it does not have: on its own rank it would be something else.

All stages are tried in one process (comparison.py), where each could reach what belongs to another:
weights by way of a hook, a list or a closure, or a value that another has left in an attribute. So
every operation is looked at, with all tensors that it is given.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.pipeline.unseen import Line, memory_of, users_line
from shoal.wire.tree import tensors_of


class Borders:
    """Between the stages of one model, while they are tried one after the other."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """names: of the model's own tensors, by their memory."""
        self.faults: dict[str, None] = {}
        self._names = names
        self._makers: dict[int, int] = {}
        """By the memory of what was made: the stage that made it."""
        self._made: list[torch.UntypedStorage] = []
        """All of it: so that no memory is used twice."""
        self._is_crossed = False

    @contextmanager
    def around(self, stage: int, own: set[int]) -> Iterator[None]:
        """What is computed meanwhile is computed in that stage; own: the memory of its tensors."""
        with _Watching(self, stage, own):
            yield

    @contextmanager
    def crossed(self) -> Iterator[None]:
        """What is made meanwhile is a message, and will be whoever's gets it."""
        self._is_crossed = True
        try:
            yield
        finally:
            self._is_crossed = False

    def note(self, stage: int, own: set[int], given: Any, made: Any) -> None:
        if self._is_crossed:
            return
        for tensor in tensors_of(given).values():
            memory = memory_of(tensor)
            if memory in own:
                continue
            maker = self._makers.get(memory, stage)
            if memory in self._names:
                self._add(stage, f"{self._names[memory]}, which is not in that stage")
            elif maker != stage:
                self._add(stage, f"a value of stage {maker} that did not come from there")
        for tensor in tensors_of(made).values():
            memory = memory_of(tensor)
            if tensor.layout is torch.strided and memory not in self._makers:
                self._makers[memory] = stage
                self._made.append(tensor.untyped_storage())

    def _add(self, stage: int, what: str) -> None:
        line = users_line(traceback.walk_stack(sys._getframe(2)))
        self.faults[f"stage {stage} computes with {what}.{_shown(line)}"] = None


def _shown(line: Line | None) -> str:
    return f"\n  {line}" if line else ""


def names_by_memory(model: nn.Module) -> dict[int, str]:
    named = [*model.named_buffers(), *model.named_parameters()]
    return {memory_of(tensor): name for name, tensor in named}


class _Watching(TorchDispatchMode):
    def __init__(self, borders: Borders, stage: int, own: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._borders = borders
        self._stage = stage
        self._own = own

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        self._borders.note(self._stage, self._own, [args, kwargs], made)
        return made
