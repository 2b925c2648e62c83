"""Every sync against torch's DDP, taking turns inside the same processes.

    shoal run --workers 2 --threads 1 benchmarks/data_parallel/race.py --rounds 200 --steps 1

Each contestant has its own model and optimizer. In every round each takes `--steps` steps of the
same global batches, in an order that rotates, so that a busy moment of the machine hits all of
them alike. Rank 0 prints one JSON object: seconds of each contestant in each round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.train.models.zoo import MnistCnn

Step = Callable[[], None]


def make_step(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--contestants", default="all-reduce,ring,central,serial-ring,ddp")
    args = parser.parse_args()

    with shoal.join() as crew:
        torch.manual_seed(crew.rank)
        local = args.batch_size // crew.size
        x, y = torch.randn(local, 1, 28, 28), torch.randint(0, 10, (local,))
        steps: dict[str, Step] = {}
        for name in ["torch DDP", "no sync", *args.contestants.split(",")]:
            torch.manual_seed(0)
            model = MnistCnn()
            if name == "no sync":
                steps[name] = make_step(model, x, y)
            elif name == "torch DDP":
                steps[name] = make_step(DistributedDataParallel(model), x, y)
            else:
                steps[name] = make_step(crew.replicate(model, sync=name), x, y)
        for step in steps.values():  # warm up: allocations, connections, DDP's bucket rebuild
            for _ in range(5):
                step()

        names = list(steps)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(args.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                crew.barrier()
                begun = time.perf_counter()
                for _ in range(args.steps):
                    steps[name]()
                seconds[name].append(time.perf_counter() - begun)
        crew.print(json.dumps({"steps": args.steps, "ranks": crew.size, "seconds": seconds}))


main()
