"""What training holds for each byte of weights: gradients, and what the optimizer gathers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

ADAMS = 2.0
"""What an optimizer is taken to hold that cannot be tried: as much as Adam."""
SIZE = 64


def bytes_per_weight_byte(
    optimizer: Callable[..., torch.optim.Optimizer] | None,
    options: Mapping[str, Any],
    num_replicas: int,
) -> float:
    """Weights, gradients, and what is made of both for a step."""
    if optimizer is None:
        return 2.0
    averaging = 2.0 if num_replicas > 1 else 0.0  # gradients in one buffer, and on their way
    return 2.0 + state_per_weight_byte(optimizer, options) + averaging


def state_per_weight_byte(
    optimizer: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]
) -> float:
    """By trying it with a small weight, where it takes one."""
    weight = nn.Parameter(torch.ones(SIZE, SIZE))
    try:
        made = optimizer([weight], **options)
    except Exception:  # a function of yours, that looks for other weights than this one
        return ADAMS
    if isinstance(made, torch.optim.LBFGS):  # steps and changes of gradients, and four vectors
        return 2.0 * int(made.defaults["history_size"]) + 4
    if not type(made).__module__.startswith("torch.optim") or isinstance(
        made, torch.optim.SparseAdam
    ):
        return ADAMS
    weight.grad = torch.ones_like(weight)
    made.step()
    held = [value for state in made.state.values() for value in state.values()]
    return sum(value.nbytes for value in held if isinstance(value, torch.Tensor)) / weight.nbytes
