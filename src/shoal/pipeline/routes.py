"""Which values go from which stage to which: a table, settled before anything moves.

    value       stage 0 ──> 1, stage 0 ──> 2, stage 0 ──> 3    straight to each stage that uses it
    gradient    stage 3 ──> 2 ──> 1 ──> 0                      from user to user: each adds its own

One process adds gradients up in this order, the last use first; so the sum is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        return [port.value for port in self.ports[stage] if self._before(port, stage) == to]

    def backs(self, stage: int) -> list[int]:
        """Earlier stages that get gradients from this one."""
        return sorted({self._before(port, stage) for port in self.ports[stage]})

    def forths(self, stage: int) -> list[int]:
        """Later stages that gradients come from."""
        return [s for s in range(stage + 1, self.num_stages) if self.back(s, stage)]

    def _before(self, port: Port, stage: int) -> int:
        users = (s for s in reversed(range(stage)) if port in self.ports[s])
        return next(users, port.source)


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
    return routes
