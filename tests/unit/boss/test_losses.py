"""Losses as data: read whole, or refused with the line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.boss.losses import loss_to_data
from shoal.errors import ModelError


def branching(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) if output.sum() > 0 else F.l1_loss(output, target)


def weighing(output: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        weight = (output - target).abs()
    return (weight * (output - target) ** 2).mean()


@pytest.mark.parametrize(
    "loss", [F.cross_entropy, nn.CrossEntropyLoss(weight=torch.ones(3)), lambda o, t: (o - t).sum()]
)
def test_what_can_be_read(loss: Any) -> None:
    assert loss_to_data(loss)[0]


@pytest.mark.parametrize(
    ("loss", "why"),
    [(branching, "cannot be read by torch.fx"), (weighing, "takes a step inside torch.no_grad")],
)
def test_what_would_be_lost_is_refused(loss: Any, why: str) -> None:
    with pytest.raises(ModelError) as caught:
        loss_to_data(loss)
    said = str(caught.value)
    assert said.startswith(f"loss: {why}")
    assert __file__ in said
    assert said.endswith("compute the loss here: loss(model(x), y).backward().")
