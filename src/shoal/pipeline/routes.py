"""Which values go from which stage to which: a table, settled before anything moves."""

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
    places: list[str]
    """Names of what stands for it in the stage's own graph. More than one where gradients of single
    uses must travel apart, so that they are added up in the same order as in one process."""


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


def route(graph: Graph, cuts: Sequence[int]) -> Routes:
    """The table of routes for these cuts."""
    num_units = len(graph.units)
    routes = Routes(list(cuts), [[] for _ in range(len(cuts) + 1)], num_units)
    last_stage = len(cuts)
    number = {name: i for i, name in enumerate(graph.units)}
    for value, users in graph.users().items():
        maker = routes.stage_of(number[value]) if value in number else 0
        by_stage: dict[int, list[int]] = {}
        for user in users:
            stage = last_stage if user == num_units else routes.stage_of(user)
            if stage != maker:
                by_stage.setdefault(stage, []).append(user)
        for stage, uses in by_stage.items():
            alone = len(uses) == 1 or stage == max(by_stage)
            names = [value] if alone else [f"{value}__{use}" for use in uses]
            routes.ports[stage].append(Port(value, maker, names))
    return routes
