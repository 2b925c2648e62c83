"""Run by `shoal run`: models over stages, in every case, compared with one process.

    shoal run --workers 3 tests/parity/pipeline_cases.py OUT [CASE ...]

All ranks train the pipeline; rank 0 also trains alone, with a plain loop over the same batches, and
compares. OUT/rank-R.json holds `case -> what went wrong` (or null). The run ends with a fault that
one rank finds: "told" is what each rank heard of it, and how long that took.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import json
import logging
import random
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import numpy
import pipeline_oddities
import torch
import torch.nn.functional as F
from pipeline_faults import FATAL, FAULTS, HYBRID_FAULTS, refused
from pipeline_nets import (
    IN_PLACE_ON_A_VIEW,
    JOBS,
    ODDITIES_CUTS,
    STEPS,
    Batch,
    FanOut,
    Features,
    Loss,
    Oddities,
    OwnParameters,
    PairOut,
    Tied,
    batches_of_rows,
    rows,
    sequential,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.joined import JoinedPipeline
from shoal.pipeline.build import as_module
from shoal.pipeline.graph import read
from shoal.pipeline.meta import materialise
from shoal.pipeline.micro_batches import shares
from shoal.pipeline.partition import Costs, stage_bytes
from shoal.pipeline.profile import profile
from shoal.pipeline.whole import Whole
from shoal.settings import SCHEDULES, SYNCS
from shoal.train.order import sample_order
from shoal.wire.link import Link
from shoal.wire.tree import tensors_of

TIMEOUT_S = 30
SEED = 100
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ODD_SIZES = [13, 8, 3, 1, 7, 12, 5, 2, 11, 4]
"""Of batches: with 4 and 7 micro-batches some divide, some do not, some are too small."""
FAN_OUT_CUTS = JOBS["fan_out"].cuts
LINKS: dict[str, Link] = {}
State = dict[str, torch.Tensor]
Case = Callable[[shoal.JoinedCrew], None]


class Together:
    """A pipeline whose ranks are given only what matters to them."""

    def __init__(
        self,
        crew: shoal.JoinedCrew,
        model: Any,
        cuts: dict[int, list[str]] | None = None,
        *,
        transport: str = "zmq",
        stages: int | None = None,
        **options: Any,
    ) -> None:
        if transport not in LINKS:
            LINKS[transport] = crew.link(transport)
        if "optimizer" not in options:
            options = {"optimizer": torch.optim.SGD, **SGD, **options}
        num_stages = stages or crew.size
        self.crew = crew
        self.losses: list[float] = []
        self.pipe: JoinedPipeline = crew.pipeline(
            model,
            stages=num_stages,
            cuts=cuts[num_stages] if cuts else None,
            link=LINKS[transport],
            **{"loss": F.cross_entropy, **options},
        )

    def own(self, x: Any, y: Any = None) -> tuple[Any, Any]:
        stage, last = self.pipe.stage_number, self.pipe.layout.stages - 1
        return x if stage == 0 else None, y if stage == last else None

    def step(self, x: Any, y: Any) -> None:
        self.losses.append(self.pipe.step(*self.own(x, y)).item())

    def run(self, batches: list[Batch]) -> State:
        for x, y in batches:
            self.step(x, y)
        return self.finish()

    def output(self, x: Any) -> torch.Tensor:
        """Inference; the same on every rank."""
        out: torch.Tensor = self.pipe(self.own(x)[0])
        everywhere = self.crew.exchange("outputs", out.tolist())
        assert all(each == everywhere[0] for each in everywhere), "outputs differ between ranks"
        assert not out.requires_grad
        assert self.pipe.stage.num_kept == 0
        return out

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
    loss: Loss = F.cross_entropy,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    clip_norm: float | None = None,
    **options: Any,
) -> list[float]:
    """The plain loop; the losses."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optim = optimizer(trainable, **(options or SGD))
    losses = []
    for x, y in batches:

        def evaluate(x: Any = x, y: Any = y) -> torch.Tensor:
            optim.zero_grad()
            value = loss(model(*x) if isinstance(x, tuple) else model(x), y)
            value.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            return value

        losses.append(optim.step(evaluate).item())
    return losses


def same(state: State, alone: nn.Module) -> None:
    """Bit by bit, and a plain model loads it. On rank 0: elsewhere there is no state."""
    if not state:
        return
    expected = alone.state_dict()
    assert list(state) == list(expected), f"names: {list(state)} for {list(expected)}"
    empty = [name for name, value in state.items() if value.is_meta]
    assert not empty, f"on the meta device still: {empty}"
    wrong = [
        f"{name} by {(value.double() - state[name].double()).abs().max():.2e}"
        for name, value in expected.items()
        if not torch.equal(value, state[name])
    ]
    assert not wrong, f"differ: {', '.join(wrong)}"
    alone.load_state_dict(state, strict=True)


def close(state: State, alone: nn.Module) -> None:
    """But for the order of summation, in double precision."""
    if not state:
        return
    expected = alone.state_dict()
    assert list(state) == list(expected), f"names: {list(state)} for {list(expected)}"
    for name, value in expected.items():
        assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-11), (
            f"{name} by {(state[name] - value).abs().max():.2e}"
        )


def close_losses(actual: list[float], expected: list[float]) -> None:
    assert len(actual) == len(expected)
    for step, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert abs(a - b) <= 1e-9 * abs(b), f"loss of step {step}: {a} for {b}"


def fan_out(seed: int = SEED) -> FanOut:
    torch.manual_seed(seed)
    return FanOut()


def train_both(
    crew: shoal.JoinedCrew, model: nn.Module, batches: list[Batch], **options: Any
) -> Together:
    """FanOut, bit by bit, with the same options on both sides."""
    alone = copy.deepcopy(model)
    together = Together(crew, model, FAN_OUT_CUTS, schedule="sequential", **options)
    state = together.run(batches)
    if crew.rank == 0:
        losses = train_alone(alone, batches, **options)
        same(state, alone)
        assert together.losses == losses
    return together


# -- bit by bit: one micro-batch -------------------------------------------------------------------


@functools.cache
def alone_on(name: str) -> tuple[nn.Module, list[float]]:
    """A job in one process. Once per run: every schedule and transport must give the same."""
    job = JOBS[name]
    model = job.module(SEED)
    return model, train_alone(model, job.batches(), job.loss, **{**SGD, "lr": job.lr})


def exact(crew: shoal.JoinedCrew, name: str, schedule: str, transport: str) -> None:
    job = JOBS[name]
    together = Together(
        crew,
        job.module(SEED + crew.rank),  # rank 0's must win
        job.cuts,
        transport=transport,
        loss=job.loss,
        lr=job.lr,
        schedule=schedule,
        microbatches=1,
    )
    state = together.run(job.batches())
    if crew.rank == 0:
        alone, losses = alone_on(name)
        same(state, alone)
        assert together.losses == losses


def case_exact_with_wide_layers(crew: shoal.JoinedCrew) -> None:
    """Products of few and long rows round as their operands lie, and ZeroMQ does not put what comes
    where torch would."""
    width = 20_000
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 7), nn.Linear(7, 7))
    alone = copy.deepcopy(model)
    batches = [(torch.randn(rows, 8), torch.randint(0, 7, (rows,))) for rows in (1, 2, 3, 5) * 3]
    cuts = {2: ["2"], 3: ["2", "3"], 4: ["1", "2", "3"]}
    together = Together(crew, model, cuts, schedule="sequential")
    state = together.run(batches)
    if crew.rank == 0:
        losses = train_alone(alone, batches)
        same(state, alone)
        assert together.losses == losses


# -- to float tolerance: many micro-batches --------------------------------------------------------


def micro(
    crew: shoal.JoinedCrew, schedule: str, microbatches: int, reduction: str, transport: str
) -> None:
    loss = functools.partial(F.cross_entropy, reduction=reduction)
    lr = 0.1 if reduction == "mean" else 0.01
    batches = batches_of_rows(ODD_SIZES, torch.float64)
    together = Together(
        crew,
        fan_out(SEED + crew.rank).double(),
        FAN_OUT_CUTS,
        transport=transport,
        schedule=schedule,
        microbatches=microbatches,
        reduction=reduction,
        loss=loss,
        lr=lr,
    )
    state = together.run(batches)
    if crew.rank == 0:
        alone = fan_out().double()
        losses = train_alone(alone, batches, loss, **{**SGD, "lr": lr})
        close(state, alone)
        close_losses(together.losses, losses)


def micro_job(crew: shoal.JoinedCrew, name: str) -> None:
    """Masks, several outputs, skips of a list: each micro-batch with its own."""
    job = JOBS[name]
    batches = [(_double(x), _double(y)) for x, y in job.batches()]
    together = Together(
        crew,
        job.module(SEED).double(),
        job.cuts,
        loss=job.loss,
        lr=job.lr,
        schedule="1f1b",
        microbatches=3,
    )
    state = together.run(batches)
    if crew.rank == 0:
        alone = job.module(SEED).double()
        losses = train_alone(alone, batches, job.loss, **{**SGD, "lr": job.lr})
        close(state, alone)
        close_losses(together.losses, losses)


def _double(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_double(each) for each in value)
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def case_more_micro_batches_with_clipping(crew: shoal.JoinedCrew) -> None:
    batches = batches_of_rows(ODD_SIZES, torch.float64)
    model = fan_out().double()
    together = Together(crew, model, FAN_OUT_CUTS, microbatches=4, clip_norm=0.2)
    alone = fan_out().double()
    state = together.run(batches)
    train_alone(alone, batches, clip_norm=0.2, **SGD)
    close(state, alone)


def case_micro_batches_with_padding(crew: shoal.JoinedCrew) -> None:
    """Of which one has nothing else: each counted by its samples, and that one made all nan."""
    batches = batches_of_rows([9] * STEPS, torch.float64)
    for _, y in batches:
        y[3:6] = -100
        y[8] = -100
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64))
    model, alone = fan_out().double(), fan_out().double()
    state = Together(crew, model, FAN_OUT_CUTS, microbatches=3, loss=loss).run(batches)
    train_alone(alone, batches, loss, **SGD)
    close(state, alone)


# -- optimizers, schedulers, clipping, accumulation ------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "Adagrad": {"lr": 0.05},
}


def optimizer_of_torch(crew: shoal.JoinedCrew, name: str) -> None:
    options = {"optimizer": getattr(torch.optim, name), **OPTIMIZERS[name]}
    together = train_both(crew, fan_out(), batches_of_rows([8] * STEPS), **options)
    own = {id(p) for p in together.pipe.module.parameters()}
    with_state = {id(p) for p in together.pipe.optimizer.state}
    assert with_state == own, "optimizer state for this stage's parameters, and for no others"


LBFGS: dict[str, Any] = {
    "optimizer": torch.optim.LBFGS, "lr": 0.3, "max_iter": 5, "history_size": 3
}  # fmt: skip


def lbfgs(crew: shoal.JoinedCrew, **options: Any) -> None:
    """Its sums over all parameters are put together from those of the stages.

    One batch again and again, which is what it is for: with others it blows up every rounding.
    """
    batches = batches_of_rows([31], torch.float64) * 5
    together = Together(
        crew,
        fan_out(SEED + crew.rank).double(),
        FAN_OUT_CUTS,
        microbatches=3,
        **{**LBFGS, **options},
    )
    state = together.run(batches)
    evaluations = [each["func_evals"] for each in together.pipe.optimizer.state.values()]
    assert len(evaluations) == 1
    assert evaluations[0] > 2 * len(batches), "the case shows nothing"
    assert not any(p.grad is not None for p in together.pipe.parameters())
    own = {key: value for key, value in options.items() if key not in ("transport", "schedule")}
    alone = fan_out().double()
    losses = train_alone(alone, batches, **{**LBFGS, **own})
    close(state, alone)
    close_losses(together.losses, losses)


def case_lbfgs(crew: shoal.JoinedCrew) -> None:
    lbfgs(crew)


def case_lbfgs_that_searches_lines(crew: shoal.JoinedCrew) -> None:
    lbfgs(crew, lr=1.0, line_search_fn="strong_wolfe", schedule="gpipe", transport="dist")


def case_lbfgs_that_is_clipped(crew: shoal.JoinedCrew) -> None:
    lbfgs(crew, lr=0.03, clip_norm=1.0, schedule="sequential")


def case_clipping(crew: shoal.JoinedCrew) -> None:
    """By the norm over all stages: some steps are scaled down, some are not."""
    norms = []
    batches = batches_of_rows([8] * STEPS)
    real = Whole.clip

    def noted(whole: Whole, module: nn.Module, max_norm: float) -> torch.Tensor:
        norm = real(whole, module, max_norm)
        norms.append(norm.item())
        return norm

    Whole.clip = noted  # type: ignore[method-assign]
    try:
        train_both(crew, fan_out(), batches, clip_norm=0.8, **SGD)
    finally:
        Whole.clip = real  # type: ignore[method-assign]
    assert min(norms) < 0.8 < max(norms), f"the case shows nothing: {norms}"


SCHEDULERS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 5, "gamma": 0.5},
    "OneCycleLR": {"max_lr": 0.3, "total_steps": STEPS + 1},  # goes through the momentum too
}


def learning_rates(crew: shoal.JoinedCrew, kind: str) -> None:
    """A scheduler on every rank, around pipe.optimizer."""
    make = functools.partial(getattr(torch.optim.lr_scheduler, kind), **SCHEDULERS[kind])
    together = Together(crew, fan_out(), FAN_OUT_CUTS, schedule="sequential")
    scheduler = make(together.pipe.optimizer)
    alone = fan_out()
    optimizer = torch.optim.SGD(alone.parameters(), **SGD)
    scheduler_alone = make(optimizer)
    for x, y in batches_of_rows([8] * STEPS):
        together.step(x, y)
        scheduler.step()
        optimizer.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
        scheduler_alone.step()
    same(together.finish(), alone)


def case_accumulation(crew: shoal.JoinedCrew) -> None:
    """Two batches make one update."""
    together = Together(crew, fan_out(), FAN_OUT_CUTS, schedule="sequential", clip_norm=1.0)
    alone = fan_out()
    optimizer = torch.optim.SGD(alone.parameters(), **SGD)
    batches = batches_of_rows([8, 5] * STEPS)
    for pair in zip(batches[::2], batches[1::2], strict=True):
        for x, y in pair:
            together.pipe.backward(*together.own(x, y), weight=0.5)
            (F.cross_entropy(alone(x), y) * 0.5).backward()
        together.pipe.update()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.grad is None for p in together.pipe.parameters())
    same(together.finish(), alone)


def case_accumulation_of_micro_batches(crew: shoal.JoinedCrew) -> None:
    together = Together(crew, fan_out().double(), FAN_OUT_CUTS, microbatches=3)
    alone = fan_out().double()
    optimizer = torch.optim.SGD(alone.parameters(), **SGD)
    batches = batches_of_rows([8, 5] * 5, torch.float64)
    for pair in zip(batches[::2], batches[1::2], strict=True):
        for weight, (x, y) in zip((0.25, 0.75), pair, strict=True):
            together.pipe.backward(*together.own(x, y), weight=weight)
            (F.cross_entropy(alone(x), y) * weight).backward()
        together.pipe.update()
        optimizer.step()
        optimizer.zero_grad()
    close(together.finish(), alone)


# -- modes, frozen and unused parameters, inference ------------------------------------------------


def oddities(dropout: float) -> Oddities:
    torch.manual_seed(SEED)
    return Oddities(dropout)


def odd_parameters(crew: shoal.JoinedCrew, **options: Any) -> None:
    """Frozen ones, unused ones, and stages that have none at all."""
    batches = batches_of_rows([8] * STEPS)
    together = Together(
        crew, oddities(0.0), ODDITIES_CUTS, schedule="1f1b", microbatches=1, **options
    )
    state = together.run(batches)
    counts = crew.exchange("sizes", len(list(together.pipe.parameters())))
    assert crew.size == 2 or 0 in counts, f"a stage without parameters was meant: {counts}"
    alone = oddities(0.0)
    train_alone(alone, batches, **options)
    same(state, alone)


def case_odd_parameters_with_adam(crew: shoal.JoinedCrew) -> None:
    odd_parameters(crew, optimizer=torch.optim.Adam, lr=0.01)


def case_odd_parameters_with_lbfgs(crew: shoal.JoinedCrew) -> None:
    batches = batches_of_rows([8], torch.float64) * 5
    options = {**LBFGS, "lr": 1.0, "line_search_fn": "strong_wolfe"}
    model = oddities(0.0).double()
    state = Together(crew, model, ODDITIES_CUTS, microbatches=1, **options).run(batches)
    alone = oddities(0.0).double()
    train_alone(alone, batches, **options)
    close(state, alone)


def case_odd_parameters_clipped(crew: shoal.JoinedCrew) -> None:
    odd_parameters(crew, clip_norm=0.1, **SGD)


def case_train_and_eval(crew: shoal.JoinedCrew) -> None:
    """Batch norm's numbers move in train() only; dropout that asks self.training follows too."""
    together = Together(crew, oddities(0.0), ODDITIES_CUTS, schedule="sequential")
    alone = oddities(0.0)
    optimizer = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], **SGD)
    for step, (x, y) in enumerate(batches_of_rows([8] * STEPS)):
        if step % 5 == 0:
            together.pipe.train(step % 10 == 0)
            alone.train(step % 10 == 0)
        together.step(x, y)
        optimizer.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
    same(together.finish(), alone)
    assert alone.norm.num_batches_tracked == STEPS // 2


def modes_as_they_came(crew: shoal.JoinedCrew, schedule: str) -> None:
    """A frozen batch norm, as for fine-tuning; then a model that is given in eval()."""
    for asleep in ("norm", ""):
        model, alone = oddities(0.4), oddities(0.4)
        model.dropout = alone.dropout = 0.0 if asleep else 0.4
        for each in (model, alone):
            each.get_submodule(asleep).eval()
        batches = batches_of_rows([8] * 5)
        together = Together(crew, model, ODDITIES_CUTS, schedule=schedule, microbatches=1)
        state = together.run(batches)
        train_alone(alone, batches)
        same(state, alone)
        assert alone.norm.num_batches_tracked == 0


def case_a_part_that_is_put_into_eval_before_there_is_a_stage(crew: shoal.JoinedCrew) -> None:
    """After pipe.train(), as scripts for fine-tuning do with each epoch."""
    model, alone = oddities(0.0), oddities(0.0)
    together = Together(crew, model, schedule="sequential")
    together.pipe.train()
    for each in (model, alone):
        each.norm.eval()
    batches = batches_of_rows([8] * 5)
    state = together.run(batches)
    train_alone(alone, batches)
    same(state, alone)
    assert alone.norm.num_batches_tracked == 0


def case_evaluating_by_the_crew(crew: shoal.JoinedCrew) -> None:
    """Also before the first step, when there are no stages yet."""
    alone = oddities(0.5).eval()
    together = Together(crew, oddities(0.5), schedule="1f1b", microbatches=2)
    ((x, y),) = batches_of_rows([11])
    with torch.no_grad():
        expected = F.cross_entropy(alone(x), y)
    for was_training in (True, False):
        together.pipe.train(was_training)
        rows = TensorDataset(x, y)
        found = crew.evaluate(together.pipe, rows, batch_size=4, loss=F.cross_entropy)
        torch.testing.assert_close(torch.tensor(found.loss), expected, check_dtype=False)
        assert found.samples == 11
        assert together.pipe.training == was_training


def case_an_evaluation_whose_loss_fails(crew: shoal.JoinedCrew) -> None:
    """It is made on the last rank only, and all are told at once."""
    together = Together(crew, oddities(0.0), ODDITIES_CUTS, schedule="sequential")
    ((x, y),) = batches_of_rows([11])
    rows = TensorDataset(x, y)
    refused(crew, ["a mistake"], lambda: crew.evaluate(together.pipe, rows, 4, mistaken))
    together.step(x, y)


def mistaken(output: Any, target: Any) -> torch.Tensor:
    raise shoal.ShoalError("a mistake")


def case_what_a_script_draws_is_the_same_on_all_stages(crew: shoal.JoinedCrew) -> None:
    """Whatever seed it had: a plain DataLoader shuffles alike on the ranks of x and of y."""
    model = oddities(0.5)
    seed_all(SEED)
    expected = drawn()
    seed_all(SEED + crew.rank)
    together = Together(crew, model, ODDITIES_CUTS, schedule="1f1b", microbatches=2)
    assert drawn() == expected
    together.run(batches_of_rows([8] * 2))
    told = crew.exchange("drawn", drawn())
    assert all(each == told[0] for each in told)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def drawn() -> list[Any]:
    order = [int(i) for (i,) in DataLoader(TensorDataset(torch.arange(20)), shuffle=True)]
    return [*order, *random.sample(range(50), 9), *numpy.random.permutation(9).tolist()]


def case_another_target_on_the_first_rank_is_told(crew: shoal.JoinedCrew) -> None:
    """Once. What is None there says nothing."""
    together = Together(crew, oddities(0.0), ODDITIES_CUTS, schedule="1f1b", microbatches=2)
    batches = batches_of_rows([8] * 4)
    with logged() as lines:
        for x, y in batches[:2]:
            together.pipe.step(x, y)
            together.step(x, y)
        together.pipe.step(x, None if crew.rank == 0 else y)
        assert not lines
        for x, y in batches[2:]:
            together.pipe.step(x, y.flip(0) if crew.rank == 0 else y)
    assert len(lines) == (crew.rank == crew.size - 1)
    assert all("is not that of rank" in line for line in lines)


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the package has to say meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shoal").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("shoal").removeHandler(handler)


def case_what_is_random_and_not_in_the_state_is_rank_0s(crew: shoal.JoinedCrew) -> None:
    """As its weights are, where ranks have other seeds."""
    batches = batches_of_rows([8] * 5)
    torch.manual_seed(SEED + crew.rank)
    cuts = {2: ["sin"], 4: ["sin", "add", "last"]}
    state = Together(crew, Features(), cuts, schedule="sequential").run(batches)
    torch.manual_seed(SEED)
    alone = Features()
    train_alone(alone, batches)
    same(state, alone)


def case_parameters_that_are_freed_later(crew: shoal.JoinedCrew) -> None:
    """As in gradual unfreezing: the optimizer has had them from the beginning."""
    together = Together(crew, oddities(0.0), ODDITIES_CUTS, schedule="sequential")
    alone = oddities(0.0)
    optimizer = torch.optim.SGD(alone.parameters(), **SGD)
    for step, (x, y) in enumerate(batches_of_rows([8] * 6)):
        if step == 3:
            for parameter in [*together.pipe.parameters(), *alone.parameters()]:
                parameter.requires_grad_()
        together.step(x, y)
        optimizer.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
    assert alone.frozen.weight.grad is not None
    same(together.finish(), alone)


def case_dropout_draws_other_numbers_on_other_ranks(crew: shoal.JoinedCrew) -> None:
    """And none of the script's, which stay the same on all: a DataLoader may shuffle by them."""
    halves = [nn.Dropout(0.5) for _ in range(crew.size)]
    cuts = {crew.size: [str(number) for number in range(1, crew.size)]}
    torch.manual_seed(SEED)
    together = Together(
        crew, nn.Sequential(*halves), cuts, optimizer=None, loss=lambda out, _: out.sum()
    )
    left = (together.output(torch.ones(1000, 4)) != 0).double().mean().item()
    assert abs(left - 0.5**crew.size) < 0.04, f"{left:.3f} of all is left by {crew.size} halvings"
    drawn = crew.exchange("chance", torch.rand(3).tolist())
    assert all(each == drawn[0] for each in drawn), "the script's numbers differ between ranks"
    torch.manual_seed(SEED)
    assert drawn[0] == torch.rand(3).tolist(), "the model has drawn from the script's numbers"


def case_muon(crew: shoal.JoinedCrew) -> None:
    """Which takes matrices only; also in stages that have none."""

    def model() -> nn.Module:
        torch.manual_seed(SEED)
        layers = [nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False), nn.Tanh()]
        return nn.Sequential(*layers)

    cuts = {2: ["2"], 4: ["1", "2", "3"]}
    options: dict[str, Any] = {"optimizer": torch.optim.Muon, "lr": 0.01}
    together = Together(crew, model(), cuts, schedule="sequential", **options)
    batches = batches_of_rows([8] * 5)
    alone = model()
    state = together.run(batches)
    train_alone(alone, batches, **options)
    same(state, alone)


def case_dropout_is_off_in_eval(crew: shoal.JoinedCrew) -> None:
    together = Together(crew, oddities(0.4), ODDITIES_CUTS, microbatches=2)
    alone = oddities(0.4).eval()
    x, _ = rows(9, 0)
    with torch.no_grad():
        expected = alone(x)
    together.pipe.eval()
    assert torch.allclose(together.output(x), expected, rtol=1e-5)
    together.pipe.train()
    first = together.output(x)
    assert not torch.equal(first, together.output(x)), "dropout is for train()"
    together.pipe.eval()
    assert (
        together.pipe.state_dict().keys() == (alone.state_dict() if crew.rank == 0 else {}).keys()
    )


def case_inference(crew: shoal.JoinedCrew) -> None:
    for options in ({"schedule": "sequential"}, {"schedule": "gpipe", "microbatches": 4}):
        together = Together(crew, fan_out().double(), FAN_OUT_CUTS, **options)
        alone = fan_out().double()
        kept = counted(together.pipe)
        for size in (13, 8, 3, 1):
            x, _ = rows(size, 0, torch.float64)
            out = together.output(x)
            with torch.no_grad():
                expected = alone(x)
            if len(options) == 1:
                assert torch.equal(out, expected)
            assert torch.allclose(out, expected, rtol=1e-12, atol=0)
        assert set(kept) == {(0, 0)}, f"kept after inference: {kept}"


def case_inference_of_trees(crew: shoal.JoinedCrew) -> None:
    """Tuples and dicts are put together again from the micro-batches; inputs come by name too."""
    for name in ("tuple_out", "dict_out", "masks"):
        job = JOBS[name]
        x, _ = job.batches()[0]
        together = Together(crew, job.module(SEED), job.cuts, loss=job.loss, microbatches=3)
        given = dict(zip(("x", "counts", "kind"), x, strict=True)) if name == "masks" else x
        out = together.pipe(together.own(given)[0])
        alone = job.module(SEED)
        expected = alone(*x) if name == "masks" else alone(x)
        torch.testing.assert_close(out, expected)
        together.pipe.state_dict()


def case_training_after_inference(crew: shoal.JoinedCrew) -> None:
    together = Together(crew, fan_out(), FAN_OUT_CUTS, schedule="gpipe", microbatches=1)
    batches = batches_of_rows([8] * 6)
    for x, y in batches:
        together.output(x)
        together.step(x, y)
    alone = fan_out()
    train_alone(alone, batches)
    same(together.finish(), alone)


# -- states ----------------------------------------------------------------------------------------


def case_state_round_trip(crew: shoal.JoinedCrew) -> None:
    """What was trained is loaded elsewhere, cut in another place, and training goes on."""
    torch.manual_seed(7)
    trained = Oddities(0.0)
    train_alone(trained, batches_of_rows([8] * 3))
    together = Together(crew, oddities(0.0), ODDITIES_CUTS, schedule="sequential")
    together.pipe.load_state_dict(trained.state_dict() if crew.rank == 0 else None)
    loaded = together.pipe.state_dict()
    batches = batches_of_rows([8] * 5)
    state = together.run(batches)
    same(loaded, trained)  # it is a copy, which the steps since have not changed
    train_alone(trained, batches)
    same(state, trained)


def automatic_cuts(crew: shoal.JoinedCrew, way: str) -> None:
    """Wherever the profile cuts, and whatever it did to find out, training is the same."""
    batches = batches_of_rows([8] * 5)
    x, _ = batches[0]
    example = {"example": x} if way == "an example" else {}
    together = Together(crew, fan_out(), schedule="sequential", **example)
    if way == "prepare()":
        together.pipe.prepare(together.own(x)[0])
    state = together.run(batches)
    units = crew.exchange("units", together.pipe.units)
    assert all(each == units[0] for each in units)
    assert len(units[0]) == crew.size
    assert all(units[0])
    alone = fan_out()
    train_alone(alone, batches)
    same(state, alone)


# -- memory ----------------------------------------------------------------------------------------


class _Saved:
    """Stands for a tensor that autograd saved; it lives as long as autograd needs it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # an output with its history would keep itself alive


def counted(pipe: JoinedPipeline) -> list[tuple[int, int]]:
    """From now on, after every forward: micro-batches kept, and tensors that autograd holds."""
    seen: list[tuple[int, int]] = []
    alive: weakref.WeakSet[_Saved] = weakref.WeakSet()
    real = pipe.stage.forward

    def pack(tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        alive.add(saved)
        return saved

    def forward(*args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            made = real(*args)
        seen.append((pipe.stage.num_kept, len(alive)))
        return made

    pipe.stage.forward = forward  # type: ignore[assignment,method-assign]
    return seen


class _Living(TorchDispatchMode):
    """Bytes of memory that was first seen here and still is: whoever holds it, and be it autograd.

    By weak references to the memory itself: most of it is known to no Python object.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        own = (*module.parameters(), *module.buffers())
        self._others = {t.untyped_storage()._cdata for t in own}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tensors_of(made).values():
            memory = tensor.untyped_storage()
            if memory._cdata not in self._others and memory._cdata not in self._seen:
                self._seen[memory._cdata] = StorageWeakRef(memory), memory.nbytes()
        return made

    def num_bytes(self) -> int:
        self._seen = {at: each for at, each in self._seen.items() if not each[0].expired()}
        return sum(num_bytes for _, num_bytes in self._seen.values())


def living(pipe: JoinedPipeline) -> list[int]:
    """From now on, after all that the stage does: bytes of what its forwards have made or got."""
    seen: list[int] = []
    stage, mode = pipe.stage, _Living(pipe.module)

    def counting(real: Callable[..., Any], is_forward: bool) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with mode if is_forward else nullcontext():
                result = real(*args)
            seen.append(mode.num_bytes())
            return result

        return call

    for name in ("forward", "backward", "backward_weights"):
        setattr(stage, name, counting(getattr(stage, name), name == "forward"))
    return seen


def case_activations_in_bytes(crew: shoal.JoinedCrew) -> None:
    """Whatever is put off: never more than what `stages` micro-batches need, none at the end."""
    together = Together(crew, fan_out(), FAN_OUT_CUTS, schedule="1f1b", microbatches=7)
    seen = living(together.pipe)
    together.run(batches_of_rows([14] * 3))
    assert max(seen) <= crew.size * seen[0], f"{crew.size} stages: {seen}"
    assert seen[-1] == 0, f"kept after a step: {seen}"


def case_memory_is_within_the_estimate(crew: shoal.JoinedCrew) -> None:
    """Layers of which each keeps what came, and, where it is put off, the gradient that came."""
    width, rows_of_each, num_layers = 128, 8192, 8
    bounds = [num_layers * stage // crew.size for stage in range(crew.size + 1)]
    torch.manual_seed(SEED)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))
    x = torch.randn(rows_of_each, width)
    graph = read(copy.deepcopy(model))
    for schedule, num_kept in (("1f1b", crew.size), ("gpipe", 4)):
        cuts = {crew.size: [str(bound) for bound in bounds[1:-1]]}
        net = copy.deepcopy(model)
        together = Together(
            crew, net, cuts, schedule=schedule, microbatches=4, loss=F.mse_loss, **SGD
        )
        together.step(x, x)  # which opens connections, and the like
        mine = bounds[together.pipe.stage_number : together.pipe.stage_number + 2]
        largest = max(part.size for part in together.pipe._batches.parts(rows_of_each))
        units, values = profile(graph, {graph.inputs[0]: x[:largest]})
        costs = Costs(num_kept=num_kept, bytes_per_parameter_byte=3)
        limit = stage_bytes(units, values, *mine, costs)
        with most_in_use() as most:
            together.step(x, x)
            together.step(x, x)
        assert limit / 4 < max(most) - most[0] < limit, f"{max(most) - most[0]} for {limit}"


@contextmanager
def most_in_use() -> Iterator[list[int]]:
    """Bytes that the C library has given away, looked at again and again meanwhile."""
    told = ("arena", "ordblks", "smblks", "hblks", "mapped", "usmblks", "fsmblks", "used")

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in (*told, "free", "top")]

    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Info
    is_over = threading.Event()
    seen: list[int] = []

    def look() -> None:
        info = mallinfo()
        seen.append(info.used + info.mapped)

    def watch() -> None:
        while not is_over.wait(0.0005):
            look()

    gc.collect()
    look()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        is_over.set()
        watcher.join()


def activations_kept(crew: shoal.JoinedCrew, schedule: str) -> None:
    """1f1b: micro-batches of as many stages as are from here on, or, where weight gradients are put
    off, as there are at all; gpipe: all."""
    microbatches = 7
    model = fan_out().double()
    together = Together(crew, model, FAN_OUT_CUTS, schedule=schedule, microbatches=microbatches)
    batches = batches_of_rows([14] * 3, torch.float64)
    seen = counted(together.pipe)
    together.run(batches)
    most = max(kept for kept, _ in seen)
    stages_from_here = crew.size - together.pipe.stage_number
    if schedule == "1f1b":
        assert stages_from_here <= most <= crew.size, seen
    else:
        assert most == microbatches, seen
    of_one = seen[0][1]
    assert of_one > 0
    for kept, alive in seen:
        assert 0 < alive <= kept * of_one, f"autograd holds more than is kept: {seen}"


def case_each_rank_holds_its_own_stage(crew: shoal.JoinedCrew) -> None:
    """Also after a whole model was given: what belongs to other stages can go."""
    model = fan_out()
    whole = {name: weakref.ref(p) for name, p in model.named_parameters()}
    together = Together(
        crew, model, FAN_OUT_CUTS, schedule="1f1b", optimizer=torch.optim.Adam, lr=0.01
    )
    del model
    together.run(batches_of_rows([8] * 2))
    gc.collect()
    own = {name for name, _ in together.pipe.module.named_parameters()}
    alive = {name for name, ref in whole.items() if ref() is not None}
    assert alive == own, f"rank {crew.rank} holds {alive - own} too"
    check_parts(crew, together.pipe, set(whole))
    state = together.pipe.optimizer.state
    assert {id(p) for p in state} == {id(p) for p in together.pipe.module.parameters()}


def case_a_pipeline_that_nobody_holds_is_freed(crew: shoal.JoinedCrew) -> None:
    """The crew held every pipeline until its own end."""
    together = Together(crew, fan_out(), FAN_OUT_CUTS, optimizer=torch.optim.Adam, lr=0.01)
    together.run(batches_of_rows([8] * 2))
    held = [weakref.ref(p) for p in together.pipe.module.parameters()]
    del together
    gc.collect()
    assert not any(ref() is not None for ref in held)


def num_open() -> int:
    """Descriptors."""
    return len(list(Path("/proc/self/fd").iterdir()))


def case_links_of_pipelines_that_nobody_holds_are_closed(crew: shoal.JoinedCrew) -> None:
    """They stayed open until the crew ended: descriptors and threads, at last too many."""

    def step_once(transport: str) -> None:
        pipe = crew.pipeline(
            fan_out(),
            cuts=FAN_OUT_CUTS[crew.size],
            transport=transport,
            loss=F.cross_entropy,
            optimizer=torch.optim.SGD,
            lr=0.1,
        )
        (x, y), *_ = batches_of_rows([8])
        pipe.step(x, y)
        del pipe
        gc.collect()

    more = {}
    for transport in ("zmq", "dist"):
        for _ in range(3):  # some are opened once for all
            step_once(transport)
        before = num_open()
        for _ in range(4):
            step_once(transport)
        more[transport] = num_open() - before
    assert max(more.values()) < 15, more  # links of four pipelines have some 80


def case_hooks_for_saved_tensors_let_go_of_them(crew: shoal.JoinedCrew) -> None:
    """What was kept for weight gradients that come last was never let go of under such hooks."""
    together = Together(crew, fan_out(), FAN_OUT_CUTS, microbatches=2)
    held: list[weakref.ref[Any]] = []

    class Packed:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor.detach()
            held.append(weakref.ref(self))

    with torch.autograd.graph.saved_tensors_hooks(Packed, lambda packed: packed.tensor):
        for x, y in batches_of_rows([8] * 2):
            together.step(x, y)
    gc.collect()
    assert held
    assert not any(ref() is not None for ref in held)


def check_parts(crew: shoal.JoinedCrew, pipe: JoinedPipeline, names: set[str]) -> None:
    """Every parameter in one stage."""
    parts = crew.exchange("names", [name for name, _ in pipe.module.named_parameters()])
    assert sorted(name for part in parts for name in part) == sorted(names), parts


# -- models that are made where they are needed ----------------------------------------------------


def made_whole(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    model = as_module(factory)
    materialise(model, seed, torch.device("cpu"))
    return model


def from_factory(
    crew: shoal.JoinedCrew,
    factory: Callable[[], nn.Module],
    *all_cuts: list[str],
) -> None:
    """Wherever it is cut, the weights begin the same; training is that of the whole."""
    whole = made_whole(factory, 3)
    names = {name for name, _ in whole.named_parameters()}
    batches = batches_of_rows([8] * STEPS)
    starts = []
    for cuts in all_cuts:
        together = Together(
            crew, factory, {crew.size: cuts[: crew.size - 1]}, schedule="sequential", seed=3
        )
        starts.append({name: t.clone() for name, t in together.pipe.state_dict().items()})
        check_parts(crew, together.pipe, names)
        assert not any(t.is_meta for t in together.pipe.module.state_dict().values())
    state = together.run(batches)
    for start in starts:
        same(start, whole)
    train_alone(whole, batches)
    same(state, whole)


def case_factory(crew: shoal.JoinedCrew) -> None:
    from_factory(crew, sequential, ["1", "3", "5"], ["2", "4", "5"])


def case_factory_with_unused_parameters(crew: shoal.JoinedCrew) -> None:
    together = Together(crew, Unused, {n: ["b", "c", "d"][: n - 1] for n in (2, 3, 4)}, seed=3)
    state = together.pipe.state_dict()
    same(state, made_whole(Unused, 3))


def case_factory_with_tied_weights(crew: shoal.JoinedCrew) -> None:
    """One weight under two names is still one after it was made."""
    names = [name for name, _ in made_whole(Tied, 3).named_parameters()]
    from_factory(crew, Tied, JOBS["tied"].cuts[crew.size])
    assert "back.weight" not in names, "the weight that was one is two"


def case_factory_with_automatic_cuts(crew: shoal.JoinedCrew) -> None:
    batches = batches_of_rows([8] * 5)
    whole = made_whole(sequential, 0)
    state = Together(crew, sequential, schedule="sequential").run(batches)
    train_alone(whole, batches)
    same(state, whole)


class Unused(PairOut):
    """`never` is in no step."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(2, 2)


def case_factory_with_a_module_of_the_users_own(crew: shoal.JoinedCrew) -> None:
    """Traced through, so that its stage has its parameter but not its class."""
    from_factory(crew, OwnParameters, ["scaled", "tanh", "b"])


def case_in_place_on_a_view(crew: shoal.JoinedCrew) -> None:
    """A view of what has just come is changed: its memory is that of a leaf of autograd's."""
    job = IN_PLACE_ON_A_VIEW
    together = Together(crew, job.module(SEED), job.cuts, schedule="sequential")
    state = together.run(job.batches())
    alone = job.module(SEED)
    train_alone(alone, job.batches())
    same(state, alone)


# -- replicas of pipelines -------------------------------------------------------------------------

NUM_SAMPLES, BATCH = 29, 7  # 29 = 4 × 7 + 1: in the last batch the second replica has no sample


def rows_set() -> TensorDataset:
    return TensorDataset(*rows(NUM_SAMPLES, 0, torch.float64))


def global_batches(data: TensorDataset, epoch: int) -> list[Batch]:
    order = torch.from_numpy(sample_order(len(data), 0, epoch))
    return [(data.tensors[0][part], data.tensors[1][part]) for part in order.split(BATCH)]


def replicas(crew: shoal.JoinedCrew, sync: str, **options: Any) -> None:
    """Two of two stages, with shares of the batch that differ, against one process."""
    data = rows_set()
    model = fan_out(SEED + crew.rank).double()
    settings = {"schedule": "1f1b", "microbatches": 3, **options}
    together = Together(crew, model, FAN_OUT_CUTS, stages=2, sync=sync, **settings)
    loader = together.pipe.loader(data, batch_size=BATCH)
    samples = []
    whole: list[Batch] = []
    while len(whole) < STEPS:
        whole += global_batches(data, loader.epoch)
        for x, y in loader:
            samples.append(x.sum().item())
            together.step(x, y)
    seen = crew.exchange("samples", samples)
    assert seen[0] == seen[1], "the stages of a replica were given other samples"
    assert seen[2] == seen[3], "the stages of a replica were given other samples"
    assert seen[0] != seen[2]
    state = together.finish()
    alike = crew.exchange("sums", [p.double().sum().item() for p in together.pipe.parameters()])
    assert alike[0] == alike[2], "replicas drifted apart"
    assert alike[1] == alike[3], "replicas drifted apart"
    if crew.rank == 0:
        alone = fan_out().double()
        also = {name: options[name] for name in ("loss", "clip_norm") if name in options}
        losses = train_alone(alone, whole, **also, **{**SGD, "lr": options.get("lr", SGD["lr"])})
        close(state, alone)
        close_losses(together.losses, losses)


def case_replicas_clip_by_the_norm_of_all(crew: shoal.JoinedCrew) -> None:
    replicas(crew, "all-reduce", clip_norm=0.2)


def case_replicas_of_sums(crew: shoal.JoinedCrew) -> None:
    loss = functools.partial(F.cross_entropy, reduction="sum")
    replicas(crew, "ring", reduction="sum", loss=loss, lr=0.01, schedule="gpipe")


def case_replicas_with_lbfgs(crew: shoal.JoinedCrew) -> None:
    x, y = rows(NUM_SAMPLES, 0, torch.float64)
    alone, model = fan_out().double(), fan_out(SEED + crew.rank).double()
    together = Together(crew, model, FAN_OUT_CUTS, stages=2, microbatches=3, sync="ring", **LBFGS)
    loader = together.pipe.loader(TensorDataset(x, y), batch_size=NUM_SAMPLES, shuffle=False)
    for _ in range(4):
        for batch in loader:
            together.step(*batch)
    losses = train_alone(alone, [(x, y)] * 4, **LBFGS)
    close(together.finish(), alone)
    close_losses(together.losses, losses)


def case_replicas_over_dist(crew: shoal.JoinedCrew) -> None:
    replicas(crew, "serial-ring", transport="dist")


def case_replicas_have_the_buffers_of_the_first(crew: shoal.JoinedCrew) -> None:
    together = Together(crew, oddities(0.0), ODDITIES_CUTS, stages=2, microbatches=2)
    for x, y in together.pipe.loader(TensorDataset(*rows(28, 0)), batch_size=14):
        together.step(x, y)
    buffers = [b.double().sum().item() for b in together.pipe.module.buffers()]
    everywhere = crew.exchange("buffers", buffers)
    assert everywhere[:2] == everywhere[2:]
    assert any(everywhere)
    state = together.finish()
    oddities(0.0).load_state_dict(state or oddities(0.0).state_dict(), strict=True)


def case_replicas_give_back_their_groups(crew: shoal.JoinedCrew) -> None:
    """Closed or let go of: each pipeline kept a group, with 5 descriptors and 3 threads."""

    def step_once(sync: str, *, closes: bool) -> None:
        pipe = crew.pipeline(
            fan_out(),
            stages=2,
            cuts=FAN_OUT_CUTS[2],
            sync=sync,
            loss=F.cross_entropy,
            optimizer=torch.optim.SGD,
            lr=0.1,
        )
        (x, y), *_ = batches_of_rows([8])
        pipe.step(x, y)
        if closes:
            pipe.close()
        del pipe
        gc.collect()

    for sync in ("ring", "ddp"):
        for number in range(3):  # some are opened once for all
            step_once(sync, closes=number % 2 == 0)
        before, threads = num_open(), threading.active_count()
        for number in range(4):
            step_once(sync, closes=number % 2 == 1)
        more = num_open() - before, threading.active_count() - threads
        assert more[0] < 10, f"{sync}: {more}"
        assert more[1] < 2, f"{sync}: {more}"


def case_replicas_accumulate(crew: shoal.JoinedCrew) -> None:
    """Gradients of two global batches of other sizes meet once."""
    data = TensorDataset(*rows(22, 0, torch.float64))
    together = Together(crew, fan_out().double(), FAN_OUT_CUTS, stages=2, microbatches=2)
    alone = fan_out().double()
    optimizer = torch.optim.SGD(alone.parameters(), **SGD)
    loader = together.pipe.loader(data, batch_size=11, shuffle=False)
    for x, y in loader:
        together.pipe.backward(*together.own(x, y), weight=0.5)
    together.pipe.update()
    for part in torch.arange(22).split(11):
        (F.cross_entropy(alone(data.tensors[0][part]), data.tensors[1][part]) * 0.5).backward()
    optimizer.step()
    close(together.finish(), alone)


def table_first() -> nn.Module:
    """Whose gradients are sparse: some rows in each batch, some of them twice."""
    torch.manual_seed(SEED)
    table = nn.Embedding(40, 6, sparse=True)
    layers = [table, nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def batches_of_numbers(count: int) -> list[Batch]:
    drawn = torch.Generator().manual_seed(SEED)
    x = torch.randint(0, 40, (count, 14, 2), generator=drawn)
    return [(each, each.sum(1) % 3) for each in x]


class Tables(torch.optim.SparseAdam):
    """For tables; other parameters go by plain steps."""

    def __init__(self, parameters: Any, lr: float) -> None:
        parameters = list(parameters)
        self.others = [p for p in parameters if p.ndim != 2 or p.shape[0] != 40]
        tables = [p for p in parameters if not any(p is other for other in self.others)]
        super().__init__(tables or [nn.Parameter(torch.zeros(1))], lr)
        self.rate = lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.others:
            parameter.sub_(parameter.grad, alpha=self.rate)
        return loss


def case_clipping_of_sparse_gradients(crew: shoal.JoinedCrew) -> None:
    """Which torch's own clipping does not take."""
    batches = batches_of_numbers(6)
    options = {"optimizer": torch.optim.SGD, "lr": 0.5, "clip_norm": 0.4}
    model = table_first()
    cuts = {2: ["2"], 4: ["1", "2", "4"]}
    together = Together(crew, model, cuts, schedule="sequential", **options)
    alone = table_first()
    alone[0].sparse = False
    train_alone(alone, batches, **options)
    close(together.run(batches), alone)


def case_replicas_with_sparse_gradients(crew: shoal.JoinedCrew) -> None:
    """Each replica has gradients of other rows; what none has, the optimizer must not move."""
    (x, y), *_ = batches_of_numbers(1)
    kinds: list[tuple[str, Callable[..., torch.optim.Optimizer]]] = [
        ("ring", torch.optim.SGD), ("ddp", torch.optim.SGD),
        ("ring", Tables), ("ddp", Tables), ("central", Tables),
    ]  # fmt: skip
    for sync, kind in kinds:
        together = Together(
            crew, table_first(), {2: ["2"]}, stages=2, sync=sync, optimizer=kind, lr=0.1
        )
        alone = table_first()
        optimizer = kind(alone.parameters(), lr=0.1)
        for number in range(4):
            # Other rows at each step: those of steps before are at rest.
            batch = (x + number) % 40, y
            loader = together.pipe.loader(TensorDataset(*batch), batch_size=14, shuffle=False)
            for mine in loader:
                together.step(*mine)
            alone.zero_grad()
            F.cross_entropy(alone(batch[0]), y).backward()
            optimizer.step()
        close(together.finish(), alone)


class Sometimes(nn.Module):
    """Uses its weights for some batches only; kept whole, as it cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.fc(x)) if x.sum() > 0 else x


def case_replicas_without_gradients(crew: shoal.JoinedCrew) -> None:
    """In the first stage one replica has some, and then none has."""
    found = []
    for sync in ("ring", "ddp"):
        torch.manual_seed(SEED)
        model = nn.Sequential(Sometimes(), nn.Linear(4, 3))
        began = copy.deepcopy(model.get_parameter("0.fc.bias"))
        together = Together(crew, model, {2: ["1"]}, stages=2, sync=sync, **SGD)
        replica = crew.rank // 2
        for sign in (1.0 if replica else -1.0, -1.0):
            together.step(torch.full((3, 4), sign), torch.tensor([0, 1, 2]))
        found.append(together.finish())
    if crew.rank == 0:
        assert not torch.equal(found[0]["0.fc.bias"], began), "the case shows nothing"
    torch.testing.assert_close(found[0], found[1])


# -- names, modes and memory -----------------------------------------------------------------------


def rows_and_targets(count: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(SEED)
    shape = (count, pipeline_oddities.WIDTH)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        for _ in range(STEPS)
    ]


def several_names(crew: shoal.JoinedCrew, name: str) -> None:
    """Of one tensor. By the other one it was saved as it had begun."""
    make, cut = pipeline_oddities.NAMES[name]
    torch.manual_seed(SEED)
    model = make()
    alone = copy.deepcopy(model)
    options = {"schedule": "sequential", "loss": F.mse_loss}
    together = Together(crew, model, {2: [cut]}, stages=2, **options)
    batches = rows_and_targets()
    state = together.run(batches)
    train_alone(alone, batches, F.mse_loss)
    same(state, alone)
    together.pipe.load_state_dict({k: torch.zeros_like(v) for k, v in state.items()} or None)
    assert all(not tensor.any() for tensor in together.pipe.state_dict().values())


def case_a_forward_that_checks(crew: shoal.JoinedCrew) -> None:
    """On both sides of the cut."""
    torch.manual_seed(SEED)
    model = pipeline_oddities.Careful()
    alone = copy.deepcopy(model)
    options = {"schedule": "sequential", "loss": F.mse_loss}
    together = Together(crew, model, {2: ["second"]}, stages=2, **options)
    batches = rows_and_targets()
    state = together.run(batches)
    train_alone(alone, batches, F.mse_loss)
    same(state, alone)


def case_a_train_of_the_users_own(crew: shoal.JoinedCrew) -> None:
    torch.manual_seed(SEED)
    model = pipeline_oddities.FrozenNorm()
    alone = copy.deepcopy(model)
    options = {"schedule": "sequential", "loss": F.mse_loss}
    together = Together(crew, model, {2: ["second"]}, stages=2, **options)
    together.pipe.train()
    batches = rows_and_targets()
    state = together.run(batches)
    train_alone(alone.train(), batches, F.mse_loss)
    same(state, alone)


def case_memory_that_a_module_keeps(crew: shoal.JoinedCrew) -> None:
    """It was read where it lay, after the module had changed it for the next micro-batch."""
    batches = rows_and_targets()
    for transport in ("zmq", "dist"):
        torch.manual_seed(SEED)
        model = pipeline_oddities.WithMemory()
        alone = copy.deepcopy(model)
        options = {"schedule": "gpipe", "microbatches": 4, "loss": F.mse_loss}
        cuts = {2: ["second"]}
        state = Together(crew, model, cuts, stages=2, transport=transport, **options).run(batches)
        optimizer = torch.optim.SGD(alone.parameters(), **SGD)
        for x, y in batches:
            optimizer.zero_grad()
            for part in shares(len(x), 4, 2):
                h, kept = alone.memory(alone.first(x[part.start : part.stop]))
                output = alone.second(h) * (1 + kept.mean().clone())
                loss = F.mse_loss(output, y[part.start : part.stop])
                (loss * part.size / part.total).backward()
            optimizer.step()
        close(state, alone)


def case_another_model(crew: shoal.JoinedCrew) -> None:
    """Found by rank 0, told to all; and nothing has been trained."""
    together = Together(
        crew, pipeline_oddities.ByShape(), {2: ["second"]}, stages=2, loss=F.mse_loss
    )
    batch = rows_and_targets()[0]
    words = ["ModelError", "ByShape in stages is not ByShape", "the output differs", "Ways out"]
    refused(crew, words, lambda: together.step(*batch))


def case_a_value_that_the_script_changes(crew: shoal.JoinedCrew) -> None:
    model = pipeline_oddities.Annealed()
    together = Together(crew, model, {2: ["second"]}, stages=2, loss=F.mse_loss)
    batch = rows_and_targets()[0]
    together.step(*batch)
    model.tau = 0.5
    refused(crew, ["tau of the model was 1.0", "is 0.5 now"], lambda: together.step(*batch))


def case_a_failure_that_is_caught(crew: shoal.JoinedCrew) -> None:
    """The others do not wait for a rank that goes on with something else."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target.sum() < 0:
            raise ArithmeticError("targets are not to be negative")
        return F.cross_entropy(output, target)

    pipe = crew.pipeline(net, cuts=["2"], stages=2, loss=loss, optimizer=torch.optim.SGD, lr=0.1)
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    pipe.step(x, y)
    begun = time.monotonic()
    try:
        pipe.step(x, y - 9)
        told = "nothing"
    except (shoal.ShoalError, ArithmeticError) as error:
        told = str(error)
    took = crew.exchange("seconds", [told, time.monotonic() - begun])
    for rank, (text, seconds) in enumerate(took):
        assert "targets are not to be negative" in text, f"rank {rank}: {text}"
        assert seconds < TIMEOUT_S / 2, "it waited for the timeout"


# -- all of them -----------------------------------------------------------------------------------

FULLY = "fan_out"
"""The job that goes through every schedule on every transport; others take turns."""
OF_THREE = ("exact", "micro-batches: 1f1b", "activations", "odd parameters")
"""What three ranks go through; two go through everything."""
NOT_OF_FOUR = (
    "optimizer", "learning rates", "micro-batches: gpipe", "links of pipelines", "several names",
    "a train of", "memory that", "another model", "a value that", "a failure",
)  # fmt: skip
"""What four do not go through; with replicas they have enough to do."""


def _cases() -> dict[str, Case]:
    made: dict[str, Case] = {}
    ways = [(schedule, transport) for schedule in SCHEDULES for transport in ("zmq", "dist")]
    for number, name in enumerate(JOBS):
        turns = ways if name == FULLY else [ways[number % 3 * 2], ways[(number + 1) % 3 * 2 + 1]]
        for schedule, transport in turns:
            made[f"exact: {name}, {schedule} over {transport}"] = functools.partial(
                exact, name=name, schedule=schedule, transport=transport
            )
    for schedule, microbatches, reduction, transport in (
        ("gpipe", 4, "mean", "zmq"),
        ("gpipe", 7, "sum", "dist"),
        ("1f1b", 4, "sum", "zmq"),
        ("1f1b", 7, "mean", "dist"),
    ):
        made[f"micro-batches: {schedule} of {microbatches}, {reduction}"] = functools.partial(
            micro,
            schedule=schedule,
            microbatches=microbatches,
            reduction=reduction,
            transport=transport,
        )
    for name in ("masks", "layers", "tied", "in_place"):
        made[f"micro-batches: {name}"] = functools.partial(micro_job, name=name)
    for name in OPTIMIZERS:
        made[f"optimizer: {name}"] = functools.partial(optimizer_of_torch, name=name)
    for kind in SCHEDULERS:
        made[f"learning rates by {kind}"] = functools.partial(learning_rates, kind=kind)
    for schedule in SCHEDULES:
        made[f"modes as they came: {schedule}"] = functools.partial(
            modes_as_they_came, schedule=schedule
        )
    for name in pipeline_oddities.NAMES:
        made[f"several names: {name}"] = functools.partial(several_names, name=name)
    for way in ("the first batch", "an example", "prepare()"):
        made[f"automatic cuts by {way}"] = functools.partial(automatic_cuts, way=way)
    for schedule in ("gpipe", "1f1b"):
        made[f"activations kept: {schedule}"] = functools.partial(
            activations_kept, schedule=schedule
        )
    made |= {f"refused: {name}": fault for name, fault in FAULTS.items()}
    for name, case in list(globals().items()):
        if name.startswith("case_") and not name.startswith("case_replicas"):
            made[_spoken(name)] = case
    return made


def _hybrids() -> dict[str, Case]:
    made: dict[str, Case] = {
        f"replicas: {sync}": functools.partial(replicas, sync=sync) for sync in SYNCS
    }
    for name, case in list(globals().items()):
        if name.startswith("case_replicas"):
            made[_spoken(name)] = case
    return made | {f"refused: {name}": fault for name, fault in HYBRID_FAULTS.items()}


def _spoken(name: str) -> str:
    return name.removeprefix("case_").replace("_", " ")


CASES = _cases()
HYBRIDS = _hybrids()


def cases_for(num_ranks: int) -> dict[str, Case]:
    if num_ranks == 3:
        return {name: case for name, case in CASES.items() if name.startswith(OF_THREE)}
    if num_ranks == 4:
        return HYBRIDS | {k: case for k, case in CASES.items() if not k.startswith(NOT_OF_FOUR)}
    return CASES


def main(out: Path, only: list[str]) -> None:
    results: dict[str, Any] = {}
    torch.set_num_threads(1)
    crew = shoal.join(timeout_s=TIMEOUT_S)
    try:
        with crew:
            for name, case in cases_for(crew.size).items():
                if only and not any(word in name for word in only):
                    continue
                begun = time.monotonic()
                try:
                    case(crew)
                    results[name] = None
                except AssertionError:
                    results[name] = traceback.format_exc()  # the ranks are in step all the same
                except Exception:
                    results[name] = traceback.format_exc()
                    raise  # this rank is out of step: what follows would only fail because of it
                crew.print(f"{time.monotonic() - begun:6.2f} s  {name}")
            crew.barrier()
            if not only:
                results["told"] = end_badly(crew)
    finally:
        (out / f"rank-{crew.rank}.json").write_text(json.dumps(results))


def end_badly(crew: shoal.JoinedCrew) -> dict[str, Any]:
    begun = time.monotonic()
    told = {"kind": "", "text": "no error"}
    try:
        with crew:
            FATAL[crew.size][1](crew)
    except shoal.ShoalError as error:
        told = {"kind": type(error).__name__, "text": str(error)}
    return {**told, "seconds": time.monotonic() - begun}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
