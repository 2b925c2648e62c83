"""The loss of a step on every rank: each replica's last stage tells it, all make the mean of it."""

from __future__ import annotations

from typing import Any

import torch

from shoal.crew import Crew
from shoal.layout import Layout
from shoal.wire.link import Link


class SharedLoss:
    """A last stage tells its loss as soon as it is known, while gradients are still computed.

    So nobody waits for it, and the first stage can begin with the next step.
    """

    def __init__(self, crew: Crew, link: Link, layout: Layout, reduction: str) -> None:
        self._rank, self._size = crew.rank, crew.size
        self._link = link
        self._reduction = reduction
        self._tellers = [layout.ranks_of_replica(r)[-1] for r in range(layout.replicas)]
        self._mine: list[Any] = []

    def tell(self, step: int, loss: torch.Tensor, num_samples: int) -> None:
        """In a last stage. num_samples: of this replica's share of the batch."""
        self._mine = [loss, num_samples]
        for rank in range(self._size):
            if rank != self._rank:
                self._link.isend(self._mine, rank, f"loss {step}")

    def hear(self, step: int) -> torch.Tensor:
        """The loss over the global batch."""
        told = [
            self._mine if rank == self._rank else self._link.recv(rank, f"loss {step}")
            for rank in self._tellers
        ]
        if len(told) == 1:
            only: torch.Tensor = told[0][0]
            return only
        losses = torch.stack([loss for loss, _ in told])
        sizes = torch.tensor([size for _, size in told], dtype=losses.dtype)
        if self._reduction == "sum":
            return losses[sizes > 0].sum()
        return (losses * (sizes / sizes.sum())).sum()
