"""Samples of a batch that a model is tried with, and what comes of them, to be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.pipeline.losses import Loss, loss_of_part
from shoal.pipeline.micro_batches import copied
from shoal.wire.tree import Tree, tensors_of, with_tensors

TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
}
"""Relative to the largest element; of shorter numbers the next."""
TOLERANCE_OF_SHORT = 0.05


@dataclass(frozen=True)
class Samples:
    """Of a batch: what the model is given, by value, and what the loss is, if that is known."""

    inputs: dict[str, Tree]
    target: Tree = None
    loss: Loss | None = None
    reduction: str = "mean"

    def first(self, count: int) -> Samples:
        cut = [_first(each, count) for each in (self.inputs, self.target)]
        return Samples(cut[0], cut[1], self.loss, self.reduction)

    def spread(self, count: int) -> Samples:
        """From the beginning of the batch to its end, which may be sorted."""
        cut = [_spread(each, count) for each in (self.inputs, self.target)]
        return Samples(cut[0], cut[1], self.loss, self.reduction)

    def loss_of(self, output: Any) -> torch.Tensor | None:
        """To go back from; None: nothing in the output needs a gradient."""
        if self.loss is not None and self.target is not None:
            loss = loss_of_part(self.loss, output, copied(self.target), 1.0, self.reduction)
            return loss if loss.requires_grad else None
        needing = [t for t in tensors_of(output).values() if t.requires_grad]
        sums = [(_real(t) * _ramp(_real(t))).sum() for t in needing]
        return torch.stack([each.double() for each in sums]).sum() if sums else None


@dataclass(frozen=True)
class Outcome:
    """By what a user calls them: outputs, gradients and buffers."""

    values: dict[str, torch.Tensor | None]

    @classmethod
    def of(cls, model: nn.Module, output: Any, trained: set[int] | None = None) -> Outcome:
        """trained: ids of the weights whose gradients count; None: all do."""
        found: dict[str, torch.Tensor | None] = {}
        for path, tensor in tensors_of(output).items():
            found["the output" + "".join(f"[{key!r}]" for key in path)] = tensor.detach()
        for name, weight in model.named_parameters():
            is_trained = trained is None or id(weight) in trained
            found[f"the gradient of {name}"] = weight.grad if is_trained else None
        for name, buffer in model.named_buffers():
            found[f"the buffer {name}"] = buffer.detach().clone()
        return cls(found)

    def difference(self, other: Outcome) -> str:
        """The first, in words; nothing: they are the same."""
        for name in self.values | other.values:
            if fault := _difference(self.values.get(name), other.values.get(name)):
                return f"{name} {fault}."
        return ""


def _first(tree: Tree, count: int) -> Tree:
    rows = {path: t[:count] if t.dim() else t for path, t in tensors_of(tree).items()}
    return with_tensors(tree, rows)


def _spread(tree: Tree, count: int) -> Tree:
    def rows(tensor: torch.Tensor) -> torch.Tensor:
        last, few = len(tensor) - 1, min(len(tensor), count)
        return tensor[torch.linspace(0, last, few, device=tensor.device).long()]

    found = {path: rows(t) if t.dim() else t for path, t in tensors_of(tree).items()}
    return with_tensors(tree, found)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _ramp(tensor: torch.Tensor) -> torch.Tensor:
    """Other factors for other elements, so that no two count alike."""
    steps = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float64)
    return torch.cos(steps).reshape(tensor.shape).to(tensor.dtype)


def _difference(one: torch.Tensor | None, other: torch.Tensor | None) -> str:
    """In words; nothing: they are the same, but for rounding. None stands for zeros."""
    if one is None or other is None:
        present = one if one is not None else other
        if present is None:
            return ""
        one, other = (torch.zeros_like(present) if each is None else each for each in (one, other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"is {_kind(one)} in the model and {_kind(other)} in stages"
    if one.is_sparse or other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other) or not one.numel():
        return ""
    if not (one.is_floating_point() or one.is_complex()):
        return "is not the same"
    first, second = one.to(torch.complex128), other.to(torch.complex128)
    is_same = (first == second) | (first.isnan() & second.isnan())
    gap = torch.where(is_same, 0.0, (first - second).abs())
    finite = torch.where(first.isfinite(), first.abs(), 0.0)
    most = TOLERANCE.get(one.dtype, TOLERANCE_OF_SHORT) * float(finite.max())
    if float(gap.nan_to_num(torch.inf, torch.inf).max()) <= most:
        return ""
    return f"differs by {float(gap.max()):.3g} (its largest element is {float(finite.max()):.3g})"


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
