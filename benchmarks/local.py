"""A process without a pipeline: a plain loop that takes a step for each line it reads.

    python benchmarks/local.py --batch-size 128

Prints that it is ready, then the loss of each step. A process of its own, since what a rank does to
its process (the C library keeps the memory of large blocks there) makes a plain loop in it faster
than elsewhere.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

import shoal
from shoal.train.models.zoo import MnistCnn

SGD = {"lr": 0.01, "momentum": 0.9}
NUM_BATCHES = 8
NUM_PROCESSES = 6
NUM_WARM_UP_STEPS = 5

Batch = tuple[torch.Tensor, torch.Tensor]


def seeded_net() -> MnistCnn:
    torch.manual_seed(0)
    return MnistCnn()


def seeded_batches(size: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(size, 1, 28, 28, generator=generator),
            torch.randint(0, 10, (size,), generator=generator),
        )
        for _ in range(NUM_BATCHES)
    ]


class Loop:
    """The loop that everybody knows."""

    def __init__(self) -> None:
        self._net = seeded_net()
        self._optimizer = torch.optim.SGD(self._net.parameters(), **SGD)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        loss = F.cross_entropy(self._net(x), y)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()


def by_turns(crew: shoal.JoinedCrew, step: Callable[[], float]) -> float:
    """On one rank while the others sleep in a barrier, then on the next."""
    for rank in range(crew.size):
        if rank == crew.rank:
            loss = step()
        crew.barrier()
    return loss


class Elsewhere:
    """The same in processes of its own, one after the other: in each turn the next.

    They are not equally fast: how often the C library gives memory back, and the system hands it
    out anew page by page, is settled by how blocks happen to lie when a process has begun. On one
    machine the same step took 60 ms in one of them, and 84 ms in another.
    """

    def __init__(self, batch_size: int) -> None:
        argv = [sys.executable, __file__, "--batch-size", str(batch_size)]
        self._processes = [
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(NUM_PROCESSES)
        ]
        self._turn = 0
        for process in self._processes:  # while they warm up, nobody else is to be measured
            assert process.stdout is not None
            process.stdout.readline()

    def begin(self) -> None:
        """The next turn."""
        self._turn += 1

    def step(self) -> float:
        process = self._processes[self._turn % NUM_PROCESSES]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    def close(self) -> None:
        for process in self._processes:
            process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batches = seeded_batches(args.batch_size)
    before = Loop()  # torch finds out how to compute, and the C library what to keep
    for batch in batches[:NUM_WARM_UP_STEPS]:
        before.step(*batch)
    loop = Loop()
    print("ready", flush=True)
    for number, _ in enumerate(sys.stdin):
        print(repr(loop.step(*batches[number % NUM_BATCHES])), flush=True)


if __name__ == "__main__":
    main()
