"""Does what a schedule says, in one stage: receive, compute, send, action by action.

Sends never wait; receives do. That a schedule cannot get stuck this way is what `check_schedule`
proves. Messages of a step are told apart by their tags: direction and micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.pipeline.routes import Routes
from shoal.pipeline.schedule import FORWARD, Schedule
from shoal.pipeline.split import OUTPUT
from shoal.pipeline.stage import Stage
from shoal.pipeline.timeline import Timeline
from shoal.wire.link import Job, Link
from shoal.wire.tree import Tree

Finish = Callable[[int, Any], torch.Tensor | None]
"""In the last stage: the loss of a micro-batch, of its number and the model's output."""


class Runner:
    """One stage, joined with the others."""

    def __init__(
        self, stage: Stage, routes: Routes, link: Link, ranks: Sequence[int], timeline: Timeline
    ) -> None:
        """ranks: of the stages, in order."""
        self._stage = stage
        self._link = link
        self._ranks = ranks
        self._timeline = timeline
        self._sources = routes.sources(stage.number)
        self._targets = routes.targets(stage.number)
        self._backs = routes.backs(stage.number)
        self._forths = routes.forths(stage.number)
        self._sent: list[Job] = []

    def run(
        self, schedule: Schedule, inputs: Sequence[dict[str, Tree]], finish: Finish | None = None
    ) -> None:
        """inputs: of the micro-batches, in the first stage. finish: in the last one."""
        try:
            for action in schedule.actions[self._stage.number]:
                if action.kind == FORWARD:
                    self._forward(action.micro_batch, inputs, finish)
                else:
                    self._backward(action.micro_batch)
                self._sent = [job for job in self._sent if not job.done()]
            with self._timeline.span("send"):
                for job in self._sent:
                    job.wait()
        finally:
            self._sent = []
            self._stage.forget()

    def _forward(
        self, micro_batch: int, inputs: Sequence[dict[str, Tree]], finish: Finish | None
    ) -> None:
        tag = f"forward {micro_batch}"
        arrived = self._receive(self._sources, tag)
        with self._timeline.span("forward", micro_batch):
            mine = inputs[micro_batch] if self._stage.number == 0 else {}
            made = self._stage.forward(micro_batch, mine, arrived)
            if finish is not None and self._stage.is_last:
                loss = finish(micro_batch, made[OUTPUT])
                if loss is not None:
                    self._stage.keep_loss(micro_batch, loss)
        for target in self._targets:
            self._send(self._stage.parcel(made, target), target, tag)

    def _backward(self, micro_batch: int) -> None:
        tag = f"backward {micro_batch}"
        arrived = self._receive(self._forths, tag)
        with self._timeline.span("backward", micro_batch):
            gradients = self._stage.backward(micro_batch, arrived)
        for earlier in self._backs:
            self._send(gradients[earlier], earlier, tag)

    def _receive(self, stages: Sequence[int], tag: str) -> dict[int, Any]:
        jobs = [(stage, self._link.irecv(self._ranks[stage], tag)) for stage in stages]
        with self._timeline.span("wait"):
            return {stage: job.wait() for stage, job in jobs}

    def _send(self, tree: Tree, stage: int, tag: str) -> None:
        with self._timeline.span("send"):
            self._sent.append(self._link.isend(tree, self._ranks[stage], tag))
