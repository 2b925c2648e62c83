"""One stage's part of a model, as a module: what it gets goes in, what it makes comes out."""

from __future__ import annotations

from functools import partial

import torch
from torch import fx, nn

from shoal.pipeline.graph import Graph, memory_roots
from shoal.pipeline.routes import Routes
from shoal.pipeline.trace import changes_in_place

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
    changed = _changed_in_place(graph, whole, mine)

    def enter(value: str, places: list[str]) -> list[fx.Node]:
        made = [part.placeholder(place) for place in places]
        entering.append((value, made))
        return made

    entering: list[tuple[str, list[fx.Node]]] = []
    for name in graph.inputs if stage == 0 else []:
        known[name] = {-1: enter(name, [name])[0]}
    for port in routes.ports[stage]:
        uses = [-1] if len(port.places) == 1 else [_use_of(place) for place in port.places]
        known[port.value] = dict(zip(uses, enter(port.value, port.places), strict=True))
    for value, made in entering:
        if value in changed:  # autograd lets nobody change a leaf, nor should the caller's x change
            copies = [part.call_function(torch.clone, (node,)) for node in made]
            known[value] = dict(zip(known[value], copies, strict=True))

    def found(node: fx.Node, user: int) -> fx.Node:
        if node.op == "get_attr" and node.name not in known:
            known[node.name] = {-1: part.node_copy(node, lambda each: each)}
        places = known[node.name]
        return places.get(user, places.get(-1)) or next(iter(places.values()))

    for node in whole.nodes:
        if node.name in mine:
            user = number[node.name]
            known[node.name] = {-1: part.node_copy(node, partial(found, user=user))}
    outputs: list[fx.Node] = []
    for value in values_made(graph, routes, stage):
        if value == OUTPUT:
            (returned,) = nodes[OUTPUT].args
            outputs.append(fx.map_arg(returned, lambda n: found(n, len(graph.units))))
        else:
            outputs.append(next(iter(known[value].values())))
    part.output(outputs)
    part.lint()
    module = fx.GraphModule(graph.model, part, f"Stage{stage}")
    _leave_constants_out(module, graph.model)
    return module


def _leave_constants_out(module: nn.Module, model: nn.Module) -> None:
    """Of the state: fx makes buffers of all tensors that forward() takes from anywhere."""
    names = set(model.state_dict())
    for path, owner in module.named_modules():
        for name, _ in owner.named_buffers(recurse=False):
            if (f"{path}.{name}" if path else name) not in names:
                owner._non_persistent_buffers_set.add(name)


def _use_of(place: str) -> int:
    """The unit that a place of its own is for."""
    return int(place.rpartition("__")[2])


def _changed_in_place(graph: Graph, whole: fx.Graph, mine: set[str]) -> set[str]:
    """Values from elsewhere that a step of this stage would change, directly or through a view."""
    nodes = [node for node in whole.nodes if node.name in mine]
    roots = memory_roots(graph, nodes)
    return {roots[node.name] for node in nodes if changes_in_place(node, graph.model)} - mine


def values_made(graph: Graph, routes: Routes, stage: int) -> list[str]:
    """Names of what a stage's module returns, in order."""
    wanted = {
        port.value for later in routes.ports[stage + 1 :] for port in later if port.source == stage
    }
    row = [*graph.inputs, *graph.units] if stage == 0 else graph.units
    made = [name for name in row if name in wanted]
    return [*made, OUTPUT] if stage == routes.num_stages - 1 else made
