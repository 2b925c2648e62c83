"""A model in stages, as `shoal train` makes it, and what is to be told of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.utils.data import Dataset

from shoal.crew import Crew
from shoal.layout import Layout
from shoal.pipeline.pipeline import Pipeline
from shoal.pipeline.plan import Plan, ReplicaPlace
from shoal.replicate.averages import stage_averages
from shoal.report.records import StageRecord
from shoal.settings import LINK_SYNCS, TrainSettings
from shoal.train.build import check_trainable, optimizer_for
from shoal.train.loader import Loader
from shoal.train.task import as_pair, loss_of
from shoal.wire.link import Link

Cast = Callable[[Any], Any]


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
    layout = Layout(replicas=crew.size // plan.stages, stages=plan.stages)
    place = ReplicaPlace(layout.replica_of(crew.rank), layout.replicas, crew.device)
    x, _ = as_pair(next(iter(Loader(train_set, place, batch_size=settings.batch_size))))
    return Pipeline(model, crew, link, plan, averages=averages, example=cast(x))


class StageReport(Protocol):
    """What is to be told of a model in stages."""

    @property
    def hosts(self) -> list[str]:
        """By stage, and replica after replica."""

    @property
    def modules(self) -> list[list[str]]:
        """Of each stage: names of the model's own."""

    def records(self) -> list[StageRecord]:
        """What each stage has, and how its time went. Every rank must call this."""


class PipelineReport:
    """Of a pipeline over the ranks of a crew."""

    def __init__(self, pipe: Pipeline, crew: Crew) -> None:
        self._pipe = pipe
        self._crew = crew
        self.hosts = [hello.host for hello in crew.roster]
        self.modules = pipe.modules

    def records(self) -> list[StageRecord]:
        pipe, crew = self._pipe, self._crew
        own = sum(p.numel() for p in pipe.parameters())
        told = crew.exchange(
            "the stages' times", [pipe.timeline.busy_s, pipe.timeline.waited_s, own]
        )
        by_stage = [pipe.layout.ranks_of_stage(stage) for stage in range(pipe.plan.stages)]
        return stage_records(
            [[self.hosts[rank] for rank in ranks] for ranks in by_stage],
            pipe.modules,
            [told[ranks[0]][2] for ranks in by_stage],
            [
                (sum(told[r][0] for r in ranks), sum(told[r][1] for r in ranks))
                for ranks in by_stage
            ],
        )


def stage_records(
    hosts: list[list[str]],
    modules: list[list[str]],
    parameters: list[int],
    seconds: list[tuple[float, float]],
) -> list[StageRecord]:
    """By stage. seconds: at work, and waiting."""
    total = sum(busy for busy, _ in seconds) or 1.0
    return [
        StageRecord(
            stage=stage,
            hosts=hosts[stage],
            modules=modules[stage],
            parameters=parameters[stage],
            share=round(busy / total, 4),
            idle=round(waited / ((busy + waited) or 1.0), 4),
        )
        for stage, (busy, waited) in enumerate(seconds)
    ]
