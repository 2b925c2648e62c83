"""Evaluation over all ranks: every sample counts exactly once, and none is padded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from shoal.crew import Crew
from shoal.errors import ShoalError, reason_of
from shoal.pipeline.pipeline import Pipeline
from shoal.train.loader import Loader
from shoal.train.task import Means, Tally, as_pair, loss_of, means

EVALUATION_BATCH = 512
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def evaluate(
    model: nn.Module | Pipeline,
    dataset: Dataset[Any],
    crew: Crew,
    batch_size: int = EVALUATION_BATCH,
    loss: Loss = loss_of,
) -> Means:
    """Mean loss and accuracy of `model` on `dataset`. Every rank must call this.

    `loss` must be a mean over samples. The model is left in the mode it was in.
    """
    if isinstance(model, Pipeline):
        return _of_pipeline(model, dataset, crew, batch_size, loss)
    was_training = model.training
    share_before = crew.share
    tally = Tally(crew.device)
    batch_size = max(batch_size, crew.size)
    model.eval()
    try:
        with torch.no_grad():
            for x, y in map(as_pair, Loader(dataset, crew, batch_size=batch_size, shuffle=False)):
                output = model(x)
                assert crew.share is not None
                tally.add(loss(output, y), output, y, crew.share.size)
    finally:
        model.train(was_training)
        crew.share = share_before
    return means(tally.total(crew))


def _of_pipeline(
    pipe: Pipeline, dataset: Dataset[Any], crew: Crew, batch_size: int, loss: Loss
) -> Means:
    """Counted where the output is."""
    was_training = pipe.training
    place = pipe.place
    share_before = place.share
    tally = Tally(crew.device)
    batch_size = max(batch_size, place.size)
    pipe.eval()
    fault: Exception | None = None
    try:
        for x, y in map(as_pair, Loader(dataset, place, batch_size=batch_size, shuffle=False)):
            output = pipe(x, everywhere=False)
            assert place.share is not None
            if pipe.is_last and fault is None:
                try:
                    tally.add(loss(output, y), output, y, place.share.size)
                except Exception as error:  # the others go on with the next batch
                    fault = error
    finally:
        pipe.train(was_training)
        place.share = share_before
    _check_all(crew, fault)
    return means(tally.total(crew))


def _check_all(crew: Crew, fault: Exception | None) -> None:
    """Of what only some ranks do: if it fails on one, all are told."""
    reasons = crew.exchange("the evaluation", reason_of(fault) if fault is not None else "")
    if fault is not None:
        raise fault
    for rank, reason in enumerate(reasons):
        if reason:
            raise ShoalError(f"{crew.roster[rank].who} could not evaluate: {reason}")
