"""The life of one rank of `shoal train`: meet, build, train or verify, keep, leave."""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from shoal.crew import Crew
from shoal.errors import EXIT_FAILED, EXIT_INTERRUPTED, ShoalError, lost_peer
from shoal.rendezvous.roll import Fingerprint
from shoal.rendezvous.ways import Way
from shoal.replicate import replicate
from shoal.report.events import (
    Emit,
    EpochDone,
    Failed,
    Finished,
    Progress,
    Started,
    Waiting,
)
from shoal.report.records import EpochRecord, LayoutRecord, StepRecord, Summary
from shoal.report.run_folder import RunFolder
from shoal.settings import TrainSettings, microbatches_made, shared_settings, threads_each
from shoal.train.build import build_data, build_model, build_optimizer, num_samples
from shoal.train.checkpoint import save_weights
from shoal.train.data.load import Data
from shoal.train.learner import Learner, PipelineLearner, ReplicaLearner
from shoal.train.loop import train
from shoal.train.spread import PipelineReport, StageReport, spread
from shoal.train.verify import verify
from shoal.version import VERSION
from shoal.wire.open_link import LinkSettings, open_link

PROGRESS_S = 0.1
"""Between two updates of the progress bar."""


def run_rank(settings: TrainSettings, way: Way, interface: str | None, emit: Emit) -> int:
    """Do all of it; errors become a `Failed` event and an exit code."""
    return guarded(lambda: _run(settings, way, interface, emit), settings, way.rank, emit)


def guarded(run: Callable[[], int], settings: TrainSettings, rank: int, emit: Emit) -> int:
    """What `run` returns; errors become a `Failed` event and an exit code."""
    try:
        return run()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        known = isinstance(error, ShoalError)
        code = error.exit_code if isinstance(error, ShoalError) else EXIT_FAILED
        emit(
            Failed(
                rank=rank,
                host=socket.gethostname(),
                kind=type(error).__name__,
                message=str(error) or type(error).__name__,
                traceback=traceback.format_exc() if settings.debug or not known else "",
                exit_code=code,
                is_consequence=lost_peer(error) is not None,
            )
        )
        return code


def _run(settings: TrainSettings, way: Way, interface: str | None, emit: Emit) -> int:
    with Crew.open(
        way,
        fingerprint=Fingerprint(shoal=VERSION, settings=shared_settings(settings)),
        interface=interface,
        device=settings.device,
        timeout_s=settings.timeout_s,
        notify=lambda text: emit(Waiting(text=text)),
    ) as crew:
        torch.set_num_threads(settings.threads or threads_each(crew.num_here))
        data = build_data(settings)
        with ExitStack() as stack:
            link = None
            if crew.size > 1 and (settings.transport != "dist" or settings.stages > 1):
                link = stack.enter_context(open_link(crew, settings.transport, _of_link(settings)))
            if settings.verify:
                emit(verify(build_model(settings), data, crew, settings, link))
                return 0
            if link is not None and settings.stages > 1:
                # Nothing else refers to the whole model: of it, this rank keeps its own stage.
                pipe = spread(build_model(settings), data.train, crew, link, settings)
                stack.callback(pipe.close)
                report = PipelineReport(pipe, crew)
                train_and_keep(PipelineLearner(pipe, crew), data, crew, settings, emit, report)
            else:
                replica = replicate(build_model(settings), crew, settings.sync, link=link)
                stack.callback(replica.close)
                learner = ReplicaLearner(replica, build_optimizer(settings, replica), crew)
                train_and_keep(learner, data, crew, settings, emit)
    return 0


def _of_link(settings: TrainSettings) -> LinkSettings:
    return LinkSettings(
        key=settings.key,
        authorized_keys=settings.authorized_keys,
        insecure=settings.insecure,
        timeout_s=settings.timeout_s,
    )


def train_and_keep(
    learner: Learner,
    data: Data,
    crew: Crew,
    settings: TrainSettings,
    emit: Emit,
    report: StageReport | None = None,
) -> None:
    """report: where the model is in stages, what is to be told of them."""
    hosts = [hello.host for hello in crew.roster] if report is None else report.hosts
    num_replicas = len(hosts) // settings.stages
    threads = crew.exchange("how many threads each has", torch.get_num_threads())
    # From here on ranks may differ in chance (dropout), as samples do.
    torch.manual_seed(settings.seed + 1 + crew.rank)
    with ExitStack() as stack:
        folder = None
        if crew.rank == 0:
            name = settings.name or settings.model.rpartition(":")[2]
            made = None if settings.folder is None else Path(settings.folder)
            folder = stack.enter_context(RunFolder.create(settings.out, name, settings, made))
        emit(
            Started(
                model=settings.model,
                data=settings.data,
                sync=settings.sync,
                transport=settings.transport,
                boss=settings.boss,
                stages=settings.stages,
                schedule=settings.schedule,
                microbatches=microbatches_made(settings, num_replicas),
                cut=[] if report is None else [names[0] for names in report.modules[1:]],
                hosts=hosts,
                parameters=learner.num_parameters,
                batch_size=settings.batch_size,
                train_samples=num_samples(data.train),
                test_samples=num_samples(data.test),
                threads=threads,
                folder=None if folder is None else str(folder.path),
            )
        )

        last = StepRecord(epoch=1, step=0, loss=None, accuracy=None, seconds=0)
        shown = 0.0

        def on_log(record: StepRecord) -> None:
            nonlocal last
            last = record
            if folder is not None:
                folder.log(record)

        def on_step(epoch: int, step: int, steps: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if now - shown < PROGRESS_S and step < steps:
                return
            shown = now
            emit(
                Progress(
                    epoch=epoch,
                    epochs=settings.epochs,
                    step=step,
                    steps=steps,
                    loss=last.loss,
                    accuracy=last.accuracy,
                )
            )

        def on_epoch(record: EpochRecord) -> None:
            emit(EpochDone(record=record, epochs=settings.epochs))

        records = train(learner, data, crew, settings, on_step, on_log, on_epoch)
        weights = learner.weights()
        summary = Summary(
            model=settings.model,
            data=settings.data,
            seed=settings.seed,
            batch_size=settings.batch_size,
            sync=settings.sync,
            transport=settings.transport if len(hosts) > 1 else None,
            schedule=settings.schedule,
            microbatches=microbatches_made(settings, num_replicas),
            layout=LayoutRecord(replicas=num_replicas, stages=settings.stages),
            stages=[] if report is None else report.records(),
            hosts=hosts,
            parameters=learner.num_parameters,
            epochs=records,
            folder=None if folder is None else str(folder.path),
            shoal=VERSION,
            torch=str(torch.__version__),
        )
        if folder is not None:
            folder.replace("model.safetensors", lambda path: save_weights(weights, path))
            folder.finish(summary)
    emit(Finished(summary=summary))
