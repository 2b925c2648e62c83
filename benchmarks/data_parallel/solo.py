"""What `shoal train --workers 1` costs over a bare loop, taking turns in one process.

The bare loop is as bare as it gets: tensors in memory, an index per batch, five lines a step. The
other side is everything that `shoal train` does in an epoch: its loader, counting of loss and
accuracy, metrics.jsonl, events.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from shoal.crew import Crew
from shoal.rendezvous.roll import Fingerprint
from shoal.rendezvous.ways import Way
from shoal.replicate import replicate
from shoal.report.events import EpochDone, Event
from shoal.settings import TrainSettings
from shoal.train.data.load import Data
from shoal.train.models.zoo import MnistCnn
from shoal.train.rank import train_and_keep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    samples = 128 * args.steps
    x, y = torch.randn(samples, 1, 28, 28), torch.randint(0, 10, (samples,))
    data = Data(train=TensorDataset(x, y), test=TensorDataset(x[:16], y[:16]))

    bare_model = MnistCnn()
    optimizer = torch.optim.SGD(bare_model.parameters(), lr=0.01, momentum=0.9)

    def bare() -> float:
        begun = time.perf_counter()
        order = torch.randperm(samples)
        for batch in order.split(128):
            loss = F.cross_entropy(bare_model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return time.perf_counter() - begun

    with (
        tempfile.TemporaryDirectory() as out,
        Crew.open(Way(), fingerprint=Fingerprint(shoal="")) as crew,
    ):
        settings = TrainSettings(epochs=1, lr=0.01, out=out)
        model = replicate(MnistCnn(), crew)

        def whole() -> float:
            seen: list[float] = []

            def emit(event: Event) -> None:
                if isinstance(event, EpochDone):
                    seen.append(event.record.seconds)

            train_and_keep(model, data, crew, settings, emit)
            return seen[0]

        seconds: dict[str, list[float]] = {"bare loop": [], "shoal train": []}
        turns = {"bare loop": bare, "shoal train": whole}
        for run in turns.values():
            run()
        for number in range(args.rounds):
            names = list(turns) if number % 2 else list(reversed(turns))
            for name in names:
                seconds[name].append(turns[name]())
    print(json.dumps({"steps": args.steps, "seconds": seconds}))


main()
