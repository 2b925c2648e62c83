"""How a model is to be spread and trained: what a user says of a pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.errors import ModelError
from shoal.layout import Share
from shoal.settings import stage_faults

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is to be spread and trained."""

    stages: int
    schedule: str = "1f1b"
    microbatches: int = 1
    cuts: Sequence[str] | None = None
    """Modules that stages 1, 2, ... begin with. None: where it is best, by a short profile."""
    loss: Loss | None = None
    reduction: str = "mean"
    """What the loss is over the samples of a batch: their `mean` or their `sum`."""
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None
    """Gradients of all stages together are scaled down to this norm."""
    inputs: Sequence[str] | None = None
    """Names of the inputs of `forward` that come with every batch. Default: the required ones."""
    memory_bytes: Sequence[int] | None = None
    """What each stage may hold, where cuts are chosen. Default: what its host has free."""
    seed: int = 0
    """Where the model is made here: what its weights begin with."""


@dataclass
class ReplicaPlace:
    """A replica among its like, as a loader sees it."""

    rank: int
    size: int
    device: torch.device
    share: Share | None = None
    """This replica's part of the global batch; its loader sets it."""


def plan_faults(plan: Plan, num_ranks: int) -> list[str]:
    """Every fault that is visible in the values alone."""
    found = stage_faults(plan.stages, num_ranks, plan.schedule, plan.microbatches, plan.cuts)
    if plan.reduction not in ("mean", "sum"):
        found.append(f"reduction={plan.reduction!r}: must be 'mean' or 'sum'.")
    return found


def terms(plan: Plan) -> list[str]:
    """What every rank must say alike, for their messages to fit together."""
    return [
        f"{plan.stages} stages",
        plan.schedule,
        f"{plan.microbatches} micro-batches",
        f"loss is a {plan.reduction}" if plan.loss else "no loss",
        "an optimizer" if plan.optimizer else "no optimizer",
        f"clip_norm {plan.clip_norm}",
        f"seed {plan.seed}",
    ]


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """One that computes the loss again, within its step, would do so on one rank alone."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ModelError(
            f"{type(optimizer).__name__}: its step() needs a closure that computes the loss again, "
            "and here no rank can do so by itself. Use an optimizer whose step() needs none."
        )
