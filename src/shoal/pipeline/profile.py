"""A short profile of every step of a model, with a real batch: what automatic cuts are made of."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from shoal.errors import ModelError
from shoal.layout import Share
from shoal.pipeline import micro_batches
from shoal.pipeline.graph import (
    Graph,
    attribute,
    paths_of,
    place_of,
    shared,
    tensors_held,
)
from shoal.pipeline.in_place import changed_in_place
from shoal.pipeline.late import KINDS
from shoal.pipeline.meta import is_on_meta, materialise
from shoal.pipeline.partition import Costs, Unit, Value, cut, cut_for_turns, places_in
from shoal.pipeline.play import refine
from shoal.pipeline.schedule import Schedule
from shoal.pipeline.widths import taken_by
from shoal.wire.tree import Tree, arrives_as_it_is, detached, tensors_of, with_tensors

PASSES, REPEATS = 3, 3
"""What disturbs for a while hits all repeats of a step alike, and not every pass over them all."""
ENOUGH_S = 2.0
"""A further pass begins only before."""
UNSENDABLE = -1
"""In place of a size: a dtype, a named tuple, or what else no message holds."""


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
            _run_all(graph, micro_batches.split(inputs, parts)[_largest(parts)], _tried)
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
        units, values = _run_all(graph, inputs, _timed)
        for _ in range(PASSES - 1):
            if time.perf_counter() > begun + ENOUGH_S or is_on_meta(graph.model):
                break  # whose layers would have to be made once more
            again = _run_all(graph, inputs, _timed)[0]
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
    faults: list[_DoesNotFit] = []
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
            known[node.name] = _leaves(_real(attribute(graph.model, str(node.target))))
        elif node.name in number:
            if any(source.name not in known for source in node.all_input_nodes):
                continue  # after a fault: nobody knows what would come
            try:
                result, unit = run(node, graph, known, names[number[node.name]])
                if number[node.name] in makers:
                    unit = replace(unit, kept_bytes=unit.kept_bytes + _size(result))
            except _DoesNotFit as error:
                faults.append(error)
                known |= _if_it_fitted(node, graph, known)
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
        _size(tree) if arrives_as_it_is(tree) else UNSENDABLE,
        has_gradient and any(t.is_floating_point() for t in tensors_of(tree).values()),
    )


def _size(tree: Tree) -> int:
    return sum(map(_bytes, tensors_of(tree).values()))


def _ones_like(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout == torch.strided:
        return torch.ones_like(tensor)
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def _bytes(tensor: torch.Tensor) -> int:
    """Of a sparse one those of its values, which is most of it."""
    if tensor.layout == torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.nbytes if tensor.layout == torch.strided else tensor.values().nbytes


def _real(tensor: Any) -> Any:
    is_meta = isinstance(tensor, torch.Tensor) and tensor.is_meta
    if not is_meta:
        return tensor
    return torch.ones_like(tensor, device="cpu").requires_grad_(tensor.requires_grad)


class _DoesNotFit(Exception):
    """A step does not take what comes to it; in the user's words."""


def _if_it_fitted(node: fx.Node, graph: Graph, known: dict[str, Any]) -> dict[str, Any]:
    """What a layer would have given, were its input as wide as it takes, so that others are tried.

    By the name of the value; empty where that cannot be told.
    """
    if node.op != "call_module" or not node.args or not isinstance(node.args[0], fx.Node):
        return {}
    call, _ = _callable(node, graph.model)
    taken = taken_by(graph.model.get_submodule(str(node.target)))
    came = known[node.args[0].name]
    if taken is None or not isinstance(came, torch.Tensor) or came.dim() < -taken.axis:
        return {}
    shape = list(came.shape)
    shape[taken.axis] = taken.size
    try:
        with torch.no_grad():
            return {node.name: call(torch.zeros(shape, dtype=came.dtype))}
    except Exception:  # it was not the width: whatever was wrong has been told
        return {}


def _told(node: fx.Node, model: nn.Module) -> str:
    """A step, as its user knows it."""
    paths = paths_of(node)
    module = (
        f"module {paths[-1]} ({type(model.get_submodule(paths[-1])).__name__})" if paths else ""
    )
    if node.op == "call_module":
        return module
    return f"step {node.name} of {module or 'the model'}"


def _tried(node: fx.Node, graph: Graph, known: dict[str, Any], name: str) -> tuple[Any, Unit]:
    """Once, for what it gives."""
    call, _ = _callable(node, graph.model)
    args, kwargs = _arguments(node, known)
    return _given(call, args, kwargs, node, graph), Unit(name)


def _arguments(node: fx.Node, known: dict[str, Any]) -> tuple[Any, Any]:
    args, kwargs = (
        fx.map_arg(each, lambda n: _copied(known[n.name])) for each in (node.args, node.kwargs)
    )
    return args, kwargs


def _given(call: Callable[..., Any], args: Any, kwargs: Any, node: fx.Node, graph: Graph) -> Any:
    try:
        return call(*args, **kwargs)
    except Exception as error:
        shapes = [tuple(t.shape) for t in tensors_of([*args, *kwargs.values()]).values()]
        raise _DoesNotFit(
            f"{_told(node, graph.model)} does not take what comes to it, of shapes "
            f"{', '.join(map(str, shapes))}: {error}"
        ) from error


def _timed(node: fx.Node, graph: Graph, known: dict[str, Any], name: str) -> tuple[Any, Unit]:
    call, parameters = _callable(node, graph.model)
    is_late = (
        node.op == "call_module" and type(graph.model.get_submodule(str(node.target))) in KINDS
    )
    weights = [p for p in parameters if p.requires_grad] if is_late else []
    forward_s, backward_s, weights_s, kept = [], [], [], 0
    result: Any = None
    for repeat in range(REPEATS):
        args, kwargs = _arguments(node, known)
        begun = time.perf_counter()
        with torch.enable_grad(), _saved(is_wanted=not repeat) as saved:
            result = _given(call, args, kwargs, node, graph)
        if not repeat:  # whose time does not count
            own = tensors_of([result, args, kwargs, parameters]).values()
            kept = sum(saved[where] for where in saved.keys() - {_where(t) for t in own})
            kept += _made(result, [*args, *kwargs.values()])
        middle = time.perf_counter()
        roots = [t for t in tensors_of(result).values() if t.requires_grad]
        gradients = [_ones_like(t) for t in roots]
        if roots:
            torch.autograd.backward(roots, gradients, retain_graph=bool(weights))
        ended = time.perf_counter()
        if weights and roots:
            torch.autograd.grad(roots, weights, gradients, allow_unused=True)
            weights_s.append(time.perf_counter() - ended)
        forward_s.append(middle - begun)
        backward_s.append(ended - middle)
    given = _size(result)
    for parameter in parameters:
        parameter.grad = None
    result = _leaves(result)
    size = sum(p.nbytes for p in parameters)
    for source in node.all_input_nodes:
        used = attribute(graph.model, str(source.target)) if source.op == "get_attr" else None
        if isinstance(used, nn.Parameter):
            size += used.nbytes
    # Not the first, which has no gradient to add to. The fastest: what is slower was disturbed.
    # At work: the gradient that came, that goes, and one between; two of the weights' own, as
    # optimizers have it, one parameter at a time.
    whole_s = min(backward_s[1:])
    late_s = min([whole_s, *weights_s[1:]]) if weights_s else 0.0
    unit = Unit(name, min(forward_s[1:]), whole_s, late_s, kept_bytes=kept)
    late = given if is_late and roots else 0
    work = (3 if roots else 1) * given + 2 * size
    return result, replace(unit, late_bytes=late, work_bytes=work)


def _made(result: Tree, given: list[Tree]) -> int:
    """Bytes of a result, but of pieces of what was given (a view), which are there already."""
    came = tensors_of(given).values()
    places, objects = {_where(t) for t in came}, {id(t) for t in came}
    # What a step has changed in place may have been copied before, where a stage begins with it.
    made = [t for t in tensors_of(result).values() if _where(t) not in places or id(t) in objects]
    return sum(map(_bytes, made))


@contextmanager
def _saved(*, is_wanted: bool) -> Iterator[dict[int, int]]:
    """Bytes that autograd saves meanwhile for backward passes, by where they are."""
    found: dict[int, int] = {}
    if not is_wanted:
        yield found
        return

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided:
            found[_where(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output with its history would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def _where(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _copy_of(module: nn.Module) -> nn.Module:
    """Also where it holds what it has computed, as torch.nn.utils.weight_norm makes it."""
    held = [value for each in module.modules() for value in vars(each).values()]
    computed = [it for it in held if isinstance(it, torch.Tensor) and not it.is_leaf]
    try:
        return copy.deepcopy(module, {id(it): it.detach().clone() for it in computed})
    except TypeError as error:
        raise ModelError(
            f"a {type(module).__name__} cannot be copied ({error}), and copies are what costs and "
            "shapes are tried with. Give cuts= and no example=, or let it say how to copy it "
            "(__deepcopy__)."
        ) from error


def _callable(node: fx.Node, model: nn.Module) -> tuple[Callable[..., Any], list[nn.Parameter]]:
    if node.op == "call_module":
        module = _copy_of(model.get_submodule(str(node.target)))
        materialise(module, 0, torch.device("cpu"))
        return module, list(module.parameters())
    if node.op == "call_method":
        name = str(node.target)
        return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs), []
    target: Any = node.target
    return target, []


def _copied(value: Tree) -> Tree:
    """A copy, which a step in place may change, as it may not change a leaf."""
    with torch.enable_grad():
        return with_tensors(value, {path: t.clone() for path, t in tensors_of(value).items()})


def _leaves(value: Tree) -> Tree:
    """The same without its history; what needs a gradient still does."""
    return with_tensors(
        value,
        {path: t.detach().requires_grad_(t.requires_grad) for path, t in tensors_of(value).items()},
    )
