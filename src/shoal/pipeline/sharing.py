"""Plain things (a dict, a counter) that modules of several stages have in common.

In one process what one module writes there another reads. On ranks of their own each has one of its
own, so whoever changes such a thing while all stages are tried in one process is told of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
from torch import nn

from shoal.pipeline.reach import reachable, slots_of


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
        self._before = [_content(thing.itself) for thing in self._things]

    def changed_by(self, stage: int) -> list[str]:
        """Since this was made, or asked last: what that stage has done, in words."""
        faults = []
        for at, (thing, stages) in enumerate(self._things):
            now = _content(thing)
            if now != self._before[at]:
                others = ", ".join(str(other) for other in sorted(stages - {stage}))
                faults.append(
                    f"stage {stage} changes {self._called(thing)}, which stage {others} has, too: "
                    "on a rank of its own it would have another. Let what is in it be an output of "
                    "the one module, and an input of the other."
                )
                self._before[at] = now
        return faults

    def _called(self, thing: Any) -> str:
        for path, module in self._model.named_modules():
            if vars(module) is thing:
                return f"an attribute of {path or 'the model'}"
            for name, value in vars(module).items():
                if value is thing or getattr(value, "__dict__", None) is thing:
                    return f"{path}.{name}".strip(".")
        return f"a {type(thing).__name__} that its modules hold"


def _content(thing: Any) -> Any:
    """To be compared: which things are in it, not what is in these."""
    match thing:
        case dict():
            return [(key, id(value)) for key, value in thing.items()]
        case list() | deque():
            return list(map(id, thing))
        case set():
            return set(map(id, thing))
        case numpy.ndarray():
            return thing.tobytes()
    return {name: id(value) for name, value in slots_of(thing).items()}
