"""Models without memory for their weights: made on the meta device, and what they begin with.

`crew.pipeline(Net, ...)` calls Net where no weight has memory; each rank then makes those of its
own stage, layer by layer, with the layer's own `reset_parameters`. Whatever else gives weights
their values would be lost, and is refused.
"""

from __future__ import annotations

import copy
import hashlib
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from shoal.errors import ModelError
from shoal.pipeline.graph import Place, attribute, place_of
from shoal.pipeline.unseen import Line, WatchingWrites, memory_of, users_line


@contextmanager
def weights_on_meta() -> Iterator[Beginnings]:
    """Modules made meanwhile have their parameters on the meta device, where nothing is computed.

    But not those of a layer that cannot say what they begin with (`materialise` could not give them
    back), nor buffers, such as masks and tables of positions: they are as their layer makes them.
    """
    on_meta: Any = WeakIdKeyDictionary()  # by the parameter that it was: one that is tied stays so
    beginnings = Beginnings()

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or is_lazy(parameter) or not _reset_of(module):
            return None
        if parameter not in on_meta and not beginnings.knows(parameter):
            needs = parameter.requires_grad
            made = nn.Parameter(parameter.detach().to("meta"), requires_grad=needs)
            # What is on meta by itself may have been made of other weights, as by zeros_like().
            on_meta[parameter] = parameter if parameter.is_meta else made
            is_other = module._parameters.get(name) is not None
            beginnings.add(on_meta[parameter], is_other=is_other)
        return on_meta.get(parameter)

    hook = register_module_parameter_registration_hook(register)
    try:
        with WatchingWrites(beginnings.note), _watching_copies(beginnings.note_copy):
            yield beginnings
    finally:
        hook.remove()


@contextmanager
def _watching_copies(told: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Meanwhile, each parameter that copy.deepcopy is about to copy is told of."""
    kind: Any = nn.Parameter
    before = kind.__deepcopy__

    def tell_and_copy(parameter: nn.Parameter, memo: Any) -> Any:
        told(parameter)
        return before(parameter, memo)

    kind.__deepcopy__ = tell_and_copy
    try:
        yield
    finally:
        kind.__deepcopy__ = before


class Beginnings:
    """Who gives weights on meta the values that they begin with: all but `_RESETS` is lost."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()
        self._given: dict[int, bool] = {}
        """By the memory of a weight: whether its layer's reset_parameters() has given it values."""
        self._lost: list[Line | None] = []

    def knows(self, weight: nn.Parameter) -> bool:
        return weight in self._known

    def add(self, weight: nn.Parameter, *, is_other: bool) -> None:
        """is_other: its layer had one in its place."""
        self._known[weight] = True
        self._given[memory_of(weight)] = False
        if is_other:
            self.note(weight)

    def note(self, weight: torch.Tensor, args: object = None) -> None:
        """That it gets values."""
        if weight.is_meta:
            frames = list(traceback.walk_stack(sys._getframe()))
            if any(frame.f_code is nn.Module._apply.__code__ for frame, _ in frames):
                return  # model.double(): another kind of weights, of the values that are to come
            if any(_may_give(layer, weight) for frame, _ in frames if (layer := _resetting(frame))):
                self._given[memory_of(weight)] = True
            else:
                self._lost.append(users_line(frames))

    def note_copy(self, weight: nn.Parameter) -> None:
        """That another begins as this one does. Torch's own layers (TransformerEncoder) do not mean
        more by it than that both are of one kind."""
        frames = traceback.walk_stack(sys._getframe(2))
        rest = [each for each in frames if each[0].f_code.co_filename != copy.__file__]
        if weight.is_meta and not rest[0][0].f_code.co_filename.startswith(_TORCH):
            self._lost.append(users_line(rest))

    def check(self, model: nn.Module, what: str) -> None:
        """Raises ModelError where `model`, made by `what`, would begin otherwise."""
        if self._lost:
            raise self._fault(what, [])
        resets = {path: _reset_of(layer) for path, layer in model.named_modules()}
        faults = []
        for name, weight in model.named_parameters():
            if not resets[name.rpartition(".")[0]] and weight.is_meta:
                faults.append(
                    f"{name}, which is made of weights; its layer has no reset_parameters()"
                )
            elif not self._given.get(memory_of(weight), True):
                faults.append(f"{name}, which its layer's reset_parameters() leaves as it is")
        faults += [
            f"{name}, a buffer that is made of weights"
            for name, buffer in model.named_buffers()
            if buffer.is_meta and not _is_torchs(model.get_submodule(name.rpartition(".")[0]))
        ]
        if faults:
            raise self._fault(what, faults)

    def check_error(self, error: Exception, what: str) -> None:
        """Raises ModelError where it is raised because weights have no values."""
        if isinstance(error, RuntimeError) and _WITHOUT_VALUES.search(str(error)):
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise self._fault(what, [text]) from error

    def _fault(self, what: str, faults: list[str]) -> ModelError:
        lines = [str(line) for line in dict.fromkeys(self._lost) if line]
        shown = [f"\n  {each}" for each in [*lines, *faults]]
        return ModelError(
            f"{what} gives its weights values that would be lost: what makes a model is called "
            "without memory for weights, and each layer then begins with its own "
            f"reset_parameters().{''.join(shown)}\n"
            "Ways out: give the model itself instead of what makes it; or let the "
            "reset_parameters() of the layer that has these weights give them their values."
        )


_WITHOUT_VALUES = re.compile(r"\bmeta\b|incompatible tensor type", re.IGNORECASE)
"""In what torch says of a tensor that is on meta, or is given one that is not."""


def _is_torchs(layer: nn.Module) -> bool:
    """One of torch's own, whose reset gives all that it has its values."""
    return type(layer).__module__.startswith("torch.nn.modules") and bool(_reset_of(layer))


def _resetting(frame: FrameType) -> nn.Module | None:
    """The layer whose reset is being called there: with weights of its own, as no other's is called
    by `materialise`."""
    code = frame.f_code
    layer = frame.f_locals.get(code.co_varnames[0]) if code.co_name in _RESETS else None
    if isinstance(layer, nn.Module) and any(True for _ in layer.parameters(recurse=False)):
        return layer
    return None


def _may_give(layer: nn.Module, weight: torch.Tensor) -> bool:
    """Values, in its reset: to its own weights, or as one of torch's, which are never cut, to those
    of layers inside it. Any other would not be called where it is in another stage."""
    own = {memory_of(each) for each in layer.parameters(recurse=False)}
    return memory_of(weight) in own or type(layer).__module__.startswith("torch.nn.")


_TORCH = str(Path(torch.__file__).parent)
_RESETS = ("reset_parameters", "_reset_parameters")


def _reset_of(layer: nn.Module) -> Callable[[], None] | None:
    """What gives a layer's parameters the values that they begin with."""
    return next((getattr(layer, name) for name in _RESETS if hasattr(layer, name)), None)


def is_on_meta(model: nn.Module) -> bool:
    return any(t.is_meta for t in [*model.parameters(), *model.buffers()])


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
        # They were made with the model, and may have been given other values since.
        buffers = [(b, b.clone()) for b in layer._buffers.values() if b is not None and b.is_cpu]
        for name, tensor in tensors.items():
            if tensor is not None and tensor.is_meta:
                room: torch.Tensor = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    room = _furnished(nn.Parameter(room, tensor.requires_grad), tensor)
                setattr(layer, name, room)
        digest = hashlib.sha256(f"{seed} {path}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:7]))
            reset()
        for buffer, values in buffers:
            buffer.copy_(values)
    if faults:
        raise ModelError(faults[::-1])
    for first, *others in tied:
        for name in others:
            where, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(where), own_name, attribute(model, first))


def _furnished(made: nn.Parameter, on_meta: nn.Parameter) -> nn.Parameter:
    """With the attributes and the hooks that a model's __init__ has given the one on meta."""
    vars(made).update(vars(on_meta))
    for hook in (on_meta._backward_hooks or {}).values():
        made.register_hook(hook)
    for hook in (getattr(on_meta, "_post_accumulate_grad_hooks", None) or {}).values():
        made.register_post_accumulate_grad_hook(hook)
    return made


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
