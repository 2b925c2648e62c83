"""Does what a schedule says, in one stage: receive, compute, send, action by action.

Sends never wait; receives do. That a schedule cannot get stuck this way is what `check_schedule`
proves. Messages of a step are told apart by their tags: direction and micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.pipeline.schedule import FORWARD, Schedule
from shoal.pipeline.split import OUTPUT
from shoal.pipeline.stage import Roots, Stage
from shoal.pipeline.timeline import Timeline
from shoal.wire.inbox import ReceiveJob
from shoal.wire.link import Job, Link
from shoal.wire.tree import Tree

Feed = Callable[[int], dict[str, Tree]]
"""In the first stage: the inputs of a micro-batch, of its number."""
Finish = Callable[[int, Any], torch.Tensor | None]
"""In the last stage: the loss of a micro-batch, of its number and the model's output."""
Begin = Callable[[int], Roots]
"""In the last stage, where it has no loss: what the backward pass of a micro-batch begins with."""


class Runner:
    """One stage, joined with the others."""

    def __init__(
        self,
        stage: Stage,
        link: Link,
        ranks: Sequence[int],
        timeline: Timeline,
        wait: Callable[[Job | ReceiveJob], Tree] = lambda job: job.wait(),
    ) -> None:
        """ranks: of the stages, in order. wait: for a message that comes, or has been sent."""
        self._stage = stage
        self._link = link
        link.align()
        self._ranks = ranks
        self._timeline = timeline
        self._wait = wait
        routes = stage.routes
        self._sources = routes.sources(stage.number)
        self._targets = routes.targets(stage.number)
        self._backs = routes.backs(stage.number)
        self._forths = routes.forths(stage.number)
        self._sent: list[Job] = []

    def run(
        self,
        schedule: Schedule,
        *,
        feed: Feed | None = None,
        finish: Finish | None = None,
        begin: Begin | None = None,
        call: int = 0,
    ) -> None:
        """Forwards, backwards or both. call: tells the micro-batches of two runs apart."""
        most_alive = schedule.most_alive(0)
        try:
            for action in schedule.actions[self._stage.number]:
                if action.kind == FORWARD:
                    while self._stage.num_kept >= most_alive and self._do_weights():
                        continue
                    self._forward(call, action.micro_batch, feed, finish)
                else:
                    self._backward(call, action.micro_batch, begin)
                self._sent = [job for job in self._sent if not job.done()]
            while self._do_weights():
                continue
            with self._timeline.span("send"):
                for job in self._sent:
                    self._wait(job)
        finally:
            self._sent = []

    def _forward(
        self, call: int, micro_batch: int, feed: Feed | None, finish: Finish | None
    ) -> None:
        tag = f"forward {call} {micro_batch}"
        arrived = self._receive(self._sources, tag)
        mine = feed(micro_batch) if feed is not None and self._stage.number == 0 else {}
        with self._timeline.span("forward", micro_batch):
            made = self._stage.forward((call, micro_batch), mine, arrived)
            if finish is not None and self._stage.is_last:
                loss = finish(micro_batch, made[OUTPUT])
                if loss is not None:
                    self._stage.keep_loss((call, micro_batch), loss)
        for target in self._targets:
            self._send(self._stage.parcel(made, target), target, tag)

    def _backward(self, call: int, micro_batch: int, begin: Begin | None) -> None:
        tag = f"backward {call} {micro_batch}"
        arrived = self._receive(self._forths, tag)
        roots = begin(micro_batch) if begin is not None and self._stage.is_last else ()
        with self._timeline.span("backward", micro_batch):
            gradients = self._stage.backward((call, micro_batch), arrived, roots)
        for earlier in self._backs:
            self._send(gradients[earlier], earlier, tag)

    def _receive(self, stages: Sequence[int], tag: str) -> dict[int, Any]:
        jobs = [(stage, self._link.irecv(self._ranks[stage], tag)) for stage in stages]
        while not all(job.done() for _, job in jobs) and self._do_weights():
            continue  # nobody waits for these: now is the time
        with self._timeline.span("wait"):
            return {stage: self._wait(job) for stage, job in jobs}

    def _do_weights(self) -> bool:
        """Some of the weight gradients that were put off; whether there were any."""
        if not self._stage.num_late:
            return False
        with self._timeline.span("weights"):
            return self._stage.backward_weights()

    def _send(self, tree: Tree, stage: int, tag: str) -> None:
        with self._timeline.span("send"):
            self._sent.append(self._link.isend(tree, self._ranks[stage], tag, lend=True))
