"""A model in stages, as `shoal train` makes it, and what is to be told of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from shoal.crew import Crew
from shoal.pipeline.pipeline import Pipeline, Plan
from shoal.replicate.averages import stage_averages
from shoal.report.records import StageRecord
from shoal.settings import LINK_SYNCS, TrainSettings
from shoal.train.build import check_trainable, optimizer_for
from shoal.train.loader import Loader
from shoal.train.task import as_pair, loss_of
from shoal.wire.link import Link

Cast = Callable[[Any], Any]
COMPUTING = ("forward", "backward", "update")


def spread(
    model: nn.Module,
    train_set: Dataset[Any],
    crew: Crew,
    link: Link,
    settings: TrainSettings,
    cast: Cast = lambda x: x,
) -> Pipeline:
    """Every rank must call this. The caller should let go of `model` afterwards.

    cast: what is done to inputs before they go into the model.
    """
    check_trainable(settings, model)
    over = link if settings.transport != "dist" and settings.sync in LINK_SYNCS else None
    averages = stage_averages(crew, settings.stages, settings.sync, over)
    plan = Plan(
        stages=settings.stages,
        schedule=settings.schedule or "1f1b",
        microbatches=settings.microbatches,
        cuts=settings.cuts,
        loss=loss_of,
        optimizer=partial(optimizer_for, settings),
        seed=settings.seed,
    )
    pipe = Pipeline(model, crew, link, plan, averages=averages)
    x, _ = as_pair(next(iter(Loader(train_set, pipe.place, batch_size=settings.batch_size))))
    pipe.place.share = None
    pipe.prepare(cast(x))
    return pipe


def stage_records(pipe: Pipeline, crew: Crew) -> list[StageRecord]:
    """What each stage has, and how its time went. Every rank must call this."""
    seconds = pipe.timeline.seconds
    busy = sum(seconds.get(kind, 0.0) for kind in COMPUTING)
    waited = seconds.get("wait", 0.0) + seconds.get("send", 0.0)
    own = sum(p.numel() for p in pipe.parameters())
    told = crew.exchange("the stages' times", [busy, waited, own])
    records = []
    total = sum(busy for busy, _, _ in told) or 1.0
    for stage in range(pipe.plan.stages):
        ranks = pipe.layout.ranks_of_stage(stage)
        here = [told[rank] for rank in ranks]
        all_busy, all_waited = sum(b for b, _, _ in here), sum(w for _, w, _ in here)
        records.append(
            StageRecord(
                stage=stage,
                hosts=[crew.roster[rank].host for rank in ranks],
                modules=pipe.modules[stage],
                parameters=here[0][2],
                share=round(all_busy / total, 4),
                idle=round(all_waited / ((all_busy + all_waited) or 1.0), 4),
            )
        )
    return records
