"""The losses of micro-batches, put together so that they are that of the batch.

A mean over samples counts by the samples of its micro-batch. Torch's losses of classes are means
over what they count: targets that they ignore (padding) do not count, and classes may have weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shoal.errors import ModelError
from shoal.layout import Share
from shoal.pipeline.micro_batches import copied, num_samples, split
from shoal.settings import kind_of
from shoal.wire.tree import Tree, tensors_of, with_tensors

IGNORED = -100
"""The target that torch's own losses ignore, unless told otherwise."""
REDUCTIONS = ("mean", "sum")
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
"""How far a loss may be off, as a part of it, and at least of 1; of shorter numbers the next."""
ROUNDING_OF_SHORT = 0.02

Loss = Callable[[Any, Any], torch.Tensor] | nn.Module


def loss_faults(loss: Any, reduction: str) -> list[str]:
    """What a loss that is a module says of itself, and would go wrong without a word."""
    if not isinstance(loss, nn.Module | functools.partial):
        return []
    kind = name_of(loss)
    found = []
    own = loss.named_parameters() if isinstance(loss, nn.Module) else []
    if names := [name for name, p in own if p.requires_grad]:
        found.append(
            f"loss={kind}: has parameters of its own ({', '.join(names[:5])}), which nobody would "
            "train. Put them into the model."
        )
    given = _option(loss, "reduction", None)
    if {*REDUCTIONS, "none"} >= {given, reduction} and given != reduction:
        found.append(
            f"loss={kind}(reduction={given!r}): must give one number, and as reduction= says, "
            f"which is {reduction!r}."
        )
    return found


def part_weights(
    loss: Any, targets: Sequence[Tree], parts: Sequence[Share], reduction: str
) -> list[float]:
    """How much the loss of each micro-batch counts."""
    if reduction == "sum":
        return [1.0] * len(parts)
    if len(parts) > 1 and _is_of_classes(loss) and all(map(_are_classes, targets)):
        counts = [_counted(loss, target) for target in targets]
        if total := sum(counts):  # else it is nan, as in one process
            return [count / total for count in counts]
    return [part.size / part.total for part in parts]


def name_of(loss: Any) -> str:
    return str(getattr(_base(loss), "__name__", type(loss).__name__))


def _base(loss: Any) -> Any:
    """What functools.partial gives options to; else the loss itself."""
    return loss.func if isinstance(loss, functools.partial) and not loss.args else loss


def _option(loss: Any, name: str, default: Any) -> Any:
    """As a module or functools.partial has it."""
    if isinstance(loss, functools.partial):
        return loss.keywords.get(name, default)
    return getattr(loss, name, default)


def _is_of_classes(loss: Any) -> bool:
    """Torch's own: what is derived from them may count otherwise."""
    return type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss) or _base(loss) in (
        functional.cross_entropy,
        functional.nll_loss,
    )


def _are_classes(target: Any) -> bool:
    """Rather than probabilities, of which each sample's count as one."""
    return isinstance(target, torch.Tensor) and not target.is_floating_point()


def _counted(loss: Any, target: torch.Tensor) -> float:
    counted = target[target != _option(loss, "ignore_index", IGNORED)]
    weight = _option(loss, "weight", None)
    return float(counted.numel() if weight is None else weight[counted].sum())


def loss_of_part(
    loss: Loss, output: Any, target: Any, weight: float, reduction: str
) -> torch.Tensor:
    """Of a micro-batch: one number, to go back from.

    weight: if it is 0, nothing of it counts, and torch's mean over nothing would be nan.
    """
    if not weight and isinstance(output, torch.Tensor):
        return output.flatten()[:0].sum()
    given: Any = loss(output, target)
    if isinstance(given, torch.Tensor) and given.numel() == 1:
        return given
    what = kind_of(given)
    if isinstance(given, torch.Tensor):
        what = f"a tensor of shape {tuple(given.shape)}"
    raise ModelError(
        f"loss=: gave {what}; it must give one number, the {reduction} over the samples that it "
        f"was given (reduction={reduction!r})."
    )


def difference_of_parts(loss: Loss, output: Any, target: Any, reduction: str) -> str:
    """What a loss says of a batch, and what of two micro-batches put together, if not the same."""
    total = num_samples(output, "the output")
    parts = [Share(0, 1, total), Share(1, total, total)]
    try:
        whole, again, together = _losses(loss, _precise(output), _precise(target), parts, reduction)
    except (RuntimeError, TypeError, ValueError):  # it takes no others than those it was made for
        whole, again, together = _losses(loss, output, target, parts, reduction)
    slack = ROUNDING.get(whole.dtype, ROUNDING_OF_SHORT) * max(1.0, abs(float(whole)))
    if not whole.isfinite() or not torch.equal(whole, again):
        return ""
    if abs(float(whole) - together) <= slack:
        return ""
    return f"{float(whole):.7g} of {total} samples, and {together:.7g} of the same in micro-batches"


def _losses(
    loss: Loss, output: Any, target: Any, parts: Sequence[Share], reduction: str
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Twice of the whole, and put together of its parts. A loss may change what it is given."""
    whole, again = (
        loss_of_part(loss, copied(output), copied(target), 1.0, reduction) for _ in range(2)
    )
    targets = split(copied(target), parts)
    weights = part_weights(loss, targets, parts, reduction)
    pieces = zip(split(copied(output), parts), targets, weights, strict=True)
    together = sum(w * float(loss_of_part(loss, o, t, w, reduction)) for o, t, w in pieces)
    return whole, again, together


def _precise(tree: Tree) -> Tree:
    return with_tensors(
        tree,
        {path: t.double() if t.is_floating_point() else t for path, t in tensors_of(tree).items()},
    )
