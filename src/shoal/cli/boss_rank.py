"""`shoal train --boss`: the usual training, with the model on workers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from shoal.boss.boss import Boss
from shoal.boss.optimizer import PlacedOptimizer
from shoal.boss.placed import PlacedModel
from shoal.crew import Crew
from shoal.pipeline.build import check_stages
from shoal.pipeline.graph import read
from shoal.rendezvous.roll import Fingerprint
from shoal.rendezvous.ways import Way
from shoal.report.events import Emit, Waiting
from shoal.report.records import StageRecord
from shoal.settings import TrainSettings
from shoal.train.build import build_data, build_model, optimizer_class
from shoal.train.evaluate import evaluate
from shoal.train.loader import Loader, Sharer
from shoal.train.rank import guarded, train_and_keep
from shoal.train.spread import stage_records
from shoal.train.task import Means, Tally, as_pair, loss_of
from shoal.version import VERSION


def run_boss(settings: TrainSettings, port: int, emit: Emit) -> int:
    return guarded(lambda: _run(settings, port, emit), settings, 0, emit)


def _run(settings: TrainSettings, port: int, emit: Emit) -> int:
    alone = Way(kind="alone", rank=0, size=1)
    fingerprint = Fingerprint(shoal=VERSION, settings={})
    with Crew.open(alone, fingerprint=fingerprint, device="cpu") as crew:
        torch.set_num_threads(settings.threads or 1)
        data = build_data(settings)
        model = build_model(settings)
        check_stages(read(model), settings.stages)  # rather than after all workers have come
        with Boss(
            f"tcp://127.0.0.1:{port}",
            settings.stages,
            timeout_s=settings.timeout_s,
            wait_s=settings.timeout_s,
            notify=lambda text: emit(Waiting(text=text)),
        ) as boss:
            loader = Loader(data.train, crew, batch_size=settings.batch_size)
            x, _ = as_pair(next(iter(loader)))
            placed = boss.place(
                model,
                cuts=settings.cuts,
                microbatches=settings.microbatches,
                example=x,
            )
            kind, options = optimizer_class(settings)
            learner = BossLearner(placed, boss.optimizer(kind, **options), crew)
            train_and_keep(learner, data, crew, settings, emit, BossReport(boss))
    return 0


class BossLearner:
    """The plain loop of everybody, with a model on workers."""

    bytes_sent = 0

    def __init__(self, model: PlacedModel, optimizer: PlacedOptimizer, crew: Crew) -> None:
        self._model = model
        self._optimizer = optimizer
        self._crew = crew
        self.num_parameters = model.num_parameters

    @property
    def sharer(self) -> Sharer:
        return self._crew

    def begin_epoch(self) -> None:
        self._model.train()

    def step(self, x: Any, y: torch.Tensor, tally: Tally) -> None:
        output = self._model(x)
        loss = loss_of(output, y)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        tally.add(loss, output, y, len(y))

    def evaluate(self, dataset: Dataset[Any]) -> Means:
        return evaluate(self._model, dataset, self._crew)

    def weights(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self._model.state_dict()
        return state


class BossReport:
    """What is to be told of the workers' stages."""

    def __init__(self, boss: Boss) -> None:
        self._boss = boss
        self.modules = boss.modules
        self.hosts = [worker.host for worker in boss.status().workers]

    def records(self) -> list[StageRecord]:
        hosts = [[host] for host in self.hosts]
        return stage_records(hosts, self.modules, self._boss.parameters, self._boss.seconds())
