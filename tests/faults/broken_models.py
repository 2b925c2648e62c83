"""Models that fail on purpose, for `--model broken_models:NAME`."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn


class Breaking(nn.Module):
    """Fails in its fifth forward pass, on rank 1 only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count == 5 and torch.distributed.get_rank() == 1:
            self.fail()
        return self.layer(x)

    def fail(self) -> None:
        raise ValueError("the fifth pass is too much")


class Dying(Breaking):
    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Freezing(Breaking):
    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Diverging(Breaking):
    """Gives what is not a number, on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float("nan")


class Branching(nn.Module):
    """Cannot be cut into stages: what it does depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.layer(x)
        return self.layer(-x)


def misfit() -> nn.Module:
    """Two layers do not take what comes to them."""
    return nn.Sequential(nn.Linear(1, 4), nn.Linear(5, 4), nn.Linear(3, 1))


class _LastLayer(nn.Module):
    """Kept whole, since it branches; fails in its fifth forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += bool(x.sum() == x.sum())
        if self.count == 5:
            raise ValueError("the fifth pass is too much")
        return self.layer(x)


class BreakingStage(nn.Sequential):
    """Its last layer fails, wherever that is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 8)
        self.last = _LastLayer()
