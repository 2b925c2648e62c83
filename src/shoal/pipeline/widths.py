"""What layers of torch say of themselves: which width they take, and which they give.

    Linear(1, 16) ─ ReLU() ─ Linear(17, 3)       16 comes where 17 is taken, whatever the batch is

Only what is so for every batch: of a shape, some extents are known, by their place from the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

Sizes: TypeAlias = dict[int, int]
"""What is known of a shape: extents by axis, -1 being the last. Empty: nothing."""


class Width(NamedTuple):
    """What a layer takes."""

    word: str
    """What the layer's class calls it."""
    axis: int
    size: int


_BY_DIMENSIONS: list[tuple[int, tuple[type[nn.Module], ...], tuple[type[nn.Module], ...]]] = [
    (1, (nn.Conv1d, nn.ConvTranspose1d), (nn.InstanceNorm1d,)),
    (2, (nn.Conv2d, nn.ConvTranspose2d), (nn.BatchNorm2d, nn.InstanceNorm2d)),
    (3, (nn.Conv3d, nn.ConvTranspose3d), (nn.BatchNorm3d, nn.InstanceNorm3d)),
]
"""Convolutions and norms of so many dimensions: before these come the channels."""
_POOLS = [
    (1, (nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d)),
    (2, (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)),
    (3, (nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d)),
]
_KEEP = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU,
    nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Hardtanh, nn.Hardswish,
    nn.Hardsigmoid, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Softplus, nn.Softsign,
    nn.Threshold, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Dropout, nn.Dropout1d, nn.Dropout2d,
    nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.BatchNorm1d,
)  # fmt: skip
"""What comes out has the shape of what came in."""


def taken_by(module: nn.Module) -> Width | None:
    """What a layer takes, where it says so."""
    layer: Any = module
    if isinstance(module, LazyModuleMixin) or _has_hooks(module):
        return None
    if _is(module, (nn.Linear,)):
        return Width("in_features", -1, layer.in_features)
    if _is(module, (nn.LayerNorm,)):
        return Width("normalized_shape", -1, layer.normalized_shape[-1])
    for dimensions, convolutions, norms in _BY_DIMENSIONS:
        if _is(module, convolutions):
            return Width("in_channels", -1 - dimensions, layer.in_channels)
        if _is(module, norms) and (layer.affine or layer.track_running_stats):
            return Width("num_features", -1 - dimensions, layer.num_features)
    return None


def given_by(module: nn.Module, coming: Sizes) -> Sizes:
    """What is known of a layer's output, be its input what it takes or not."""
    layer: Any = module
    if _has_hooks(module):
        return {}
    if _is(module, (nn.Linear,)):
        return {-1: layer.out_features}
    if _is(module, (nn.Embedding,)):
        return {-1: layer.embedding_dim}
    if _is(module, _KEEP):
        return coming
    taken = taken_by(module)
    for dimensions, convolutions, norms in _BY_DIMENSIONS:
        if _is(module, convolutions):
            return {-1 - dimensions: layer.out_channels}
        if taken is not None and _is(module, norms):
            return {**coming, taken.axis: taken.size}
    if taken is not None and _is(module, (nn.LayerNorm,)):
        return {**coming, taken.axis: taken.size}
    for dimensions, pools in _POOLS:
        if _is(module, pools) and not getattr(module, "return_indices", False):
            return {axis: size for axis, size in coming.items() if axis == -1 - dimensions}
    return {}


def through(module: nn.Module, coming: Sizes) -> tuple[Sizes, list[str]]:
    """What is known of a layer's output, and what is wrong with its input."""
    if _is(module, (nn.Sequential,)) and not _has_hooks(module):
        faults: list[str] = []
        for name, child in module.named_children():
            coming, inner = through(child, coming)
            faults += [f"its {name} ({type(child).__name__}): {fault}" for fault in inner]
        return coming, faults
    taken = taken_by(module)
    faults = []
    if taken is not None and coming.get(taken.axis, taken.size) != taken.size:
        faults = [f"{taken.word} is {taken.size}, and what comes has {coming[taken.axis]}"]
    return given_by(module, coming), faults


def added(names: Sequence[str], values: Sequence[Sizes]) -> tuple[Sizes, list[str]]:
    """What is known of a sum, and what is wrong with it. names: of what is added."""
    found: Sizes = {}
    whose: dict[int, str] = {}
    faults = []
    for name, sizes in zip(names, values, strict=True):
        for axis, size in sizes.items():
            if found.get(axis, 1) not in (1, size) and size != 1:
                faults.append(
                    f"{whose[axis]} has {found[axis]} and {name} has {size}: they cannot be added"
                )
            elif size != 1:  # 1 becomes whatever it is added to
                found[axis], whose[axis] = size, whose.get(axis, name)
    return found, faults


def joined(values: Sequence[Sizes]) -> Sizes:
    """What is known of values that are put together along their channels."""
    axes = {axis for sizes in values for axis in sizes}
    # One axis, which is not the last: only of pictures and the like is the first one known.
    if len(axes) != 1 or max(axes) > -2 or not all(values):
        return {}
    (axis,) = axes
    return {axis: sum(sizes[axis] for sizes in values)}


def sizes_of(shape: Sequence[int] | None) -> Sizes:
    return {} if shape is None else {axis - len(shape): size for axis, size in enumerate(shape)}


def _is(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Also of a class of the user's own, if it computes what torch's does."""
    return any(isinstance(module, kind) and _computes_as(module, kind) for kind in kinds)


def _computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    return type(module).forward is kind.forward and type(module).__call__ is nn.Module.__call__


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)
