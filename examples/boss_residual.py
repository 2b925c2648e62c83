"""A residual model on sin x, on two workers, driven by one script with `await`.

    shoal worker --boss 127.0.0.1:1024          # in two other terminals, or on two other machines
    python examples/boss_residual.py

`--local` starts the two workers here, and compares with the same training in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import subprocess
import sys

import torch
from torch import nn

import shoal
from shoal.pipeline.layers import model_of

wrapped_linear = nn.Linear
TEST_RESIDUAL_SMALL = [
    (nn.Linear, {"in_features": 1, "out_features": 512}, (32, 1)),
    (nn.ReLU, {}, (32, 512)),
    (
        wrapped_linear,
        {"in_features": 512, "out_features": 512, "out_variables": ["res_1"]},
        [(32, 512)],
    ),
    (nn.ReLU, {}, (32, 512)),
    (nn.Linear, {"in_features": 512, "out_features": 512}, (32, 512)),
    (nn.ReLU, {}, (32, 512)),
    (
        wrapped_linear,
        {
            "in_features": 512,
            "out_features": 512,
            "dependencies": ["res_1"],
            "out_variables": [],
        },
        [(32, 512), (32, 512)],
    ),
    (nn.ReLU, {}, (32, 512)),
    (nn.Linear, {"in_features": 512, "out_features": 1}, (32, 512)),
    (nn.Sigmoid, {}, (32, 1)),
]


def get_batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """x in [-pi, pi), and sin x brought to where a sigmoid can get."""
    x = 2 * math.pi * (torch.rand(size, 1, generator=generator) - 0.5)
    return x, (torch.sin(x) + 1) / 2


async def train_on_workers(
    listen: str, num_workers: int, steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    workers = await shoal.AsyncBoss.setup_host(num_workers, listen)
    torch.manual_seed(0)
    boss = shoal.AsyncBoss(workers, TEST_RESIDUAL_SMALL)
    await boss.distribute_model()
    await boss.send_optimizer(torch.optim.Adam, {"lr": 3e-3})
    boss.gather_dependencies()

    loss_fn = nn.MSELoss()
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        x, y = get_batch(32, generator)
        prediction = await boss.forward(x, {})
        loss = loss_fn(prediction, y)
        loss.backward()
        await boss.backward(prediction.grad)
        await boss.optim_step()
        losses.append(loss.item())
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:4}   loss {loss.item():.6f}", flush=True)
    state = await boss.state_dict()
    await boss.close()
    return losses, state


def train_here(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same model, trained by the loop that everybody knows."""
    torch.manual_seed(0)
    model = model_of(TEST_RESIDUAL_SMALL)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss_fn = nn.MSELoss()
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x, y = get_batch(32, generator)
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", default="tcp://127.0.0.1:1024")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--local", action="store_true", help="start workers here, and compare")
    args = parser.parse_args()
    torch.set_num_threads(1)  # so small a model gains nothing by more
    address = args.listen.removeprefix("tcp://")
    command = [sys.executable, "-m", "shoal", "worker", "--once", "--boss", address]
    command += ["--threads", "1"]
    started = [subprocess.Popen(command) for _ in range(args.workers if args.local else 0)]
    try:
        losses, state = asyncio.run(train_on_workers(args.listen, args.workers, args.steps))
        for worker in started:
            worker.wait(timeout=30)
    finally:
        for worker in started:
            worker.kill()
    if args.local:
        expected, weights = train_here(args.steps)
        same = losses == expected and all(torch.equal(state[n], weights[n]) for n in weights)
        print(f"one process: loss {expected[-1]:.6f}; the same to the last bit: {same}")
        sys.exit(0 if same else 1)


main()
