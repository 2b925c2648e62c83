"""Which values go from which stage to which: a table, settled before anything moves.

    value       stage 0 ──> 1, stage 0 ──> 2, stage 0 ──> 3    straight to each stage that uses it
    gradient    stage 3 ──> 2 ──> 1 ──> 0                      from user to user: each adds its own

One process adds gradients up in this order, the last use first; so the sum is the same to the bit.
Values that may be one tensor by two names (aliases.py) go this way together, past all their users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from shoal.pipeline.aliases import joined, known_pairs, possible_pairs
from shoal.pipeline.graph import Graph


class Port(NamedTuple):
    """A value that a stage gets from an earlier one."""

    value: str
    source: int
    """The stage that makes it; inputs of the model are made by stage 0."""


@dataclass(frozen=True)
class Routes:
    """Which values go from where to where: settled before anything moves."""

    cuts: list[int]
    ports: list[list[Port]]
    """By stage: what it gets."""
    num_units: int
    aliases: dict[str, str] = field(default_factory=dict)
    """By value that may be the tensor of others: the first of all those."""

    @property
    def num_stages(self) -> int:
        return len(self.cuts) + 1

    def stage_of(self, unit: int) -> int:
        return sum(unit >= cut for cut in self.cuts)

    def units_of(self, stage: int) -> range:
        ends = [0, *self.cuts, self.num_units]
        return range(ends[stage], ends[stage + 1])

    def between(self, source: int, stage: int) -> list[Port]:
        return [port for port in self.ports[stage] if port.source == source]

    def sources(self, stage: int) -> list[int]:
        return sorted({port.source for port in self.ports[stage]})

    def targets(self, stage: int) -> list[int]:
        """Later stages that use what this one makes."""
        return [s for s in range(stage + 1, self.num_stages) if self.between(stage, s)]

    def back(self, stage: int, to: int) -> list[str]:
        """Values whose gradients go from `stage` to `to`: who used it before, or who made it."""
        return [value for value in self._passing[stage] if self.before(value, stage) == to]

    def backs(self, stage: int) -> list[int]:
        """Earlier stages that get gradients from this one."""
        return sorted({self.before(value, stage) for value in self._passing[stage]})

    def forths(self, stage: int) -> list[int]:
        """Later stages that gradients come from."""
        return [s for s in range(stage + 1, self.num_stages) if self.back(s, stage)]

    def before(self, value: str, stage: int) -> int:
        """Where the gradient of a value goes from a stage."""
        return max(stop for stop in self._stops[self._family(value)] if stop < stage)

    @cached_property
    def num_detours(self) -> int:
        """How often a gradient passes a stage that does not use its value."""
        return sum(map(len, self._passing)) - sum(map(len, self.ports))

    def _family(self, value: str) -> str:
        return self.aliases.get(value, value)

    @cached_property
    def _stops(self) -> dict[str, set[int]]:
        """By value, and its aliases with it: the stages that make or use it."""
        found: dict[str, set[int]] = {}
        for stage, ports in enumerate(self.ports):
            for port in ports:
                found.setdefault(self._family(port.value), set()).update((port.source, stage))
        return found

    @cached_property
    def _passing(self) -> list[list[str]]:
        """By stage: the values whose gradients leave it; it may have none of its own to add."""
        ends: dict[str, tuple[int, int]] = {}
        for stage, ports in enumerate(self.ports):
            ends |= {port.value: (port.source, stage) for port in ports}
        return [
            [
                value
                for value, (maker, last) in ends.items()
                if maker < stage <= last and stage in self._stops[self._family(value)]
            ]
            for stage in range(self.num_stages)
        ]


def route(graph: Graph, cuts: Sequence[int]) -> Routes:
    """The table of routes for these cuts."""
    num_units = len(graph.units)
    routes = Routes(list(cuts), [[] for _ in range(len(cuts) + 1)], num_units)
    last_stage = len(cuts)
    number = {name: i for i, name in enumerate(graph.units)}
    for value, users in graph.users().items():
        maker = routes.stage_of(number[value]) if value in number else 0
        stages = {last_stage if user == num_units else routes.stage_of(user) for user in users}
        for stage in stages - {maker}:
            routes.ports[stage].append(Port(value, maker))
    return _with_aliases(routes, graph)


def _with_aliases(routes: Routes, graph: Graph) -> Routes:
    given = (graph.model, graph.training, graph.evaluating)
    for pair in known_pairs(*given):
        routes = replace(routes, aliases=joined(routes.aliases, *pair))
    for pair in possible_pairs(*given):
        together = replace(routes, aliases=joined(routes.aliases, *pair))
        # For what will hardly be so, no gradient makes a detour.
        if together.num_detours <= routes.num_detours:
            routes = together
    return routes
