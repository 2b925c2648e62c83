"""The training loop: epochs and steps, with the counting around them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shoal.crew import Crew
from shoal.report.records import EpochRecord, StepRecord
from shoal.settings import TrainSettings
from shoal.train.data.load import Data
from shoal.train.learner import Learner
from shoal.train.loader import Loader
from shoal.train.task import Tally, as_pair, means

OnStep = Callable[[int, int, int], None]
"""Every step: the epoch, the step within it, and how many it has."""
OnLog = Callable[[StepRecord], None]
OnEpoch = Callable[[EpochRecord], None]


def train(
    learner: Learner,
    data: Data,
    crew: Crew,
    settings: TrainSettings,
    on_step: OnStep,
    on_log: OnLog,
    on_epoch: OnEpoch,
) -> list[EpochRecord]:
    """Train for the epochs asked for; records are the same on every rank."""
    loader = Loader(data.train, learner.sharer, batch_size=settings.batch_size, seed=settings.seed)
    tally = Tally(crew.device)
    records = []
    begun = time.perf_counter()
    for epoch in range(1, settings.epochs + 1):
        sums = torch.zeros(4, dtype=torch.float64, device=crew.device)
        sent_before = learner.bytes_sent
        epoch_begun = time.perf_counter()
        learner.begin_epoch()
        for step, (x, y) in enumerate(map(as_pair, loader), start=1):
            learner.step(x, y, tally)
            if step % settings.log_every == 0 or step == len(loader):
                window = tally.total(crew)
                sums += window
                seen = means(window)
                record = StepRecord(
                    epoch=epoch,
                    step=(epoch - 1) * len(loader) + step,
                    loss=seen.finite_loss,
                    accuracy=seen.accuracy,
                    seconds=round(time.perf_counter() - begun, 4),
                )
                on_log(record)
            on_step(epoch, step, len(loader))
        seconds = time.perf_counter() - epoch_begun
        trained = means(sums)
        tested = learner.evaluate(data.test)
        sent = torch.tensor([learner.bytes_sent - sent_before], dtype=torch.int64)
        records.append(
            EpochRecord(
                epoch=epoch,
                train_loss=trained.finite_loss,
                train_accuracy=trained.accuracy,
                test_loss=tested.finite_loss,
                test_accuracy=tested.accuracy,
                seconds=round(seconds, 4),
                samples_per_second=round(trained.samples / seconds, 1),
                bytes_sent=int(crew.sum_(sent.to(crew.device)).item()),
            )
        )
        on_epoch(records[-1])
    return records
