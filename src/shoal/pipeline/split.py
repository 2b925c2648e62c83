"""One stage's part of a model, as a module: what it gets goes in, what it makes comes out."""

from __future__ import annotations

import torch
from torch import fx

from shoal.pipeline.graph import Graph
from shoal.pipeline.nodes import changes_in_place, is_unit, is_unknown
from shoal.pipeline.routes import Routes
from shoal.pipeline.staged import StageModule
from shoal.pipeline.views import memory_roots, shares_with

OUTPUT = "the output"
"""What the model returns, among the values that stages make: no step is called so."""


def stage_module(graph: Graph, routes: Routes, stage: int) -> StageModule:
    """The part of the model that is computed in `stage`: places in, values for others out.

    Takes, in order, the model's inputs (stage 0) or the values of its ports; returns the list of
    values that `values_made` names. It shares modules and parameters with the model.
    """
    training, evaluating = (
        _part(graph, routes, stage, whole) for whole in (graph.training, graph.evaluating)
    )
    return StageModule(graph.model, training, evaluating, graph.stubborn)


def _part(graph: Graph, routes: Routes, stage: int, whole: fx.Graph) -> fx.Graph:
    """The steps of a stage, of all those of a mode."""
    part = fx.Graph()
    units = routes.units_of(stage)
    mine = set(graph.units[units.start : units.stop])
    entering = graph.inputs if stage == 0 else [port.value for port in routes.ports[stage]]
    known = {value: part.placeholder(value) for value in entering}
    """What stands for a value here."""
    changed = _changed_in_place(graph, whole, mine)
    for value in entering:
        if value in changed:
            # Autograd lets nobody change a leaf, nor should the caller's x change.
            known[value] = part.call_function(torch.clone, (known[value],))

    def found(node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node.name not in known:
            known[node.name] = part.node_copy(node, lambda each: each)
        return known[node.name]

    for node in whole.nodes:
        if node.name in mine:
            known[node.name] = part.node_copy(node, found)
    outputs: list[fx.Node] = []
    for value in values_made(graph, routes, stage):
        if value == OUTPUT:
            (returned,) = next(node.args for node in whole.nodes if node.op == "output")
            outputs.append(fx.map_arg(returned, found))
        else:
            outputs.append(known[value])
    part.output(outputs)
    part.lint()
    return part


def _changed_in_place(graph: Graph, whole: fx.Graph, mine: set[str]) -> set[str]:
    """Values from elsewhere that a step of this stage would change, directly or through a view."""
    nodes = [node for node in whole.nodes if node.name in mine]
    roots = memory_roots(graph.model, nodes)
    writers = [node for node in nodes if changes_in_place(node, graph.model)]
    return {root for node in writers for root in roots[node.name]} - mine


def values_made(graph: Graph, routes: Routes, stage: int) -> list[str]:
    """Names of what a stage's module returns, in order."""
    wanted = {
        port.value for later in routes.ports[stage + 1 :] for port in later if port.source == stage
    }
    row = [*graph.inputs, *graph.units] if stage == 0 else graph.units
    made = [name for name in row if name in wanted]
    return [*made, OUTPUT] if stage == routes.num_stages - 1 else made


def values_kept(graph: Graph, routes: Routes, stage: int) -> list[str]:
    """Of the values that a stage makes: those whose memory a module may keep, and change later."""
    kept: set[str] = set()
    for whole in (graph.training, graph.evaluating):
        for node in filter(is_unit, whole.nodes):
            shared = {source.name for source in shares_with(node, graph.model)}
            if is_unknown(node, graph.model) or shared & kept:
                kept.add(node.name)
    return [name for name in values_made(graph, routes, stage) if name in kept]
