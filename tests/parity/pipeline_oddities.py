"""Nets of which a rank has less than it seems: several names, modes of their own, kept memory."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 6
LARGE = 100_000
"""Of a tensor that is lent rather than sent."""


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class TwoNames(nn.Module):
    """Layers by name and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = square(), square()
        self.layers = nn.ModuleList([self.first, self.second])

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class TiedToNobody(nn.Module):
    """A weight that is tied to one whose layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = square(), square(), square()
        self.head.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return F.linear(h, self.second.weight)


def repeated() -> nn.Sequential:
    block = square()
    return nn.Sequential(square(), nn.Tanh(), block, nn.Tanh(), block)


NAMES: dict[str, tuple[Any, str]] = {
    "by name and in a list": (TwoNames, "second"),
    "tied to nobody": (TiedToNobody, "second"),
    "a layer twice": (repeated, "2"),
}


class FrozenNorm(nn.Module):
    """Whose batch norm stays as it is, whatever train() says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = square(), nn.BatchNorm1d(WIDTH), square()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))  # type: ignore[no-any-return]


class Memory(nn.Module):
    """Kept whole; gives on memory that it keeps and changes in place."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.kept = torch.zeros(size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.kept.mul_(0.5).add_(x.detach().mean())
        return (x, self.kept) if not x.isnan().any() else (x, x)


class WithMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.memory, self.second = square(), Memory(LARGE), square()

    def forward(self, x: Tensor) -> Tensor:
        h, kept = self.memory(self.first(x))
        return self.second(h) * (1 + kept.mean())  # type: ignore[no-any-return]


class ByShape(nn.Module):
    """Asks a dict, to which what torch.fx gives is always unknown."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = square(), square()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * {WIDTH: 3.0}.get(x.shape[-1], 1.0)
        return self.second(h)  # type: ignore[no-any-return]


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tau = square(), square(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) / self.tau)  # type: ignore[no-any-return]


class Careful(nn.Module):
    """Checks what it is given, and makes tensors of its size, on both sides of a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.most = square(), square(), 64

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        assert rows <= self.most, f"{rows} rows are too many"
        h = torch.tanh(self.first(x)) + torch.ones(rows, width)
        h = self.second(h) * torch.tensor(width)
        if h.size(0) != rows or h.isnan().any():
            raise ValueError("rows were lost on the way")
        return h + torch.zeros(h.size(0), width).cumsum(1)  # type: ignore[no-any-return]
