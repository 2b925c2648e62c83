"""One stage's part of a model, as a module: what it gets goes in, what it makes comes out."""

from __future__ import annotations

import torch
from torch import fx, nn

from shoal.pipeline.graph import Graph
from shoal.pipeline.routes import Routes
from shoal.pipeline.trace import changes_in_place
from shoal.pipeline.views import memory_roots

OUTPUT = "output"
"""The name of what the model returns, among the values that stages make."""


def stage_module(graph: Graph, routes: Routes, stage: int, *, training: bool) -> fx.GraphModule:
    """The part of the model that is computed in `stage`: places in, values for others out.

    Takes, in order, the model's inputs (stage 0) or the values of its ports; returns the list of
    values that `values_made` names. It shares modules and parameters with the model.
    """
    whole = graph.training if training else graph.evaluating
    part = fx.Graph()
    units = routes.units_of(stage)
    mine = set(graph.units[units.start : units.stop])
    entering = graph.inputs if stage == 0 else [port.value for port in routes.ports[stage]]
    known = {value: part.placeholder(value) for value in entering}
    """What stands for a value here."""
    for value in entering:
        if value in _changed_in_place(graph, whole, mine):
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
