"""Workers for tests of a boss: real processes, hired by one boss after the other.

The boss itself is in the test's own process, except where the test is about how it ends.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from processes import ENOUGH_S, SHOAL, Running
from torch import nn
from warm import Nursery

import shoal
from shoal.network import reserve_port

TIMEOUT_S = 30.0


def quiet(text: str) -> None:
    pass


class Office:
    """A port for bosses, and the workers that know it."""

    def __init__(
        self, folder: Path, *options: str, nursery: Nursery | None = None, **environment: str
    ) -> None:
        """options, environment: of every worker; nursery: where they are started."""
        self.port = reserve_port()
        self.listen = f"tcp://127.0.0.1:{self.port}"
        self.workers: list[Running] = []
        """All that were ever started."""
        self._folder = folder
        self._nursery = nursery
        self._options = options
        self._environment = {"PYTHONFAULTHANDLER": "1", **environment}
        self._boss: shoal.Boss | None = None

    def start(self, count: int = 1, *options: str) -> list[Running]:
        """More workers; which need not be up yet."""
        command = (*SHOAL, "worker", "--boss", f"127.0.0.1:{self.port}", "--threads", "1")
        for _ in range(count):
            folder = self._folder / f"worker{len(self.workers)}"
            argv = (*command, *self._options, *options)
            self.workers.append(Running(folder, argv, self._nursery, **self._environment))
        return self.workers[-count:]

    @property
    def num_alive(self) -> int:
        return sum(each.process.poll() is None for each in self.workers)

    def need(self, count: int) -> None:
        """At least so many workers, those of earlier tests included."""
        if self.num_alive < count:
            self.start(count - self.num_alive)

    def make_boss(self, workers: int, **options: Any) -> shoal.Boss:
        how = {"timeout_s": TIMEOUT_S, "wait_s": ENOUGH_S, "notify": quiet, **options}
        try:
            return shoal.Boss(self.listen, workers, **how)
        except shoal.MeetingError as error:
            if "wait_s" in options or "long enough" not in str(error):
                raise
            doing = "".join(self._stop_and_ask(worker) for worker in self.workers)
            raise AssertionError(f"{error}{doing}") from error

    def _stop_and_ask(self, worker: Running) -> str:
        """Where a worker is that does not come."""
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGABRT)  # faulthandler tells
            worker.end()
        return f"\n-- pid {worker.process.pid}: {worker.out[-500:]}\n{worker.err[-5000:]}"

    def worker(self, pid: int) -> Running:
        return next(each for each in self.workers if each.process.pid == pid)

    def boss(self, workers: int) -> shoal.Boss:
        """The one that is shared by tests. Fit for use, or another one."""
        if self._boss is not None and not is_well(self._boss):
            self.close_boss()
        if self._boss is None:
            self.need(workers)
            self._boss = self.make_boss(workers)
        return self._boss

    def close_boss(self) -> None:
        if self._boss is not None:
            self._boss.close()
        self._boss = None

    def close(self) -> None:
        try:
            self.close_boss()
        finally:
            for worker in self.workers:
                worker.kill()


def rows(count: int = 4) -> torch.Tensor:
    return torch.linspace(-1, 1, count * 6).view(count, 6)


def row_of_layers(count: int) -> nn.Sequential:
    """One for each worker, at least."""
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(count)))


def is_well(boss: shoal.Boss) -> bool:
    """Whether it and its workers still do what they are for."""
    try:
        works(boss)
    except (shoal.ShoalError, AssertionError):
        return False
    return True


def works(boss: shoal.Boss, make: Callable[[int], nn.Module] = row_of_layers) -> None:
    """One step, compared with one process."""
    count = boss.status().wanted
    torch.manual_seed(1)
    plain = make(count)
    model = boss.place(plain, cuts=[str(number) for number in range(1, count)])
    optimizers = boss.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), 0.1)
    x = rows()
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        each(x).pow(2).mean().backward()
        optimizer.step()
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())
