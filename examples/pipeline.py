"""A model in stages, in a script of your own: every rank runs the same lines.

    shoal run --workers 2 examples/pipeline.py
    shoal run --workers 4 examples/pipeline.py --stages 2        # two replicas of two stages

On two machines:  python examples/pipeline.py --init tcp://192.168.0.1:23456 --world-size 2 --rank 0
(and --rank 1 on the other). The skip connection goes straight from the stage that makes it to the
one that uses it.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal

LAYERS = [
    shoal.Layer(nn.Linear, in_features=1, out_features=128),
    nn.ReLU(),
    shoal.Layer(nn.Linear, in_features=128, out_features=128, gives="res_1"),
    nn.ReLU(),
    shoal.Layer(nn.Linear, in_features=128, out_features=128),
    nn.ReLU(),
    shoal.Layer(nn.Linear, in_features=128, out_features=128, takes="res_1"),
    nn.ReLU(),
    shoal.Layer(nn.Linear, in_features=128, out_features=1),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int)
    parser.add_argument("--transport", default="zmq")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--init")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    args = parser.parse_args()

    torch.manual_seed(0)  # rank 0's weights are everybody's
    x = torch.linspace(-3, 3, 1024).unsqueeze(1)
    train_set = TensorDataset(x, torch.sin(x))
    with shoal.join(args.init, rank=args.rank, world_size=args.world_size) as crew:
        pipe = crew.pipeline(
            LAYERS,
            stages=args.stages,
            schedule=args.schedule,
            transport=args.transport,
            loss=F.mse_loss,
            optimizer=torch.optim.Adam,
            lr=3e-3,
        )
        loader = pipe.loader(train_set, batch_size=128)
        for epoch in range(1, args.epochs + 1):
            for batch in loader:
                loss = pipe.step(*batch)
            if epoch == 1:
                crew.print("stages: " + " | ".join(" ".join(names) for names in pipe.modules))
            if epoch % 5 == 0:
                crew.print(f"epoch {epoch}: loss {loss.item():.5f}")
        error = (pipe.eval()(x) - torch.sin(x)).abs().max().item()
        crew.print(f"largest error of sin x: {error:.3f}")


main()
