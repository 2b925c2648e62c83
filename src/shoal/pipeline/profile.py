"""A short profile of every step of a model, with a real batch: what automatic cuts are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shoal.errors import ModelError
from shoal.layout import Share
from shoal.pipeline import micro_batches
from shoal.pipeline.graph import Graph, attribute, place_of, shared, tensors_held
from shoal.pipeline.in_place import changed_in_place
from shoal.pipeline.kinds import crosses
from shoal.pipeline.lone_step import DoesNotFit, if_it_fitted, leaves, size_of, timed, tried
from shoal.pipeline.meta import is_on_meta
from shoal.pipeline.partition import Costs, Unit, Value, cut, cut_for_turns, places_in
from shoal.pipeline.play import refine
from shoal.pipeline.schedule import Schedule
from shoal.wire.tree import Tree, detached, tensors_of

PASSES = 3
"""What disturbs for a while hits all repeats of a step alike, and not every pass over them all."""
ENOUGH_S = 2.0
"""A further pass begins only before."""
UNSENDABLE = -1
"""In place of a size: a named tuple, or what else no message holds."""


def choose_cuts(
    graph: Graph,
    inputs: dict[str, Tree],
    num_stages: int,
    costs: Costs,
    schedule: Schedule | None = None,
    weights: Sequence[float] = (),
) -> list[int]:
    """The units that stages 1, 2, ... begin with, so that a step is short.

    inputs: of a micro-batch. weights: of all micro-batches, relative to that one. Without a
    schedule, or where stages take turns, the slowest stage is what counts.
    """
    units, values = profile(graph, inputs)
    values += _buffers(graph)
    if schedule is not None:
        costs = replace(costs, num_kept=schedule.most_alive(0))
    together = [*shared(graph), *changed_in_place(graph)]
    together += [pair for value in values for pair in _bound(value)]
    if schedule is None:
        return cut(units, values, num_stages, costs, together)
    if schedule.name == "sequential":
        return cut_for_turns(units, values, num_stages, costs, together)
    cuts = cut(units, values, num_stages, costs, together)
    places, _ = places_in(units, num_stages, together)
    return refine(units, values, cuts, places, costs, schedule, weights)


def choose_cuts_of_batch(
    graph: Graph,
    inputs: dict[str, Tree],
    parts: Sequence[Share],
    costs: Costs,
    schedule: Schedule,
) -> list[int]:
    """The same, of a whole batch: by a profile with its largest micro-batch."""
    largest = _largest(parts)
    weights = [part.size / max(parts[largest].size, 1) for part in parts]
    example = micro_batches.split(inputs, parts)[largest]
    return choose_cuts(graph, example, schedule.num_stages, costs, schedule, weights)


def check_shapes(graph: Graph, inputs: dict[str, Tree], parts: Sequence[Share]) -> None:
    """Raises ModelError with every step that does not take what comes to it, of a batch."""
    state = torch.random.get_rng_state()
    try:
        with torch.no_grad():
            _run_all(graph, micro_batches.split(inputs, parts)[_largest(parts)], tried)
    finally:
        torch.random.set_rng_state(state)


def _largest(parts: Sequence[Share]) -> int:
    return max(range(len(parts)), key=lambda number: parts[number].size)


def _bound(value: Value) -> list[tuple[int, int]]:
    """Units that a value ties together, because it is none that a message can hold."""
    if value.size_bytes >= 0:
        return []
    return [(value.made_by, use) for use in value.used_by]


def profile(graph: Graph, inputs: dict[str, Tree]) -> tuple[list[Unit], list[Value]]:
    """Runs every step forward and backward, one at a time, on this rank.

    Of a model on the meta device one layer at a time is made, used and thrown away.
    """
    state = torch.random.get_rng_state()
    begun = time.perf_counter()
    try:
        units, values = _run_all(graph, inputs, timed)
        for _ in range(PASSES - 1):
            if time.perf_counter() > begun + ENOUGH_S or is_on_meta(graph.model):
                break  # whose layers would have to be made once more
            again = _run_all(graph, inputs, timed)[0]
            units = list(map(_fastest, units, again))
    finally:
        torch.random.set_rng_state(state)
    weights = zip(units, _weight_bytes(graph), strict=True)
    return [replace(unit, parameter_bytes=size) for unit, size in weights], values


def _fastest(one: Unit, other: Unit) -> Unit:
    return replace(
        one,
        forward_s=min(one.forward_s, other.forward_s),
        backward_s=min(one.backward_s, other.backward_s),
        weights_s=min(one.weights_s, other.weights_s),
    )


def _weight_bytes(graph: Graph) -> list[int]:
    """Of each unit: its parameters, but those that one before has too: they are in one stage."""
    sizes = {place_of(p): p.nbytes for p in graph.model.parameters()}
    return [sum(sizes.pop(each) for each in held & sizes.keys()) for held in tensors_held(graph)]


def _buffers(graph: Graph) -> list[Value]:
    """Which every stage that uses them has."""
    held = tensors_held(graph)
    users = [
        (buffer, tuple(number for number, each in enumerate(held) if place_of(buffer) in each))
        for buffer in graph.model.buffers()
    ]
    return [
        Value(-1, used_by, buffer.nbytes, has_gradient=False)
        for buffer, used_by in users
        if used_by
    ]


_Run = Callable[[fx.Node, Graph, dict[str, Any], str], tuple[Any, Unit]]
"""Runs a step of that name, with the values that are known: what it gives, and what it costs."""


def _run_all(graph: Graph, inputs: dict[str, Tree], run: _Run) -> tuple[list[Unit], list[Value]]:
    units: list[Unit] = []
    values: list[Value] = []
    number = {name: i for i, name in enumerate(graph.units)}
    last = len(number) - 1  # what the model returns is wanted where the last unit is
    users = {name: sorted({min(u, last) for u in uses}) for name, uses in graph.users().items()}
    names = graph.names()
    known: dict[str, Any] = {}
    """By value: what it is; it needs a gradient here where it does in the model."""
    faults: list[DoesNotFit] = []
    nodes = list(graph.training.nodes)
    makers = {number.get(source.name) for source in nodes[-1].all_input_nodes}
    """Of what the model returns, of which the loss keeps as much again."""
    last_use = {source: node for node in nodes for source in node.all_input_nodes}
    for node in nodes:
        if node.op == "placeholder":
            known[node.name] = detached(inputs[node.name])
            values.append(_value(known[node.name], 0, users[node.name], has_gradient=False))
        elif node.op == "get_attr":
            # A leaf of its own: the model's must not collect gradients here.
            known[node.name] = leaves(_real(attribute(graph.model, str(node.target))))
        elif node.name in number:
            if any(source.name not in known for source in node.all_input_nodes):
                continue  # after a fault: nobody knows what would come
            try:
                result, unit = run(node, graph, known, names[number[node.name]])
                if number[node.name] in makers:
                    unit = replace(unit, kept_bytes=unit.kept_bytes + size_of(result))
            except DoesNotFit as error:
                faults.append(error)
                known |= if_it_fitted(node, graph, known)
                continue
            known[node.name] = result
            units.append(unit)
            values.append(_value(result, number[node.name], users[node.name], has_gradient=True))
            for source in node.all_input_nodes:
                if last_use[source] is node:  # the whole model's may be more than a host can hold
                    del known[source.name]

    if faults:
        raise ModelError([str(fault) for fault in faults]) from faults[0].__cause__
    return units, values


def _value(tree: Tree, made_by: int, used_by: Sequence[int], *, has_gradient: bool) -> Value:
    return Value(
        made_by,
        tuple(used_by),
        size_of(tree) if crosses(tree) else UNSENDABLE,
        has_gradient and any(t.is_floating_point() for t in tensors_of(tree).values()),
    )


def _real(tensor: Any) -> Any:
    is_meta = isinstance(tensor, torch.Tensor) and tensor.is_meta
    if not is_meta:
        return tensor
    return torch.ones_like(tensor, device="cpu").requires_grad_(tensor.requires_grad)
