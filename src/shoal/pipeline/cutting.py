"""Where a model is cut, on every rank alike: by name, or where a profile of rank 0's finds best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal.crew import Crew
from shoal.errors import ModelError, reason_of
from shoal.layout import Layout, Share
from shoal.pipeline.footprint import bytes_per_weight_byte
from shoal.pipeline.graph import Graph, cuts_at
from shoal.pipeline.measure import measure_costs
from shoal.pipeline.plan import Plan
from shoal.pipeline.profile import check_shapes, choose_cuts_of_batch
from shoal.pipeline.schedule import make_schedule
from shoal.wire.link import Link
from shoal.wire.tree import Tree

Inputs = Callable[[], tuple[dict[str, Tree], list[Share]]]
"""Gives the inputs of a batch, by value, and its micro-batches."""


def named_cuts(crew: Crew, plan: Plan, graph: Graph, inputs: Inputs | None) -> list[int]:
    """inputs: where they are known, every step is tried with them, as there is no profile."""
    cuts = cuts_at(graph, plan.cuts or [], plan.stages)

    def try_shapes() -> None:
        if inputs is not None:
            check_shapes(graph, *inputs())

    found_by_rank_0(crew, "the shapes of the model", try_shapes)
    return cuts


def best_cuts(
    crew: Crew, link: Link, layout: Layout, plan: Plan, graph: Graph, inputs: Inputs
) -> list[int]:
    """By a profile with these inputs."""
    in_turns = plan.schedule == "sequential"
    costs = measure_costs(crew, link, layout, in_turns=in_turns)
    held = bytes_per_weight_byte(plan.optimizer, plan.optimizer_options, layout.replicas)
    costs = replace(costs, bytes_per_parameter_byte=held)
    if plan.memory_bytes is not None:
        costs = replace(costs, memory_bytes=plan.memory_bytes)

    def choose() -> list[int]:
        if plan.stages == 1:
            return []
        named, parts = inputs()
        schedule = make_schedule(plan.schedule, plan.stages, len(parts))
        return choose_cuts_of_batch(graph, named, parts, costs, schedule)

    cuts: list[int] = found_by_rank_0(crew, "the cuts", choose)
    return cuts


def found_by_rank_0(crew: Crew, what: str, find: Callable[[], Any]) -> Any:
    """What rank 0 finds, on every rank; or why it does not, such as a fault of the model."""
    found, fault, own = None, "", None
    if crew.rank == 0:
        try:
            found = find()
        except ModelError as error:
            fault = str(error)
        except Exception as error:
            fault, own = f"rank 0, at {what}: {reason_of(error)}", error
    found, fault = crew.exchange(what, [found, fault])[0]
    if own is not None:
        raise own
    if fault:
        raise ModelError(fault)
    return found
