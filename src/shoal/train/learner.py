"""What the training loop trains: a replica on every rank, or the stages of a pipeline."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from shoal.crew import Crew
from shoal.pipeline.pipeline import Pipeline
from shoal.replicate import Replica
from shoal.train.evaluate import evaluate
from shoal.train.loader import Sharer
from shoal.train.task import Means, Tally, loss_of


class Learner(Protocol):
    """Every rank makes the same calls."""

    @property
    def sharer(self) -> Sharer:
        """Who shares the global batches out."""

    @property
    def bytes_sent(self) -> int:
        """Payload of gradients between replicas that this rank has sent so far."""

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""

    def begin_epoch(self) -> None: ...

    def step(self, x: Any, y: torch.Tensor, tally: Tally) -> None:
        """Forward, backward, update; each sample is counted by one rank."""

    def evaluate(self, dataset: Dataset[Any]) -> Means: ...

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole, on rank 0."""


class ReplicaLearner:
    """The whole model on every rank."""

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer, crew: Crew) -> None:
        self._replica = replica
        self._optimizer = optimizer
        self._crew = crew
        self.num_parameters = sum(p.numel() for p in replica.parameters())

    @property
    def sharer(self) -> Sharer:
        return self._crew

    @property
    def bytes_sent(self) -> int:
        return self._replica.bytes_sent

    def begin_epoch(self) -> None:
        self._replica.train()

    def step(self, x: Any, y: torch.Tensor, tally: Tally) -> None:
        output = self._replica(x)
        loss = loss_of(output, y)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        assert self._crew.share is not None
        tally.add(loss, output, y, self._crew.share.size)

    def evaluate(self, dataset: Dataset[Any]) -> Means:
        return evaluate(self._replica, dataset, self._crew)

    def weights(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self._replica.state_dict()
        return state


class PipelineLearner:
    """The model in stages; its loss and its hits are counted where its output is."""

    def __init__(self, pipe: Pipeline, crew: Crew) -> None:
        self._pipe = pipe
        self._crew = crew
        self._tally: Tally | None = None
        self.num_parameters = pipe.num_parameters
        pipe.watch = self._count

    @property
    def sharer(self) -> Sharer:
        return self._pipe.place

    @property
    def bytes_sent(self) -> int:
        return self._pipe.bytes_sent

    def begin_epoch(self) -> None:
        self._pipe.train()

    def step(self, x: Any, y: torch.Tensor, tally: Tally) -> None:
        self._tally = tally
        self._pipe.step(x, y)

    def _count(self, loss: torch.Tensor, output: Any, target: Any, samples: int) -> None:
        share = self._pipe.place.share
        if self._tally is not None and share is not None and share.size:
            self._tally.add(loss, output, target, samples)

    def evaluate(self, dataset: Dataset[Any]) -> Means:
        return evaluate(self._pipe, dataset, self._crew)

    def weights(self) -> dict[str, torch.Tensor]:
        return self._pipe.state_dict()
