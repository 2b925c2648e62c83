"""Plain things (a dict, a counter) that modules of several stages have in common.

In one process what one module writes there another reads. On ranks of their own each has one of its
own, so whoever changes such a thing while all stages are tried in one process is told of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from shoal.pipeline.kept import content_of
from shoal.pipeline.reach import reachable


class _Thing(NamedTuple):
    itself: Any
    stages: set[int]
    """That have it."""


class SharedThings:
    """Of the stages of one model."""

    def __init__(self, model: nn.Module, stages: Sequence[nn.Module]) -> None:
        self._model = model
        found: dict[int, _Thing] = {}
        for number, stage in enumerate(stages):
            for thing in reachable(stage):
                found.setdefault(id(thing), _Thing(thing, set())).stages.add(number)
        self._things = [thing for thing in found.values() if len(thing.stages) > 1]
        self._content = content_of([thing.itself for thing in self._things])
        self._before = self._content()

    def changed_by(self, stage: int) -> list[str]:
        """Since this was made, or asked last: what that stage has done, in words."""
        faults = []
        before, self._before = self._before, self._content()
        for (thing, stages), was, now in zip(self._things, before, self._before, strict=True):
            if now != was:
                others = ", ".join(str(other) for other in sorted(stages - {stage}))
                faults.append(
                    f"stage {stage} changes {self._called(thing)}, which stage {others} has, too: "
                    "on a rank of its own it would have another. Let what is in it be an output of "
                    "the one module, and an input of the other."
                )
        return faults

    def _called(self, thing: Any) -> str:
        for path, module in self._model.named_modules():
            if vars(module) is thing:
                return f"an attribute of {path or 'the model'}"
            for name, value in vars(module).items():
                if value is thing or getattr(value, "__dict__", None) is thing:
                    return f"{path}.{name}".strip(".")
        return f"a {type(thing).__name__} that its modules hold"
