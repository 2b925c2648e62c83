"""Losses of micro-batches make the loss of the batch, whatever they are means over."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.errors import ModelError
from shoal.layout import Share
from shoal.pipeline.losses import loss_faults, loss_of_part, part_weights
from shoal.pipeline.micro_batches import split

PARTS = [Share(0, 3, 8), Share(3, 6, 8), Share(6, 8, 8)]
WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=torch.float64)
PADDED = torch.tensor([0, -100, 1, -100, -100, -100, 3, 2])
"""Of the second micro-batch nothing counts."""


def rows(*shape: int) -> torch.Tensor:
    made = torch.randn(8, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return made.requires_grad_()


class Focal(nn.CrossEntropyLoss):
    """A mean over samples, though what it is derived from is one over classes."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(input, target, weight=self.weight, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()


@pytest.mark.parametrize(
    ("loss", "target", "reduction"),
    [
        (Focal(weight=WEIGHT), PADDED.clamp(min=0), "mean"),
        (F.cross_entropy, PADDED, "mean"),
        (nn.CrossEntropyLoss(weight=WEIGHT), PADDED, "mean"),
        (nn.CrossEntropyLoss(ignore_index=3, label_smoothing=0.0), PADDED.clamp(min=0), "mean"),
        (nn.NLLLoss(weight=WEIGHT), PADDED, "mean"),
        (partial(F.cross_entropy, ignore_index=3), PADDED.clamp(min=0), "mean"),
        (partial(F.cross_entropy, weight=WEIGHT), PADDED, "mean"),
        (nn.CrossEntropyLoss(weight=WEIGHT, reduction="sum"), PADDED, "sum"),
        (F.cross_entropy, torch.eye(4, dtype=torch.float64).repeat(2, 1), "mean"),
        (nn.MSELoss(), torch.ones(8, 4, dtype=torch.float64), "mean"),
        (lambda output, target: (output - target).pow(2).mean(), torch.ones(8, 1), "mean"),
    ],
)
def test_they_are_that_of_the_batch(loss: Any, target: torch.Tensor, reduction: str) -> None:
    """Padding counted as samples do, and a micro-batch of padding only made everything nan."""
    whole = rows(4)
    expected = loss(whole, target)
    expected.backward()

    output = rows(4)
    targets = split(target, PARTS)
    weights = part_weights(loss, targets, PARTS, reduction)
    each = [
        weight * loss_of_part(loss, output[part.start : part.stop], its, weight, reduction)
        for part, its, weight in zip(PARTS, targets, weights, strict=True)
    ]
    total = torch.stack(each).sum()
    total.backward()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(output.grad, whole.grad)


def test_targets_of_which_none_counts_give_nan_as_in_one_process() -> None:
    target = torch.full((8,), -100)
    weights = part_weights(F.cross_entropy, split(target, PARTS), PARTS, "mean")
    assert loss_of_part(F.cross_entropy, rows(4)[:3], target[:3], weights[0], "mean").isnan()


def test_a_loss_is_one_number() -> None:
    def of(given: object, reduction: str = "mean") -> torch.Tensor:
        return loss_of_part(lambda output, target: given, None, None, 1.0, reduction)  # type: ignore[arg-type,return-value]

    assert of(torch.tensor(1.0)) == 1
    with pytest.raises(
        ModelError, match=r"gave a tensor of shape \(4, 2\); it must give one number"
    ):
        of(torch.zeros(4, 2))
    with pytest.raises(ModelError, match=r"gave a float; .* the sum over"):
        of(1.0, "sum")
    with pytest.raises(ModelError, match=r"gave an int; "):
        of(1, "sum")


@pytest.mark.parametrize(
    ("loss", "reduction", "why"),
    [
        (nn.MSELoss(reduction="sum"), "mean", "reduction='sum'"),
        (nn.MSELoss(), "sum", "reduction='mean'"),
        (nn.CrossEntropyLoss(reduction="none"), "mean", "reduction='none'"),
    ],
)
def test_a_loss_that_says_otherwise(loss: Any, reduction: str, why: str) -> None:
    """It came out as another number, without a word."""
    (fault,) = loss_faults(loss, reduction)
    assert why in fault


def test_losses_that_say_the_same_or_nothing() -> None:
    assert not loss_faults(nn.MSELoss(), "mean")
    assert not loss_faults(nn.CrossEntropyLoss(reduction="sum"), "sum")
    assert not loss_faults(F.cross_entropy, "sum")
