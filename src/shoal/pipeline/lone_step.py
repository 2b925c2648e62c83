"""One step of a model, run alone on copies: what it gives, and what it costs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from shoal.errors import ModelError
from shoal.pipeline.graph import Graph, attribute, paths_of
from shoal.pipeline.late import KINDS
from shoal.pipeline.meta import materialise
from shoal.pipeline.partition import Unit
from shoal.pipeline.widths import taken_by
from shoal.wire.tree import Tree, tensors_of, with_tensors

REPEATS = 3
CLOCK = (
    time.thread_time
    if time.get_clock_info("thread_time").resolution < 1e-6  # Windows counts in 16 ms
    else time.perf_counter
)
"""What a step takes when it is not interrupted: on a busy host all would look alike."""


class DoesNotFit(Exception):
    """A step does not take what comes to it; in the user's words."""


def if_it_fitted(node: fx.Node, graph: Graph, known: dict[str, Any]) -> dict[str, Any]:
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


def tried(node: fx.Node, graph: Graph, known: dict[str, Any], name: str) -> tuple[Any, Unit]:
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
        raise DoesNotFit(
            f"{_told(node, graph.model)} does not take what comes to it, of shapes "
            f"{', '.join(map(str, shapes))}: {error}"
        ) from error


def timed(node: fx.Node, graph: Graph, known: dict[str, Any], name: str) -> tuple[Any, Unit]:
    call, parameters = _callable(node, graph.model)
    is_late = (
        node.op == "call_module" and type(graph.model.get_submodule(str(node.target))) in KINDS
    )
    weights = [p for p in parameters if p.requires_grad] if is_late else []
    forward_s, backward_s, weights_s, kept = [], [], [], 0
    result: Any = None
    for repeat in range(REPEATS):
        args, kwargs = _arguments(node, known)
        begun = CLOCK()
        with torch.enable_grad(), _saved(is_wanted=not repeat) as saved:
            result = _given(call, args, kwargs, node, graph)
        if not repeat:  # whose time does not count
            own = tensors_of([result, args, kwargs, parameters]).values()
            kept = sum(saved[where] for where in saved.keys() - {_where(t) for t in own})
            kept += _made(result, [*args, *kwargs.values()])
        middle = CLOCK()
        roots = [t for t in tensors_of(result).values() if t.requires_grad]
        gradients = [_ones_like(t) for t in roots]
        if roots:
            torch.autograd.backward(roots, gradients, retain_graph=bool(weights))
        ended = CLOCK()
        if weights and roots:
            torch.autograd.grad(roots, weights, gradients, allow_unused=True)
            weights_s.append(CLOCK() - ended)
        forward_s.append(middle - begun)
        backward_s.append(ended - middle)
    given = size_of(result)
    for parameter in parameters:
        parameter.grad = None
    result = leaves(result)
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


def leaves(value: Tree) -> Tree:
    """The same without its history; what needs a gradient still does."""
    return with_tensors(
        value,
        {path: t.detach().requires_grad_(t.requires_grad) for path, t in tensors_of(value).items()},
    )


def size_of(tree: Tree) -> int:
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
