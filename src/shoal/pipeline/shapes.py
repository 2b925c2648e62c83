"""Whether the layers of a list fit together: by shapes that are known, else by their widths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shoal.pipeline.layer import Layer, combined, is_name, label_of
from shoal.pipeline.widths import Sizes, added, given_by, joined, sizes_of, taken_by, through

Shape: TypeAlias = tuple[int, ...] | None
"""None: not known."""


class _Known(NamedTuple):
    """What is known of a value."""

    shape: Shape
    sizes: Sizes
    """Of the shape, or of what is known of it."""


_NOTHING = _Known(None, {})


def shape_faults(
    layers: dict[int, Layer], modules: dict[int, nn.Module], first: Shape = None
) -> Iterator[str]:
    """Where shapes do not fit: each other, or the layer that they are for. first: of the input.

    Every layer goes by the shapes that are said of it, and one that does not fit gives what it
    would have given, so that one fault does not hide the next.
    """
    kept: dict[str, _Known] = {}
    came = _known(first)
    for number, layer in layers.items():
        if number and number - 1 not in layers:
            came = _NOTHING  # from what is no layer
        taken = [kept.get(name, _NOTHING) if is_name(name) else _NOTHING for name in layer.takes]
        coming = [came, *taken]
        came = _NOTHING
        if number in modules:
            came, faults = _passed(layer, modules[number], coming)
            yield from (f"{label_of(number, layer)}: {fault}" for fault in faults)
        kept.update(dict.fromkeys(filter(is_name, layer.gives), came))


def _passed(layer: Layer, module: nn.Module, coming: Sequence[_Known]) -> tuple[_Known, list[str]]:
    """What a layer gives, and what is wrong with its input, or with what the list says of it."""
    names = ["its input", *layer.takes]
    known = [shape if min(shape, default=0) >= 0 else None for shape in layer.shapes]
    said = [*known, *[None] * len(coming)][: len(coming)]
    faults = [
        f"the list says that {name} is {own}, and it is {each.shape}"
        for name, each, own in zip(names, coming, said, strict=True)
        if each.shape is not None and own is not None and each.shape[1:] != own[1:]
    ]
    both = zip(coming, said, strict=True)
    inputs = [each if own is None else _known(own) for each, own in both]
    made, wrong = _fitted(layer, module, names, inputs)
    if wrong and faults:  # then the list is wrong about the shape, and not the layer
        again = _fitted(layer, module, names, coming)
        made, wrong = (made, wrong) if again[1] else again
    return made, faults + wrong


def _fitted(
    layer: Layer, module: nn.Module, names: Sequence[str], inputs: Sequence[_Known]
) -> tuple[_Known, list[str]]:
    """What a layer gives for these inputs, and what is wrong with them."""
    shapes = [each.shape for each in inputs]
    if None not in shapes:
        try:
            made = _shape_made(layer, module, shapes)
        except _DoesNotFit as error:
            shown = ", ".join(map(str, shapes))
            return _if_it_fitted(layer, module, shapes[0]), [
                f"does not take {shown}: {error.__cause__}"
            ]
        return (_Known(None, given_by(module, {})) if made is None else _known(made)), []
    sizes = [each.sizes for each in inputs]
    x, faults = sizes[0], list[str]()
    if layer.takes and layer.combine == "add":
        x, faults = added(names, sizes)
    elif layer.takes:
        x = joined(sizes) if layer.combine == "cat" else {}
    gives, wrong = through(module, x)
    return _Known(None, gives), faults + wrong


def _if_it_fitted(layer: Layer, module: nn.Module, shape: Any) -> _Known:
    """What a layer would give for an input of this shape, were its width what the layer takes."""
    taken = taken_by(module)
    if taken is None or len(shape) < -taken.axis:
        return _Known(None, through(module, {})[0])
    fitting = list(shape)
    fitting[taken.axis] = taken.size
    try:
        return _known(_shape_made(layer, module, [fitting]))
    except _DoesNotFit:
        return _Known(None, given_by(module, {}))


def _known(shape: Shape) -> _Known:
    return _Known(shape, sizes_of(shape))


class _DoesNotFit(Exception):
    """Raised from what torch says about it."""


def _shape_made(layer: Layer, module: nn.Module, inputs: Sequence[Any]) -> Shape:
    """Of the output, where that can be told without computing anything."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if any(map(is_lazy, tensors.values())):
        return None
    state = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    dtypes = [tensor.dtype for tensor in state.values() if tensor.dtype.is_floating_point]
    fault: RuntimeError | None = None
    for dtype in ((dtypes or [torch.float32])[0], torch.int64):  # an embedding takes numbers
        try:
            made = _called_on_meta(layer, module, state, inputs, dtype)
        except NotImplementedError:  # which is a RuntimeError, but none about shapes
            return None
        except RuntimeError as error:
            fault = fault or error
        except Exception:  # the code may be the user's, and may want more than a shape
            return None
        else:
            return tuple(made.shape) if isinstance(made, torch.Tensor) else None
    if not _is_plain(layer, module):
        return None
    raise _DoesNotFit from fault


def _called_on_meta(
    layer: Layer,
    module: nn.Module,
    state: dict[str, torch.Tensor],
    inputs: Sequence[Any],
    dtype: torch.dtype,
) -> Any:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        x, *taken = (torch.empty(shape, dtype=dtype, device="meta") for shape in inputs)
        if layer.combine != "args" and taken:
            x, taken = combined(layer.combine, x, taken), []
        return torch.func.functional_call(module, state, (x, *taken))


def _is_plain(layer: Layer, module: nn.Module) -> bool:
    """Whether it takes one tensor, of which it needs no values: then its error is about shapes."""
    if callable(layer.combine) or (layer.combine == "args" and layer.takes):
        return False
    return all(type(each).__module__.startswith("torch.nn.") for each in module.modules())
