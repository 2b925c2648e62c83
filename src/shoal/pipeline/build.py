"""From a model to this rank's stage of it: read, cut, and given the weights of rank 0."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from shoal.errors import ModelError
from shoal.pipeline.graph import Graph, Place, attribute, place_of
from shoal.pipeline.layers import model_of
from shoal.pipeline.unseen import Line, WatchingWrites, memory_of, users_line
from shoal.settings import kind_of
from shoal.wire.tree import Tree, tensors_of

Model = nn.Module | Sequence[Any] | Callable[[], Any]
"""A module, a list of layers, or what makes one of them."""


def as_module(model: Model, seed: int = 0, example: Tree = None) -> nn.Module:
    """A callable is called so that the whole model need not fit here; seed: of what it draws.

    example: inputs of a batch, whose shape a list of layers is held against.
    """
    if isinstance(model, nn.Module):
        return model
    if callable(model):
        what = getattr(model, "__name__", str(model))
        with _weights_on_meta() as beginnings, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = model()
            if not isinstance(made, nn.Module | list | tuple):
                raise ModelError(
                    f"{what} gave {kind_of(made)}; it must give an nn.Module or a list of layers."
                )
            module = as_module(made, example=example)
        beginnings.check(module, what)
        return module
    if isinstance(model, str | bytes | dict) or not isinstance(model, Sequence):
        raise ModelError(
            f"{kind_of(model)} is no model: give an nn.Module, a list of layers, or what "
            "makes one of them."
        )
    shapes = [tuple(tensor.shape) for tensor in tensors_of(example).values()]
    return model_of(model, shapes[0] if len(shapes) == 1 else None)


@contextmanager
def _weights_on_meta() -> Iterator[_Beginnings]:
    """Modules made meanwhile have their parameters on the meta device, where nothing is computed.

    But not those of a layer that cannot say what they begin with (`materialise` could not give them
    back), nor buffers, such as masks and tables of positions: they are as their layer makes them.
    """
    on_meta: Any = WeakIdKeyDictionary()  # by the parameter that it was: one that is tied stays so
    beginnings = _Beginnings()

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or is_lazy(parameter) or not _reset_of(module):
            return None
        if parameter not in on_meta and not parameter.is_meta:
            needs = parameter.requires_grad
            on_meta[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=needs)
            is_other = module._parameters.get(name) is not None
            beginnings.add(on_meta[parameter], is_other=is_other)
        return on_meta.get(parameter)

    hook = register_module_parameter_registration_hook(register)
    try:
        with WatchingWrites(beginnings.note):
            yield beginnings
    finally:
        hook.remove()


class _Beginnings:
    """Who gives weights on meta the values that they begin with: all but `_RESETS` is lost."""

    def __init__(self) -> None:
        self._given: dict[int, bool] = {}
        """By the memory of a weight: whether its layer's reset_parameters() has given it values."""
        self._lost: list[Line | None] = []

    def add(self, weight: nn.Parameter, *, is_other: bool) -> None:
        """is_other: its layer had one in its place."""
        self._given[memory_of(weight)] = False
        if is_other:
            self.note(weight)

    def note(self, weight: torch.Tensor, args: object = None) -> None:
        """That it gets values."""
        if weight.is_meta:
            frames = list(traceback.walk_stack(sys._getframe()))
            if any(map(_is_reset, (frame for frame, _ in frames))):
                self._given[memory_of(weight)] = True
            else:
                self._lost.append(users_line(frames))

    def check(self, model: nn.Module, what: str) -> None:
        """Raises ModelError where `model`, made by `what`, would begin otherwise."""
        lost = [f"\n  {line}" for line in dict.fromkeys(self._lost) if line]
        for name, weight in model.named_parameters():
            if not self._lost and not self._given.get(memory_of(weight), True):
                lost.append(f"\n  {name}, which its layer's reset_parameters() leaves as it is")
        if lost or self._lost:
            raise ModelError(
                f"{what} gives its weights values that would be lost: what makes a model is called "
                "without memory for weights, and each layer then begins with its own "
                f"reset_parameters().{''.join(lost)}\n"
                "Ways out: give the model itself instead of what makes it; or let the "
                "reset_parameters() of the layer that has these weights give them their values."
            )


def _is_reset(frame: FrameType) -> bool:
    """Of a layer with weights of its own: no other's is called by `materialise`."""
    code = frame.f_code
    layer = frame.f_locals.get(code.co_varnames[0]) if code.co_name in _RESETS else None
    return isinstance(layer, nn.Module) and any(True for _ in layer.parameters(recurse=False))


_RESETS = ("reset_parameters", "_reset_parameters")


def _reset_of(layer: nn.Module) -> Callable[[], None] | None:
    """What gives a layer's parameters the values that they begin with."""
    return next((getattr(layer, name) for name in _RESETS if hasattr(layer, name)), None)


def is_on_meta(model: nn.Module) -> bool:
    return any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def check_state(model: nn.Module) -> None:
    """Can every stage have its part of the model's state?"""
    state = model.state_dict()
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    faults = [
        f"{name} has no shape yet: call the model once, model(x), before it is cut."
        for name in state
        if name not in others and is_lazy(state[name])
    ]
    faults += [
        f"{name} (get_extra_state) is no tensor, and nothing else goes from rank to rank with a "
        "model. Make a buffer of it, or leave it out of the state."
        for name in others
    ]
    if faults:
        raise ModelError(faults)


def outline(graph: Graph) -> list[str]:
    """What must be the same on every rank for cuts to mean the same."""
    tensors = [
        f"{n} {str(t.dtype)[6:]} {tuple(t.shape)}" for n, t in graph.model.state_dict().items()
    ]
    steps = [f"{node.op} {node.name}" for node in graph.nodes()]
    digest = hashlib.sha256("\n".join(steps).encode()).hexdigest()[:16]
    return [f"steps {digest}", *tensors]


def check_stages(graph: Graph, num_stages: int) -> None:
    num_units = len(graph.units)
    if num_stages > num_units:
        shown = ", ".join(graph.names()[:10]) + (", ..." if num_units > 10 else "")
        raise ModelError(
            f"{num_stages} stages for a model of {num_units} step{'s' * (num_units != 1)} "
            f"({shown}): every stage needs at least one."
        )


def materialise(
    model: nn.Module, seed: int, device: torch.device, names: Collection[str] | None = None
) -> None:
    """Give a model that is on the meta device memory and initial weights, in place.

    Each layer begins with its own `reset_parameters`, from a seed made of `seed` and its name, so
    that the weights do not depend on where the model is cut.

    names: of the parameters and buffers that are wanted; the others stay where they are.
    """
    faults = _tied_by_memory(model)
    tied = _tied(model)
    # Inner ones first: an outer one may have the last word on them, as MultiheadAttention has.
    for path, layer in reversed(list(model.named_modules())):
        tensors = {**layer._parameters, **layer._buffers}
        wanted = [
            name
            for name, tensor in tensors.items()
            if tensor is not None
            and tensor.is_meta
            and (names is None or (f"{path}.{name}" if path else name) in names)
        ]
        if not wanted:
            continue
        reset = _reset_of(layer)
        if reset is None:
            faults.append(
                f"{path or type(model).__name__} ({type(layer).__name__}) has no "
                "reset_parameters(), so nothing says what its parameters begin with. Write one, or "
                "give the model itself instead of what makes it."
            )
            continue
        for name, tensor in tensors.items():
            if tensor is not None and tensor.is_meta:
                room: torch.Tensor = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    room = nn.Parameter(room, requires_grad=tensor.requires_grad)
                setattr(layer, name, room)
        digest = hashlib.sha256(f"{seed} {path}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:7]))
            reset()
    if faults:
        raise ModelError(faults[::-1])
    for first, *others in tied:
        for name in others:
            where, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(where), own_name, attribute(model, first))


def _tied_by_memory(model: nn.Module) -> list[str]:
    """Parameters that share memory and are two: they would be made apart."""
    names: dict[Place, str] = {}
    faults = []
    for name, parameter in model.named_parameters():
        first = names.setdefault(place_of(parameter), name)
        if first != name and parameter.is_meta:
            faults.append(
                f"{name} and {first} share memory, but are two parameters, which would be made "
                "one by one. Let both be one, as in self.head.weight = self.embedding.weight; or "
                "give the model itself instead of what makes it."
            )
    return faults


def _tied(model: nn.Module) -> list[list[str]]:
    """Names that stand for one and the same parameter."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return [names for names in by_id.values() if len(names) > 1]
