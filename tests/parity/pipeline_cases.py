"""Run by `shoal run`: models over stages, in every case, compared with one process.

    shoal run --workers 3 tests/parity/pipeline_cases.py OUT [CASE ...]

All ranks train the pipeline; rank 0 also trains alone, with a plain loop over the same batches, and
compares. OUT/rank-R.json holds `case -> what went wrong` (or null). Cases of FATAL end the run:
each is asked for by name, and OUT/rank-R.json holds the kind and the text of the error.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pipeline_nets import (
    JOBS,
    STEPS,
    Batch,
    Branching,
    FanOut,
    Job,
    Oddities,
    OwnParameters,
    Tied,
    batches_of_rows,
    rows,
)
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.joined import JoinedPipeline
from shoal.pipeline.build import as_module, materialise
from shoal.train.order import sample_order
from shoal.wire.link import Link

TIMEOUT_S = 30
SEED = 100
SGD = {"optimizer": torch.optim.SGD, "momentum": 0.9, "weight_decay": 0.01}
ODD_SIZES = [13, 8, 3, 1, 7, 12, 5, 2, 11, 4] * 2
"""Of batches: with 4 and 7 micro-batches some divide, some do not, some are too small."""
FAN_OUT_CUTS = JOBS["fan_out"].cuts
LINKS: dict[str, Link] = {}
State = dict[str, torch.Tensor]


class Together:
    """A pipeline whose ranks are given only what matters to them."""

    def __init__(
        self,
        crew: shoal.JoinedCrew,
        model: Any,
        *,
        transport: str = "zmq",
        stages: int | None = None,
        cuts: dict[int, list[str]] | None = None,
        **options: Any,
    ) -> None:
        if transport not in LINKS:
            LINKS[transport] = crew.link(transport)
        num_stages = stages or crew.size
        options = {"loss": F.cross_entropy, **SGD, "lr": 0.1, **options}
        self.crew = crew
        self.losses: list[float] = []
        self.pipe: JoinedPipeline = crew.pipeline(
            model,
            stages=num_stages,
            cuts=(cuts or {}).get(num_stages),
            link=LINKS[transport],
            **options,
        )

    def own(self, x: Any, y: Any) -> tuple[Any, Any]:
        stage, last = self.pipe.stage_number, self.pipe.layout.stages - 1
        return x if stage == 0 else None, y if stage == last else None

    def step(self, x: Any, y: Any) -> None:
        self.losses.append(self.pipe.step(*self.own(x, y)).item())

    def run(self, batches: list[Batch]) -> State:
        for x, y in batches:
            self.step(x, y)
        return self.finish()

    def finish(self) -> State:
        """The whole state, on rank 0; all ranks were told the same losses."""
        state = self.pipe.state_dict()
        losses = self.crew.exchange("losses", self.losses)
        assert all(each == losses[0] for each in losses), f"losses differ: {losses}"
        assert bool(state) == (self.crew.rank == 0), f"{len(state)} tensors on {self.crew.rank}"
        assert self.pipe.stage.num_kept == 0
        return state


def train_alone(
    model: nn.Module,
    batches: list[Batch],
    loss: Callable[[Any, Any], torch.Tensor] = F.cross_entropy,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    clip_norm: float | None = None,
    **options: Any,
) -> list[float]:
    """The plain loop; the losses."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optim = optimizer(trainable, **options)
    losses = []
    for x, y in batches:
        optim.zero_grad()
        value = loss(model(*x) if isinstance(x, tuple) else model(x), y)
        value.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optim.step()
        losses.append(value.item())
    return losses


def same(state: State, alone: nn.Module) -> None:
    """Bit by bit. On rank 0: elsewhere there is no state."""
    if not state:
        return
    expected = alone.state_dict()
    assert list(state) == list(expected), "other names, or in another order"
    alone.load_state_dict(state, strict=True)
    for name, value in expected.items():
        assert value.dtype == state[name].dtype
    wrong = [
        f"{name} by {(value.double() - state[name].double()).abs().max():.2e}"
        for name, value in expected.items()
        if not torch.equal(value, state[name])
    ]
    assert not wrong, f"differ: {', '.join(wrong)}"


def close(state: State, alone: nn.Module) -> None:
    """But for the order of summation, in double precision."""
    if not state:
        return
    expected = alone.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            state[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


def snapshot(model: nn.Module) -> nn.Module:
    """A model's state, after it was compared with something that loads into it."""
    return model


# -- bit by bit: one micro-batch -------------------------------------------------------------------


@functools.cache
def alone_on(name: str) -> tuple[State, list[float]]:
    """A job in one process. Once per run: every schedule and transport must give the same."""
    job = JOBS[name]
    model = job.module(SEED)
    losses = train_alone(model, job.batches(), job.loss, lr=job.lr, momentum=0.9, weight_decay=0.01)
    return model.state_dict(), losses


def exact(crew: shoal.JoinedCrew, name: str, schedule: str, transport: str) -> None:
    job = JOBS[name]
    together = Together(
        crew,
        job.module(SEED + crew.rank),  # rank 0's must win
        transport=transport,
        cuts=job.cuts,
        loss=job.loss,
        lr=job.lr,
        schedule=schedule,
        microbatches=1,
    )
    state = together.run(job.batches())
    if crew.rank == 0:
        expected, losses = alone_on(name)
        model = job.module(0)
        model.load_state_dict(expected)
        same(state, model)
        assert together.losses == losses


# -- to float tolerance: many micro-batches --------------------------------------------------------


def micro(
    crew: shoal.JoinedCrew, schedule: str, microbatches: int, reduction: str, transport: str
) -> None:
    torch.manual_seed(SEED)
    alone = FanOut().double()
    torch.manual_seed(SEED + crew.rank)
    loss = functools.partial(F.cross_entropy, reduction=reduction)
    lr = 0.1 if reduction == "mean" else 0.01
    batches = batches_of_rows(ODD_SIZES, torch.float64)
    together = Together(
        crew,
        FanOut().double(),
        transport=transport,
        cuts=FAN_OUT_CUTS,
        schedule=schedule,
        microbatches=microbatches,
        reduction=reduction,
        loss=loss,
        lr=lr,
    )
    state = together.run(batches)
    losses = train_alone(alone, batches, loss, lr=lr, momentum=0.9, weight_decay=0.01)
    close(state, alone)
    torch.testing.assert_close(together.losses, losses, rtol=1e-9, atol=0)


def micro_job(crew: shoal.JoinedCrew, name: str) -> None:
    """Masks, several outputs and skips of a list, each sample with its own; 1f1b."""
    job = JOBS[name]
    batches = [(_double(x), y) for x, y in job.batches()]
    together = Together(
        crew,
        job.module(SEED).double(),
        cuts=job.cuts,
        loss=job.loss,
        lr=job.lr,
        schedule="1f1b",
        microbatches=3,
    )
    state = together.run(batches)
    if crew.rank == 0:
        alone = job.module(SEED).double()
        train_alone(alone, batches, job.loss, lr=job.lr, momentum=0.9, weight_decay=0.01)
        close(state, alone)


def _double(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_double(each) for each in x)
    return x.double() if x.is_floating_point() else x


# -- training: optimizers, schedulers, clipping, accumulation, modes -------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "Adagrad": {"lr": 0.05},
}


def fan_out(seed: int = SEED) -> FanOut:
    torch.manual_seed(seed)
    return FanOut()


def optimizers(crew: shoal.JoinedCrew, name: str) -> None:
    kind, options = getattr(torch.optim, name), OPTIMIZERS[name]
    torch.manual_seed(SEED)
    batches = batches_of_rows([8] * STEPS)
    together = Together(
        crew,
        fan_out(),
        cuts=FAN_OUT_CUTS,
        **{"momentum": None, "weight_decay": None} and {},
        optimizer=kind,
        schedule="sequential",
        **options,
    )
    state = together.run(batches)
    alone = fan_out()
    train_alone(alone, batches, optimizer=kind, **options)
    same(state, alone)
