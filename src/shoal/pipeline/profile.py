"""A short profile of every step of a model, with a real batch: what automatic cuts are made of."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from shoal.errors import ModelError
from shoal.pipeline.build import materialise
from shoal.pipeline.graph import Graph, attribute, shared
from shoal.pipeline.partition import Costs, Unit, Value, cut
from shoal.wire.tree import Tree, tensors_of, with_tensors

REPEATS = 3


def choose_cuts(graph: Graph, inputs: dict[str, Tree], num_stages: int, costs: Costs) -> list[int]:
    """The units that stages 1, 2, ... begin with, so that the slowest stage is fastest."""
    units, values = profile(graph, inputs)
    return cut(units, values, num_stages, costs, shared(graph))


def profile(graph: Graph, inputs: dict[str, Tree]) -> tuple[list[Unit], list[Value]]:
    """Runs every step forward and backward, one at a time, on this rank.

    Of a model on the meta device one layer at a time is made, used and thrown away.
    """
    number = {name: i for i, name in enumerate(graph.units)}
    users = graph.users()
    known: dict[str, Any] = {}
    units: list[Unit] = []
    values: list[Value] = []
    state = torch.random.get_rng_state()
    for node in graph.training.nodes:
        if node.op == "placeholder":
            known[node.name] = inputs[node.name]
            values.append(_value(known[node.name], 0, users[node.name], has_gradient=False))
        elif node.op == "get_attr":
            known[node.name] = _real(attribute(graph.model, str(node.target)))
        elif node.name in number:
            result, unit = _timed(node, graph, known)
            known[node.name] = result
            units.append(unit)
            values.append(_value(result, number[node.name], users[node.name], has_gradient=True))
    torch.random.set_rng_state(state)
    return units, values


def _value(tree: Tree, made_by: int, used_by: Sequence[int], *, has_gradient: bool) -> Value:
    tensors = tensors_of(tree).values()
    return Value(
        made_by,
        tuple(used_by),
        sum(t.nbytes for t in tensors),
        has_gradient and any(t.is_floating_point() for t in tensors),
    )


def _real(tensor: Any) -> Any:
    is_meta = isinstance(tensor, torch.Tensor) and tensor.is_meta
    return torch.ones_like(tensor, device="cpu") if is_meta else tensor


def _timed(node: fx.Node, graph: Graph, known: dict[str, Any]) -> tuple[Any, Unit]:
    call, parameters = _callable(node, graph.model)
    forward_s, backward_s, kept = [], [], 0
    result: Any = None
    for _ in range(REPEATS):
        args = fx.map_arg(node.args, lambda n: _leaf(known[n.name]))
        kwargs = fx.map_arg(node.kwargs, lambda n: _leaf(known[n.name]))
        begun = time.perf_counter()
        try:
            with torch.enable_grad():
                result = call(*args, **kwargs)
        except Exception as error:
            shapes = [tuple(t.shape) for t in tensors_of(list(args)).values()]
            raise ModelError(
                f"step {node.name} of the model does not take what comes to it, of shapes "
                f"{', '.join(map(str, shapes))}: {error}"
            ) from error
        middle = time.perf_counter()
        roots = [t for t in tensors_of(result).values() if t.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        forward_s.append(middle - begun)
        backward_s.append(time.perf_counter() - middle)
    kept = sum(t.nbytes for t in tensors_of(result).values())
    for parameter in parameters:
        parameter.grad = None
    result = _detached(result)
    size = sum(p.nbytes for p in parameters)
    # The fastest of a few: what is slower was disturbed.
    unit = Unit(node.name, min(forward_s), min(backward_s), size, kept)
    return result, unit


def _callable(node: fx.Node, model: nn.Module) -> tuple[Callable[..., Any], list[nn.Parameter]]:
    if node.op == "call_module":
        module = copy.deepcopy(model.get_submodule(str(node.target)))
        materialise(module, 0, torch.device("cpu"))
        return module.train(), list(module.parameters())
    if node.op == "call_method":
        name = str(node.target)
        return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs), []
    target: Any = node.target
    return target, []


def _leaf(value: Tree) -> Tree:
    tensors = tensors_of(value)
    if not tensors:
        return value
    leaves = {}
    for path, tensor in tensors.items():
        leaf = tensor.detach()
        if leaf.is_floating_point() or leaf.is_complex():
            # A copy of a leaf is no leaf: a step in place may change it.
            leaf = leaf.requires_grad_().clone()
        leaves[path] = leaf
    return with_tensors(value, leaves)


def _detached(value: Tree) -> Tree:
    return with_tensors(value, {path: t.detach() for path, t in tensors_of(value).items()})
