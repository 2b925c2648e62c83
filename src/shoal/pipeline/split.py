"""One stage's part of a model, as a module: what it gets goes in, what it makes comes out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx, nn

from shoal.pipeline.graph import Graph, changes_in_place
from shoal.pipeline.routes import Routes

OUTPUT = "output"
"""The name of what the model returns, among the values that stages make."""


def stage_module(graph: Graph, routes: Routes, stage: int, *, training: bool) -> fx.GraphModule:
    """The part of the model that is computed in `stage`: places in, values for others out.

    Takes, in order, the model's inputs (stage 0) or the places of its ports; returns the list of
    values that `values_made` names. It shares modules and parameters with the model.
    """
    whole = graph.training if training else graph.evaluating
    part = fx.Graph()
    units = routes.units_of(stage)
    mine = set(graph.units[units.start : units.stop])
    number = {name: i for i, name in enumerate(graph.units)}
    known: dict[str, dict[int, fx.Node]] = {}
    """What stands for a value, by the unit that uses it; -1: for all."""
    nodes = {node.name: node for node in whole.nodes}
    if stage == 0:
        for name in graph.inputs:
            known[name] = {-1: part.placeholder(name)}
    for port in routes.ports[stage]:
        made = [part.placeholder(place) for place in port.places]
        uses = [-1] if len(made) == 1 else [int(p.rpartition("__")[2]) for p in port.places]
        known[port.value] = dict(zip(uses, made, strict=True))

    def found(node: fx.Node, user: int) -> fx.Node:
        if node.op == "get_attr" and node.name not in known:
            known[node.name] = {-1: part.node_copy(node, lambda each: each)}
        places = known[node.name]
        return places.get(user, places.get(-1)) or next(iter(places.values()))

    for node in whole.nodes:
        if node.name in mine:
            known[node.name] = {-1: _copied(part, node, graph.model, found, number[node.name])}
    outputs: list[fx.Node] = []
    for value in values_made(graph, routes, stage):
        if value == OUTPUT:
            (returned,) = nodes[OUTPUT].args
            outputs.append(fx.map_arg(returned, lambda n: found(n, len(graph.units))))
        else:
            outputs.append(next(iter(known[value].values())))
    part.output(outputs)
    part.lint()
    return fx.GraphModule(graph.model, part, f"Stage{stage}")


def _copied(
    part: fx.Graph,
    node: fx.Node,
    model: nn.Module,
    found: Callable[[fx.Node, int], fx.Node],
    user: int,
) -> fx.Node:
    changes = changes_in_place(node, model)

    def place(source: fx.Node) -> fx.Node:
        mine = found(source, user)
        if changes and mine.op == "placeholder":  # autograd lets nobody change a leaf
            return part.call_function(torch.clone, (mine,))
        return mine

    return part.node_copy(node, place)


def values_made(graph: Graph, routes: Routes, stage: int) -> list[str]:
    """Names of what a stage's module returns, in order."""
    wanted = {
        port.value for later in routes.ports[stage + 1 :] for port in later if port.source == stage
    }
    row = [*graph.inputs, *graph.units] if stage == 0 else graph.units
    made = [name for name in row if name in wanted]
    return [*made, OUTPUT] if stage == routes.num_stages - 1 else made
