"""A boss and its workers against one process and against a pipeline of ranks, taking turns.

    shoal run --workers 2 --threads 1 benchmarks/boss/race.py --rounds 30 --microbatches 4,8
    python benchmarks/boss/race.py --net chain --workers 8

Rank 0 is the boss. It starts the workers, which sleep while others have their turn, as rank 1 does
while the boss has. All contestants take the same steps on the same batches. In every round each
takes `--steps` steps after one that does not count, in an order that rotates, so that a busy moment
of the machine hits all of them alike. A boss has one model at a time: before each of its turns the
weights are placed anew. Such a turn is over when the workers have done all of it.

Rank 0 prints one JSON object: how long the workers took to join and to leave; and of each
contestant its cuts, seconds of a step in each round, and what was spent in all rounds together.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.wire.link import Link

sys.path.insert(0, str(Path(__file__).parents[1]))

from local import NUM_BATCHES, SGD, Batch, Elsewhere, by_turns, seeded_batches, seeded_net

WARM_UP_STEPS = 5
TOLERANCE = 1e-6
"""Of losses after the warm-up, relative to local's: micro-batches add up in another order."""
JOIN_S, LEAVE_S = 600.0, 60.0
"""At most: many processes begin with torch, on few cores."""
WORKER_BYTES = 350 << 20
"""What a worker needs, about."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Task(NamedTuple):
    """What all contestants learn."""

    net: Callable[[], nn.Module]
    """With the same weights every time."""
    loss: Loss
    batches: list[Batch]


def mnist_cnn(batch_size: int) -> Task:
    return Task(seeded_net, F.cross_entropy, seeded_batches(batch_size))


def chain(length: int, batch_size: int) -> Task:
    """A stage is one layer of almost no work: what a step takes is what it takes to drive it."""

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(length)))

    generator = torch.Generator().manual_seed(0)
    batches = torch.randn(NUM_BATCHES, 2, batch_size, 8, generator=generator)
    return Task(net, F.mse_loss, [(x, y) for x, y in batches])


class Staff:
    """A boss with its workers, all on this machine."""

    def __init__(self, num_workers: int) -> None:
        wanted, free = num_workers * WORKER_BYTES, psutil.virtual_memory().available
        if wanted > free:
            raise SystemExit(
                f"{num_workers} workers need about {wanted >> 20} MiB; {free >> 20} MiB are free."
            )
        with socket.socket() as free_port:
            free_port.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free_port.getsockname()[1]}"
        argv = [sys.executable, "-m", "shoal", "worker", "--once", "--quiet", "--threads", "1"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        begun = time.perf_counter()
        self._workers: list[psutil.Popen] = []
        try:
            for _ in range(num_workers):
                worker = psutil.Popen([*argv, "--boss", address], env=environment)
                self._workers.append(worker)
            self.boss = shoal.Boss(f"tcp://{address}", num_workers, wait_s=JOIN_S)
        except BaseException:
            self._end()
            raise
        self.join_s = time.perf_counter() - begun
        self.leave_s = 0.0

    def cpu_s(self) -> float:
        """What all workers have used so far."""
        used = [worker.cpu_times() for worker in self._workers]
        return sum(each.user + each.system for each in used)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        begun = time.perf_counter()
        try:
            self.boss.close(error)
            if error is None:
                for worker in self._workers:
                    if code := worker.wait(LEAVE_S):
                        raise SystemExit(f"a worker ended with {code}")
            self.leave_s = time.perf_counter() - begun
        finally:
            self._end()

    def _end(self) -> None:
        for worker in self._workers:
            try:
                worker.wait(0)
            except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
                worker.kill()
                worker.wait()


class Contestant(ABC):
    """A way to train the net."""

    microbatches = 1
    times = 1
    """How often `step` takes a step."""
    cuts: Sequence[str] = ()
    """What stages 1, 2, ... begin with."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.losses: list[float] = []
        self.seconds: list[float] = []
        """Of a step, in each round."""

    @property
    def name(self) -> str:
        return f"{self.way}, {self.microbatches} micro-batches"

    def begin(self) -> None:  # noqa: B027 (most have nothing to do)
        """Get ready for a turn."""

    @abstractmethod
    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        """The loss, on the ranks that know it."""

    def work_s(self) -> list[float]:
        """How long the stages that this rank knows of have worked, when they have done it all."""
        return []

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """It has had its last turn."""


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Loss, batch: Batch
) -> float:
    """The loop of everybody: of one process, and of a boss."""
    x, y = batch
    loss = loss_fn(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Local(Contestant):
    """A plain loop next to rank 0 while both sleep, then next to the other.

    Two cores need not be equally fast: a step counts as the mean.
    """

    def __init__(self, crew: shoal.JoinedCrew, batch_size: int) -> None:
        super().__init__("local")
        self.times = crew.size
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

    def __init__(
        self, crew: shoal.JoinedCrew, task: Task, name: str = "the same loop in a rank"
    ) -> None:
        super().__init__(name)
        self.times = crew.size
        self._crew = crew
        self._loss = task.loss
        self._net = task.net()
        self._optimizer = torch.optim.SGD(self._net.parameters(), **SGD)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        return by_turns(
            self._crew, lambda: plain_step(self._net, self._optimizer, self._loss, (x, y))
        )


class Ranks(Contestant):
    """A pipeline of ranks without a boss, as `shoal train` makes one."""

    def __init__(
        self,
        crew: shoal.JoinedCrew,
        task: Task,
        schedule: str,
        transport: str,
        link: Link,
        *,
        microbatches: int,
        cuts: Sequence[str] | None,
    ) -> None:
        super().__init__(f"{schedule} {transport}")
        self.microbatches = microbatches
        self._pipe = crew.pipeline(
            task.net(),
            schedule=schedule,
            microbatches=microbatches,
            link=link,
            cuts=cuts,
            example=task.batches[0][0],
            loss=task.loss,
            optimizer=torch.optim.SGD,
            **SGD,
        )
        self.cuts = [units[0] for units in self._pipe.units[1:]]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        return self._pipe.step(x, y).item()

    def work_s(self) -> list[float]:
        return [self._pipe.timeline.busy_s]


class Plain(Contestant):
    """A plain loop on rank 0, with the net on the workers."""

    def __init__(
        self, way: str, staff: Staff | None, task: Task, *, microbatches: int, cuts: Sequence[str]
    ) -> None:
        super().__init__(way)
        self.microbatches = microbatches
        self.cuts = cuts
        self._boss = None if staff is None else staff.boss
        self._task = task

    def begin(self) -> None:
        if self._boss is not None:
            self._model = self._boss.place(
                self._task.net(), cuts=self.cuts, microbatches=self.microbatches
            )
            self._optimizer = self._boss.optimizer(torch.optim.SGD, **SGD)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        if self._boss is None:
            return None
        return plain_step(self._model, self._optimizer, self._task.loss, (x, y))

    def work_s(self) -> list[float]:
        if self._boss is None:
            return []
        return [worked for worked, _ in self._boss.seconds()]


class TrainStep(Plain):
    """The loss is computed on the last worker, under 1f1b."""

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        if self._boss is None:
            return None
        return self._boss.train_step(x, y, loss=self._task.loss).item()


def bosses(
    staff: Staff | None, task: Task, microbatches: int, cuts: Sequence[str]
) -> list[Contestant]:
    return [
        kind(way, staff, task, microbatches=microbatches, cuts=cuts)
        for kind, way in ((Plain, "boss"), (TrainStep, "boss.train_step"))
    ]


def two_stages(
    crew: shoal.JoinedCrew, staff: Staff | None, task: Task, counts: list[int], cut: str | None
) -> list[Contestant]:
    """For each number of micro-batches, the cut that its first pipeline chooses holds for all."""
    links = {transport: crew.link(transport) for transport in ("zmq", "dist")}

    def pipelines(schedule: str, count: int) -> list[Contestant]:
        made: list[Contestant] = []
        for transport, link in links.items():
            cuts = made[0].cuts if made else cut and [cut]
            made.append(
                Ranks(crew, task, schedule, transport, link, microbatches=count, cuts=cuts or None)
            )
        return made

    in_turns = pipelines("sequential", 1)[0]
    whole = bosses(staff, task, 1, in_turns.cuts)[0]
    size = len(task.batches[0][0])
    found: list[Contestant] = [Local(crew, size), InRank(crew, task), in_turns, whole]
    for count in counts:
        ranks = pipelines("gpipe", count)
        found += [*ranks, *bosses(staff, task, count, ranks[0].cuts)]
    return found


class Spent(NamedTuple):
    """In a turn, or in all."""

    wall_s: float
    cpu_s: float
    """Of this process."""
    workers_cpu_s: float
    work_s: list[float]
    """By stage."""


def _total(spent: Sequence[Spent]) -> Spent:
    return Spent(
        sum(each.wall_s for each in spent),
        sum(each.cpu_s for each in spent),
        sum(each.workers_cpu_s for each in spent),
        [sum(of_stage) for of_stage in zip(*(each.work_s for each in spent), strict=True)],
    )


class Race:
    """The contestants on one rank, and what they did there."""

    def __init__(
        self,
        crew: shoal.JoinedCrew,
        contestants: list[Contestant],
        batches: list[Batch],
        staff: Staff | None,
    ) -> None:
        self._crew = crew
        self._contestants = contestants
        self._batches = batches
        self._staff = staff
        self._taken = {contestant.name: 0 for contestant in contestants}
        self._spent: dict[str, list[Spent]] = {contestant.name: [] for contestant in contestants}

    def _step(self, contestant: Contestant) -> None:
        number = self._taken[contestant.name]
        self._taken[contestant.name] = number + 1
        loss = contestant.step(*self._batches[number % len(self._batches)])
        if loss is not None:
            contestant.losses.append(loss)

    def warm_up(self) -> None:
        """Connections, memory, what torch finds out in its first step."""
        for contestant in self._contestants:
            contestant.begin()
            for _ in range(WARM_UP_STEPS):
                self._step(contestant)

    def turn(self, contestant: Contestant, steps: int) -> None:
        contestant.begin()
        self._crew.barrier()
        self._step(contestant)  # does not count: who was before is out of the caches now
        worked, workers_cpu_s = contestant.work_s(), self._workers_cpu_s()
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._step(contestant)
        work_s = [a - b for a, b in zip(contestant.work_s(), worked, strict=True)]
        cpu_s, wall_s = time.process_time() - begun_cpu_s, time.perf_counter() - begun_s
        contestant.seconds.append(round(wall_s / steps / contestant.times, 6))
        self._spent[contestant.name].append(
            Spent(wall_s, cpu_s, self._workers_cpu_s() - workers_cpu_s, work_s)
        )

    def _workers_cpu_s(self) -> float:
        return self._staff.cpu_s() if self._staff else 0.0

    def run(self, rounds: int, steps: int) -> None:
        for number in range(rounds):
            turn = number % len(self._contestants)
            for contestant in self._contestants[turn:] + self._contestants[:turn]:
                self.turn(contestant, steps)

    def check(self) -> None:
        """So far everyone has learned the same; with the batch whole, to the bit."""
        mine = {contestant.name: contestant.losses for contestant in self._contestants}
        by_rank = self._crew.exchange("losses", mine)
        losses = {name: next(each[name] for each in by_rank if each[name]) for name in mine}
        expected = losses[self._contestants[0].name]
        for contestant in self._contestants:
            own = losses[contestant.name]
            exact = contestant.microbatches == 1
            pairs = zip(own, expected, strict=True)
            if any(a != b if exact else abs(a / b - 1) > TOLERANCE for a, b in pairs):
                raise SystemExit(f"{contestant.name} has learned {own}, local {expected}")

    def report(self) -> list[dict[str, Any]]:
        totals = {name: _total(spent) for name, spent in self._spent.items()}
        worked = self._crew.exchange("work", {name: each.work_s for name, each in totals.items()})
        return [
            {
                "way": contestant.way,
                "microbatches": contestant.microbatches,
                "cuts": list(contestant.cuts),
                "seconds": contestant.seconds,
                "wall_s": totals[contestant.name].wall_s,
                "cpu_s": totals[contestant.name].cpu_s,
                "workers_cpu_s": totals[contestant.name].workers_cpu_s,
                "work_s": [work for each in worked for work in each[contestant.name]],
            }
            for contestant in self._contestants
        ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", choices=["mnist-cnn", "chain"], default="mnist-cnn")
    parser.add_argument("--workers", type=int, default=2, help="of a chain")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--microbatches", default="4,8")
    parser.add_argument("--cut", help="the module that stage 1 begins with, not an automatic cut")
    args = parser.parse_args()
    is_chain = args.net == "chain"
    num_workers = args.workers if is_chain else 2
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else workers would wait on for a boss

    with shoal.join() as crew, ExitStack() as resources:
        if crew.size != (1 if is_chain else 2):
            raise SystemExit("mnist-cnn: shoal run --workers 2; chain: one process.")
        staff = resources.enter_context(Staff(num_workers)) if crew.rank == 0 else None
        if is_chain:
            task = chain(num_workers, args.batch_size)
            cuts = [str(number) for number in range(1, num_workers)]
            contestants = [InRank(crew, task, "local"), *bosses(staff, task, 1, cuts)]
        else:
            task = mnist_cnn(args.batch_size)
            counts = [int(count) for count in args.microbatches.split(",")]
            contestants = two_stages(crew, staff, task, counts, args.cut)
        race = Race(crew, contestants, task.batches, staff)
        race.warm_up()
        race.check()
        race.run(args.rounds, args.steps)
        report = race.report()
        for contestant in contestants:
            contestant.close()
        resources.close()
        if staff is not None:
            times = {"join_s": staff.join_s, "leave_s": staff.leave_s}
            crew.print(json.dumps({**times, "contestants": report}))


main()
