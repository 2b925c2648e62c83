"""What is learnt: classes or numbers. Decides the loss, and whether accuracy means anything."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shoal.crew import Crew
from shoal.errors import SettingsError


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy for whole-number targets (classes), mean squared error for real ones."""
    if target.is_floating_point():
        return F.mse_loss(output, target)
    return F.cross_entropy(output, target)


def as_pair(batch: Any) -> tuple[Any, torch.Tensor]:
    """A batch as (input, target), or a fault of the data that says what came instead."""
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], torch.Tensor):
        return batch[0], batch[1]
    if isinstance(batch, tuple | list):
        got = f"{len(batch)} parts: {', '.join(type(part).__name__ for part in batch)}"
    else:
        got = f"a {type(batch).__name__}"
    raise SettingsError(
        [
            "--data: each sample of a dataset must be a pair (input, target), which makes batches "
            f"of two tensors; here a batch is {got}. For other data, write the loop yourself with "
            "shoal.join()."
        ]
    )


@dataclass(frozen=True)
class Means:
    """Over all samples that were counted, on all ranks."""

    loss: float
    accuracy: float | None
    samples: int

    @property
    def finite_loss(self) -> float | None:
        """For JSON, which has no NaN."""
        return self.loss if math.isfinite(self.loss) else None


class Tally:
    """Sums of loss, hits and samples; kept on the device, read only when asked."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, loss: torch.Tensor, output: Any, target: torch.Tensor, samples: int) -> None:
        """`loss` is the mean over `samples`; 0 samples (a stand-in batch) count nothing."""
        if samples == 0:
            return
        self._sums[0] += loss.detach() * samples
        self._sums[2] += samples
        if not target.is_floating_point() and isinstance(output, torch.Tensor):
            self._sums[1] += (output.argmax(1) == target).sum()
            self._sums[3] += samples

    def total(self, crew: Crew) -> torch.Tensor:
        """The sums over all ranks, and begin again. Every rank must call this."""
        sums = crew.sum_(self._sums.clone())
        self._sums.zero_()
        return sums


def means(sums: torch.Tensor) -> Means:
    loss, hits, samples, judged = sums.tolist()
    return Means(
        loss / samples if samples else math.nan, hits / judged if judged else None, int(samples)
    )
