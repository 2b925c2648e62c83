"""Pipelines against one process and against torch's own, taking turns inside the same processes.

    shoal run --workers 2 --threads 1 benchmarks/pipeline/race.py --rounds 30 --microbatches 4,8

Each contestant has its own copy of the same weights and takes the same steps on the same batches.
In every round each takes `--steps` steps after one that does not count, in an order that rotates,
so that a busy moment of the machine hits all of them alike. All pipelines of a transport share one
link: a step has received all that was sent in it before the next one begins.

Rank 0 prints one JSON object: of each contestant its cut, its losses, seconds of a step in each
round, and what every rank did in them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import shoal
from shoal.train.models.zoo import MnistCnn
from shoal.wire.link import Link

sys.path.insert(0, str(Path(__file__).parents[1]))

from local import SGD, Batch, Elsewhere, Loop, by_turns, seeded_batches, seeded_net

HERE = Path(__file__).parent
WARM_UP_STEPS = 5
TOLERANCE = 1e-6
"""Of losses after the warm-up, relative to local's: micro-batches add up in another order."""


class Contestant(ABC):
    """A way to train the net."""

    microbatches = 1
    times = 1
    """How often `step` takes a step."""
    cut: str | None = None
    """The step of the net that stage 1 begins with."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.losses: list[float] = []
        self.seconds: list[float] = []
        """Of a step, in each round."""

    @property
    def name(self) -> str:
        return f"{self.way}, {self.microbatches} micro-batches"

    def begin(self) -> None:  # noqa: B027 (most have nothing to do)
        """Its turn comes."""

    @abstractmethod
    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        """The loss, on the ranks that know it."""

    def work_s(self) -> float | None:
        """How long this rank has worked so far, if it keeps count."""
        return None

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """It has had its last turn."""


class Local(Contestant):
    """A plain loop next to one rank while both sleep, then next to the other; several, by turns.

    Two cores need not be equally fast, and a pipeline needs both: a step counts as the mean.
    """

    times = 2

    def __init__(self, crew: shoal.JoinedCrew, batch_size: int) -> None:
        super().__init__("local")
        self._crew = crew
        self._loop = Elsewhere(batch_size)

    def begin(self) -> None:
        self._loop.begin()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        return by_turns(self._crew, self._loop.step)

    def close(self) -> None:
        self._loop.close()


class InRank(Contestant):
    """The same loop in a rank's own process, in the same order."""

    times = 2

    def __init__(self, crew: shoal.JoinedCrew) -> None:
        super().__init__("the same loop in a rank")
        self._crew = crew
        self._loop = Loop()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        return by_turns(self._crew, lambda: self._loop.step(x, y))


class Shoal(Contestant):
    def __init__(
        self,
        crew: shoal.JoinedCrew,
        way: str,
        schedule: str,
        link: Link,
        *,
        microbatches: int,
        cut: str | None,
        example: torch.Tensor,
    ) -> None:
        super().__init__(way)
        self.microbatches = microbatches
        self._pipe = crew.pipeline(
            seeded_net(),
            schedule=schedule,
            microbatches=microbatches,
            link=link,
            cuts=None if cut is None else [cut],
            example=example,
            loss=F.cross_entropy,
            optimizer=torch.optim.SGD,
            **SGD,
        )
        self.cut = self._pipe.units[1][0]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        return self._pipe.step(x, y).item()

    def work_s(self) -> float | None:
        return self._pipe.timeline.busy_s


class Torch(Contestant):
    """torch.distributed.pipelining on the crew's own group of gloo."""

    def __init__(self, crew: shoal.JoinedCrew, *, microbatches: int, cut: str) -> None:
        super().__init__("torch 1F1B")
        self.microbatches = microbatches
        self.cut = cut
        self._rank = crew.rank
        part = stage_by_hand(seeded_net(), cut, crew.rank)
        self._optimizer = torch.optim.SGD(part.parameters(), **SGD)
        stage = PipelineStage(part, crew.rank, crew.size, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, microbatches, loss_fn=F.cross_entropy)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        losses: list[torch.Tensor] = []
        self._optimizer.zero_grad()
        if self._rank == 0:
            self._schedule.step(x)
        else:
            self._schedule.step(target=y, losses=losses, return_outputs=False)
        self._optimizer.step()
        return torch.stack(losses).mean().item() if losses else None


def stage_by_hand(net: MnistCnn, cut: str, stage: int) -> nn.Sequential:
    """The same steps as the net's, under the names that torch.fx gives them."""
    row: list[tuple[str, nn.Module]] = [
        ("conv1", net.conv1),
        ("relu", nn.ReLU()),
        ("pool1", net.pool1),
        ("conv2", net.conv2),
        ("relu_1", nn.ReLU()),
        ("pool2", net.pool2),
        ("conv3", net.conv3),
        ("relu_2", nn.ReLU()),
        ("pool3", net.pool3),
        ("view", nn.Flatten()),
        ("fc1", net.fc1),
        ("relu_3", nn.ReLU()),
        ("fc2", net.fc2),
    ]
    at = [name for name, _ in row].index(cut)
    return nn.Sequential(*(module for _, module in (row[:at] if stage == 0 else row[at:])))


def all_contestants(
    crew: shoal.JoinedCrew, counts: list[int], cut: str | None, example: torch.Tensor
) -> list[Contestant]:
    """For each number of micro-batches, the cut that its first pipeline chooses holds for all."""
    links = {transport: crew.link(transport) for transport in ("zmq", "dist")}

    def pipelines(schedules: list[str], microbatches: int) -> list[Contestant]:
        made: list[Contestant] = []
        for schedule, (transport, link) in itertools.product(schedules, links.items()):
            name = f"{schedule} {transport}"
            at = made[0].cut if made else cut
            made.append(
                Shoal(
                    crew, name, schedule, link, microbatches=microbatches, cut=at, example=example
                )
            )
        return made

    found = [Local(crew, len(example)), InRank(crew), *pipelines(["sequential"], 1)]
    for count in counts:
        made = pipelines(["1f1b", "gpipe"], count)
        assert made[0].cut is not None
        found += made
        if len(example) % count == 0:  # torch's cannot do others
            found.append(Torch(crew, microbatches=count, cut=made[0].cut))
    return found


class Race:
    """The contestants on one rank, and what they did there."""

    def __init__(
        self, crew: shoal.JoinedCrew, contestants: list[Contestant], batches: list[Batch]
    ) -> None:
        self._crew = crew
        self._contestants = contestants
        self._batches = batches
        self._taken = {contestant.name: 0 for contestant in contestants}
        self._work_s = {contestant.name: 0.0 for contestant in contestants}
        self._wall_s = {contestant.name: 0.0 for contestant in contestants}

    def _step(self, contestant: Contestant) -> None:
        number = self._taken[contestant.name]
        self._taken[contestant.name] = number + 1
        loss = contestant.step(*self._batches[number % len(self._batches)])
        if loss is not None:
            contestant.losses.append(loss)

    def warm_up(self) -> None:
        """Connections, memory, what torch finds out in its first step."""
        for contestant in self._contestants:
            for _ in range(WARM_UP_STEPS):
                self._step(contestant)

    def turn(self, contestant: Contestant, steps: int) -> None:
        contestant.begin()
        self._crew.barrier()
        self._step(contestant)  # does not count: who was before is out of the caches now
        worked, begun = contestant.work_s(), time.perf_counter()
        for _ in range(steps):
            self._step(contestant)
        took = time.perf_counter() - begun
        contestant.seconds.append(round(took / steps / contestant.times, 6))
        self._wall_s[contestant.name] += took
        if worked is not None:
            self._work_s[contestant.name] += (contestant.work_s() or 0.0) - worked

    def run(self, rounds: int, steps: int) -> None:
        for number in range(rounds):
            turn = number % len(self._contestants)
            for contestant in self._contestants[turn:] + self._contestants[:turn]:
                self.turn(contestant, steps)

    def losses(self) -> dict[str, list[float]]:
        """From whichever rank knows them."""
        mine = {contestant.name: contestant.losses for contestant in self._contestants}
        by_rank = self._crew.exchange("losses", mine)
        return {name: next(each[name] for each in by_rank if each[name]) for name in mine}

    def check(self) -> None:
        """So far everyone has learned the same; `sequential` to the bit."""
        losses = self.losses()
        expected = losses[self._contestants[0].name]
        for contestant in self._contestants:
            own = losses[contestant.name]
            exact = contestant.way.startswith("sequential")
            pairs = zip(own, expected, strict=True)
            if any(a != b if exact else abs(a / b - 1) > TOLERANCE for a, b in pairs):
                raise SystemExit(f"{contestant.name} has learned {own}, local {expected}")

    def report(self) -> list[dict[str, Any]]:
        losses = self.losses()
        worked = self._crew.exchange("seconds of work", self._work_s)
        walls = self._crew.exchange("seconds", self._wall_s)
        return [
            {
                "way": contestant.way,
                "microbatches": contestant.microbatches,
                "cut": contestant.cut,
                "loss": losses[contestant.name][-1],
                "seconds": contestant.seconds,
                "work_s": [each[contestant.name] for each in worked],
                "wall_s": [each[contestant.name] for each in walls],
            }
            for contestant in self._contestants
        ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--microbatches", default="2,4,8,16")
    parser.add_argument("--cut", help="the module that stage 1 begins with, not an automatic cut")
    args = parser.parse_args()
    counts = [int(count) for count in args.microbatches.split(",")]

    with shoal.join() as crew:
        batches = seeded_batches(args.batch_size)
        contestants = all_contestants(crew, counts, args.cut, batches[0][0])
        race = Race(crew, contestants, batches)
        race.warm_up()
        race.check()
        race.run(args.rounds, args.steps)
        report = race.report()
        for contestant in contestants:
            contestant.close()
        crew.print(json.dumps({"batch_size": args.batch_size, "contestants": report}))


main()
