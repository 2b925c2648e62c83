"""A model on workers, driven by a plain script: what comes out is what one process computes.

Three workers are started once; one boss is shared by most tests, and others come after it.
"""

from __future__ import annotations

import asyncio
import copy
import io
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from boss_workers import Office, rows, works
from pipeline_nets import (
    JOBS,
    ODDITIES_CUTS,
    STEPS,
    Batch,
    FanOut,
    Masked,
    Oddities,
    Tied,
    batches_of_rows,
    sequential,
)
from processes import until
from torch import nn
from typer.testing import CliRunner
from warm import Nursery

import shoal
from shoal.boss.boss import Boss
from shoal.boss.orders import Forward
from shoal.boss.placed import PlacedModel
from shoal.cli.main import app
from shoal.errors import WorkerError
from shoal.pipeline.build import as_module
from shoal.pipeline.meta import materialise
from shoal.train.models import zoo
from shoal.train.models.catalog import MODELS

STAGES = 3
SEED = 100
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ODD_SIZES = [13, 8, 3, 1, 7, 12]
FAN_OUT_CUTS = ["b", "d"]
SEQUENTIAL_CUTS = ["2", "4"]
NOT_HERE = ("mnist_cnn", "conv_net", "residual_mlp", "unseen")
"""The last one has modules that stay whole, of code that these workers do not allow."""
NETS = [name for name in JOBS if name not in NOT_HERE]


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Office]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers, which then add up in the same order
    made = Office(tmp_path_factory.mktemp("office"), nursery=nursery)
    try:
        made.start(STAGES)
        yield made
    finally:
        made.close()
        torch.set_num_threads(threads)


@pytest.fixture
def boss(office: Office) -> Boss:
    return office.boss(STAGES)


def seeded(make: Callable[[], Any]) -> nn.Module:
    torch.manual_seed(SEED)
    return as_module(make())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    loss: Callable[[Any, Any], torch.Tensor] = F.cross_entropy,
    *,
    clip: Callable[[], object] = lambda: None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> list[float]:
    """The loop that everybody knows, whatever kind of model and optimizer it is given."""
    losses = []
    for x, y in batches:
        value = loss(model(*x) if isinstance(x, tuple) else model(x), y)
        optimizer.zero_grad()
        value.backward()
        clip()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(value.item())
    return losses


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def assert_same(model: PlacedModel, plain: nn.Module) -> None:
    """Bit by bit, in names, order and values."""
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def assert_close(model: PlacedModel, plain: nn.Module) -> None:
    torch.testing.assert_close(model.state_dict(), dict(plain.state_dict()), rtol=1e-9, atol=1e-12)


# -- bit by bit: one micro-batch -------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, e in MODELS.items() if e.factory != "TutorialCnn"])
def test_a_model_of_the_zoo_where_the_boss_cuts_it(boss: Boss, name: str) -> None:
    """Choosing the cuts runs parts of the model, which must leave no trace: not in the weights, nor
    in the statistics of batch norm, nor in the numbers that are drawn next."""
    entry = MODELS[name]
    alone = seeded(getattr(zoo, entry.factory))
    assert not any(isinstance(each, nn.Dropout) for each in alone.modules())
    kept = copy.deepcopy(alone)
    model = boss.place(kept)
    batches = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, *entry.input_shape, generator=generator)
        y = torch.rand(4, 1, generator=generator)
        batches.append((x, y if name == "residual-mlp" else torch.randint(0, 10, (4,))))
    loss = F.mse_loss if name == "residual-mlp" else F.cross_entropy
    optimizer = boss.optimizer(torch.optim.SGD, lr=0.02, momentum=0.9)
    drawn_next = torch.get_rng_state()
    losses = train(model, optimizer, batches, loss)
    assert torch.equal(torch.get_rng_state(), drawn_next)
    expected = train(alone, torch.optim.SGD(alone.parameters(), 0.02, 0.9), batches, loss)
    assert losses == expected
    assert_same(model, alone)
    assert [bool(stage.modules) for stage in boss.status().workers] == [True] * STAGES
    kept.load_state_dict(model.state_dict())  # a plain model, which has not been touched till now


@pytest.mark.parametrize("name", NETS)
def test_nets_with_all_that_can_cross_a_cut(boss: Boss, name: str) -> None:
    """Skips, the seed's list, masks, several inputs, tuples, dicts, steps in place, one weight with
    two names."""
    job = JOBS[name]
    alone = job.module(SEED)
    options = {**SGD, "lr": job.lr}
    model = boss.place(job.module(SEED), cuts=job.cuts.get(STAGES))
    losses = train(model, boss.optimizer(torch.optim.SGD, **options), job.batches(), job.loss)
    optimizer = torch.optim.SGD(trainable(alone), **options)
    assert losses == train(alone, optimizer, job.batches(), job.loss)
    assert_same(model, alone)


class Checking(nn.Module):
    """Checks its input, and asks it for its device early and late."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(1) != 6:
            raise ValueError("six columns")
        device, dtype = x.device, x.dtype
        h = torch.tanh(self.a(x + torch.ones(6, device=device)))
        return self.c(torch.tanh(self.b(h)) * torch.full((6,), 2.0, device=device, dtype=dtype))


def test_checks_and_devices(boss: Boss) -> None:
    alone = seeded(Checking)
    model = boss.place(copy.deepcopy(alone), cuts=["b", "c"])
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(7, 6, generator=generator) for _ in range(2 * STEPS)]
    batches = list(zip(rows[::2], rows[1::2], strict=True))
    optimizer = boss.optimizer(torch.optim.SGD, lr=0.1)
    losses = train(model, optimizer, batches, F.mse_loss)
    assert losses == train(alone, torch.optim.SGD(alone.parameters(), 0.1), batches, F.mse_loss)
    assert_same(model, alone)
    with pytest.raises(WorkerError, match=r"Checking\.forward refuses this batch: if x\.size"):
        model(torch.randn(2, 5))


def test_a_list_of_layers_as_it_stands(boss: Boss) -> None:
    """And layers on the boss, before and behind: autograd joins them."""
    torch.manual_seed(SEED)
    model = boss.place(JOBS["layers"].make(), cuts=["2", "5"])
    alone = JOBS["layers"].module(SEED)
    before, behind = nn.Linear(6, 6), nn.Linear(3, 3)
    copies = copy.deepcopy((before, behind))
    for each, (first, last) in ((model, (before, behind)), (alone, copies)):
        F.cross_entropy(last(torch.tanh(each(first(rows())))), torch.arange(4) % 3).backward()
    for mine, theirs in zip((before, behind), copies, strict=True):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert one.grad is not None
            assert torch.equal(one.grad, other.grad)


def test_unused_frozen_and_without_parameters_in_train_and_eval(boss: Boss) -> None:
    """What no step uses is part of the state all the same: it was missing, so that no plain model
    could load it."""
    alone = seeded(lambda: Oddities(0.0))
    model = boss.place(seeded(lambda: Oddities(0.0)), cuts=ODDITIES_CUTS[STAGES])
    optimizers = boss.optimizer(torch.optim.SGD, **SGD), torch.optim.SGD(trainable(alone), **SGD)
    batches = batches_of_rows([8] * 3)
    for _ in range(2):
        assert train(model, optimizers[0], batches) == train(alone, optimizers[1], batches)
        assert model.eval() is model
        with torch.no_grad():
            assert torch.equal(model(rows()), alone.eval()(rows()))
        assert_same(model, alone)  # evaluating has not moved the statistics
        model.train()
        alone.train()
    fresh = Oddities(0.0)
    fresh.load_state_dict(model.state_dict())
    fresh.never.weight.data.fill_(7)
    fresh.norm.running_mean.fill_(7)
    model.load_state_dict(fresh.state_dict())
    assert_same(model, fresh)


def test_modules_stay_in_the_mode_they_came_in(boss: Boss) -> None:
    """Until train() or eval() is called, as in one process. Batch norm that was frozen on purpose
    was set to train mode by the first batch."""
    alone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    alone[1].eval()
    model = boss.place(copy.deepcopy(alone), cuts=["1", "2"])
    assert model.training
    boss.optimizer(torch.optim.SGD, lr=0.0)
    boss.train_step(rows(), torch.arange(4) % 3, loss=F.cross_entropy)
    assert torch.equal(model(rows()), alone(rows()))
    assert_same(model, alone)
    assert torch.equal(model.train()(rows()), alone.train()(rows()))
    assert_same(model, alone)
    assert not boss.place(alone.eval(), cuts=["1", "2"]).training


def test_dropout_draws_other_numbers_on_other_workers(boss: Boss) -> None:
    """All of them begin with the same seed, torch's own: their masks were the same."""
    model = boss.place(nn.Sequential(*[nn.Dropout(0.5) for _ in range(3)]), cuts=["1", "2"])
    left = (model(torch.ones(1000, 4)) != 0).double().mean().item()
    assert abs(left - 0.125) < 0.03


# -- several micro-batches -------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [2, 5])
def test_micro_batches_are_that_of_the_unsplit_batch(boss: Boss, microbatches: int) -> None:
    """Also of batches that do not divide, or are too small."""
    alone = seeded(FanOut).double()
    model = boss.place(copy.deepcopy(alone), cuts=FAN_OUT_CUTS, microbatches=microbatches)
    batches = batches_of_rows(ODD_SIZES, torch.float64)
    losses = train(model, boss.optimizer(torch.optim.SGD, **SGD), batches)
    expected = train(alone, torch.optim.SGD(alone.parameters(), **SGD), batches)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert_close(model, alone)


@pytest.mark.parametrize("name", ["masks", "tuple_out", "dict_out"])
def test_micro_batches_of_several_inputs_and_outputs(boss: Boss, name: str) -> None:
    job = JOBS[name]

    def double(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(double, value))
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if is_float else value

    batches = [(double(x), y) for x, y in job.batches()[:5]]
    alone = job.module(SEED).double()
    model = boss.place(copy.deepcopy(alone), cuts=job.cuts[STAGES], microbatches=3)
    losses = train(model, boss.optimizer(torch.optim.SGD, **SGD), batches, job.loss)
    expected = train(alone, torch.optim.SGD(trainable(alone), **SGD), batches, job.loss)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert_close(model, alone)


class Several(nn.Module):
    """Something for each sample, and something else."""

    def __init__(self, further: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.further = further

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.b(torch.tanh(self.a(x)))
        return self.c(x), self.further(x) * self.temperature


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_not_of_samples_is_no_output_of_micro_batches(boss: Boss, keep: bool) -> None:
    """A loss was that of the first micro-batch, and its gradient every one's."""
    for further in (torch.mean, lambda x: x.sum(0)):
        model = boss.place(Several(further), cuts=["b", "c"], microbatches=3)
        with torch.set_grad_enabled(keep), pytest.raises(shoal.ModelError, match=r"output\[1\] "):
            model(rows(7))
    model = boss.place(Several(lambda x: 1.0), cuts=["b", "c"], microbatches=3)
    with torch.no_grad():
        assert model(rows(7))[1] == 2.0
    with pytest.raises(shoal.ModelError, match=r"output\[1\] is one number, with a gradient"):
        model(rows(7))
    works(boss)


def test_a_target_that_cannot_be_cut_is_refused(boss: Boss) -> None:
    """Of one that was too long, the rest was left out."""
    boss.place(sequential(), cuts=SEQUENTIAL_CUTS, microbatches=2)
    boss.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(shoal.ModelError, match=r"\(5, 3\) came with a batch of 4 samples"):
        boss.train_step(rows(), torch.zeros(5, 3), loss=F.mse_loss)
    boss.train_step(rows(), torch.zeros(4, 3), loss=F.mse_loss)


def test_padding_counts_for_nothing_in_micro_batches(boss: Boss) -> None:
    net, x, y = sequential(), rows(), torch.tensor([0, 1, 2, -100])
    with torch.no_grad():
        expected = F.cross_entropy(net(x), y)
    boss.place(net, cuts=SEQUENTIAL_CUTS, microbatches=2)
    boss.optimizer(torch.optim.SGD, lr=0.1)
    torch.testing.assert_close(boss.train_step(x, y, loss=F.cross_entropy), expected)


# -- inputs and their gradients --------------------------------------------------------------------


class Optional(nn.Module):
    """A mask that may be left out, and a number for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(
        self, x: torch.Tensor, factor: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.b(torch.tanh(self.a(x)))
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        out: torch.Tensor = self.c(torch.tanh(x)) * factor
        return out


@pytest.mark.parametrize("microbatches", [1, 3])
def test_inputs_by_keyword_and_gradients_of_inputs(boss: Boss, microbatches: int) -> None:
    """The gradient of a number that all micro-batches have is the sum of theirs, which once could
    not be put together."""
    alone = seeded(Optional).double()
    cuts = ["b", "c"]
    places = {
        ("x", "factor"): boss.place,
        ("x", "factor", "mask"): lambda *a, **k: boss.place(
            *a, inputs=["x", "factor", "mask"], **k
        ),
    }
    for names, place in places.items():
        model = place(copy.deepcopy(alone), cuts=cuts, microbatches=microbatches)
        given: list[dict[str, torch.Tensor]] = []
        for each in (model, alone):
            inputs = {
                "x": rows().double().requires_grad_(),
                "factor": torch.tensor(2.0, dtype=torch.float64, requires_grad=True),
                "mask": (torch.arange(32) % 5 == 0).view(4, 8),
            }
            given.append({name: inputs[name] for name in names})
            further = {name: tensor for name, tensor in given[-1].items() if name != "x"}
            each(given[-1]["x"], **further).pow(2).sum().backward()
        for name in ("x", "factor"):
            torch.testing.assert_close(given[0][name].grad, given[1][name].grad)
            if microbatches == 1:
                assert torch.equal(given[0][name].grad, given[1][name].grad)


def test_inputs_that_the_model_does_not_take_are_named(boss: Boss) -> None:
    model = boss.place(Optional(), cuts=["b", "c"])
    x, factor = rows(), torch.tensor(1.0)
    calls: dict[str, Callable[[], Any]] = {
        r"factor is missing.": lambda: model(x),
        r"one more: .* inputs=\[": lambda: model(x, factor, x),
        r"mask: .* inputs=\[": lambda: model(x, factor, mask=x),
        r"x came twice.": lambda: model(x, factor, x=x),
        r"factor is missing; factors: .*": lambda: model(x, factors=factor),
    }
    for words, call in calls.items():
        with pytest.raises(shoal.ModelError, match=rf"^the model takes x, factor; {words}"):
            call()
    assert model(x, factor).shape == (4, 3)


def test_only_some_outputs_are_used(boss: Boss) -> None:
    """Of the others no gradient comes."""
    job = JOBS["tuple_out"]
    alone = job.module(SEED)
    model = boss.place(job.module(SEED), cuts=job.cuts[STAGES])
    x = [rows().requires_grad_() for _ in range(2)]
    for part in (0, 1):
        for each, given in zip((model, alone), x, strict=True):
            each(given)[part].sum().backward()
        assert x[0].grad is not None
        assert torch.equal(x[0].grad, x[1].grad)


# -- forwards and backwards ------------------------------------------------------------------------


def test_two_forwards_before_one_backward(boss: Boss) -> None:
    alone = seeded(FanOut)
    model = boss.place(copy.deepcopy(alone), cuts=FAN_OUT_CUTS)
    optimizers = boss.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(alone.parameters(), 0.1)
    for each, optimizer in zip((model, alone), optimizers, strict=True):
        one, two = each(rows(4)), each(rows(5))
        (one.pow(2).mean() + two.mean()).backward()
        optimizer.step()
        # And two backwards, the first forward first, whose gradients add up.
        optimizer.zero_grad()
        one, two = each(rows(4)), each(rows(5))
        one.sum().backward()
        two.pow(2).sum().backward()
        optimizer.step()
    assert_same(model, alone)


def test_a_second_backward_is_refused(boss: Boss) -> None:
    model = boss.place(sequential(), cuts=SEQUENTIAL_CUTS)
    x = rows().requires_grad_()
    out = model(x)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"a second time .* Call the model again"):
        out.sum().backward()
    # Gradients of gradients would be wrong without a word: workers keep nothing for them.
    out = model(x)
    for loss in (out.sum(), out.pow(2).sum()):
        with pytest.raises(RuntimeError, match=r"create_graph=True: .* differentiated once"):
            torch.autograd.grad(loss, x, create_graph=True)
    torch.autograd.grad(out.sum(), x)
    works(boss)


def kept(boss: Boss) -> list[int]:
    return [worker.num_kept for worker in boss.status().workers]


def test_what_no_backward_will_need_is_freed(boss: Boss) -> None:
    """Where no gradients are wanted nothing is kept; else until the outputs are forgotten, or have
    been used."""
    model = boss.place(sequential(), cuts=SEQUENTIAL_CUTS, microbatches=2)
    outputs = [model(rows()) for _ in range(3)]
    until(lambda: kept(boss) == [6] * STAGES, "two micro-batches of three forwards are kept")
    outputs.pop().sum().backward()
    del outputs
    with torch.no_grad():
        for _ in range(5):
            assert not model(rows()).requires_grad
    until(lambda: kept(boss) == [0] * STAGES, "nothing is kept")


def test_a_model_whose_place_another_has_taken(boss: Boss) -> None:
    """It computed with the other one's weights, and its gradients went to that one."""
    first = boss.place(sequential(), cuts=SEQUENTIAL_CUTS)
    boss.optimizer(torch.optim.SGD, lr=0.1)
    out = first(rows())
    second = boss.place(sequential(), cuts=SEQUENTIAL_CUTS)
    for call in (lambda: first(rows()), out.sum().backward, first.state_dict):
        with pytest.raises(shoal.ModelError, match="another model has been placed since"):
            call()
    with pytest.raises(shoal.ModelError, match=r"boss.optimizer\(...\) comes first"):
        boss.train_step(rows(), rows(), loss=F.mse_loss)
    assert second(rows()).shape == (4, 3)


def test_a_model_that_could_not_be_placed_takes_nobody_s_place(boss: Boss) -> None:
    """The one before was said to be gone, for a mistake in the cuts."""
    model = boss.place(sequential(), cuts=SEQUENTIAL_CUTS)
    optimizer = boss.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(shoal.ModelError, match="no module of that name"):
        boss.place(sequential(), cuts=["nothing", "else"])
    with pytest.raises(shoal.ModelError, match="does not take what comes to it"):
        boss.place(sequential(), example=torch.zeros(2, 99))
    model(rows()).sum().backward()
    optimizer.step()
    assert model.state_dict()


def test_outputs_can_be_changed_in_place(boss: Boss) -> None:
    """torch took them for views, which cannot."""
    alone = sequential()
    model = boss.place(copy.deepcopy(alone), cuts=SEQUENTIAL_CUTS)
    for each in (model, alone):
        out = each(rows())
        out += 1
        out[:, 0] *= 2
        out.relu_().pow(2).sum().backward()
    boss.optimizer(torch.optim.SGD, lr=0.1).step()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert_same(model, alone)


# -- optimizers ------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01, "betas": (0.8, 0.99), "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01, "centered": True},
    "Adagrad": {"lr": 0.1},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch(boss: Boss, name: str) -> None:
    kind, options = getattr(torch.optim, name), OPTIMIZERS[name]
    alone = seeded(sequential)
    model = boss.place(copy.deepcopy(alone), cuts=SEQUENTIAL_CUTS)
    batches = batches_of_rows([8] * 4)
    losses = train(model, boss.optimizer(kind, **options), batches)
    assert losses == train(alone, kind(alone.parameters(), **options), batches)
    assert_same(model, alone)


Scheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
SCHEDULERS: dict[str, Scheduler] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "one cycle, betas too": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, max_lr=0.05, total_steps=8
    ),
    "one after the other": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        ],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedulers(boss: Boss, name: str) -> None:
    alone = seeded(sequential)
    model = boss.place(copy.deepcopy(alone), cuts=SEQUENTIAL_CUTS)
    batches = batches_of_rows([8] * 6)
    optimizers = (
        boss.optimizer(torch.optim.Adam, lr=0.01),
        torch.optim.Adam(alone.parameters(), lr=0.01),
    )
    losses = [
        train(each, optimizer, batches, scheduler=SCHEDULERS[name](optimizer))
        for each, optimizer in zip((model, alone), optimizers, strict=True)
    ]
    assert losses[0] == losses[1]
    assert_same(model, alone)


def test_a_learning_rate_set_by_hand_and_gradients_set_to_zero(boss: Boss) -> None:
    """A gradient of zero is one: weights decay with it, and momentum goes on."""
    alone = seeded(sequential)
    model = boss.place(copy.deepcopy(alone), cuts=SEQUENTIAL_CUTS)
    optimizers = boss.optimizer(torch.optim.SGD, **SGD), torch.optim.SGD(alone.parameters(), **SGD)
    for each, optimizer in zip((model, alone), optimizers, strict=True):
        train(each, optimizer, batches_of_rows([8] * 2))
        optimizer.param_groups[0]["lr"] = 0.03
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    assert_same(model, alone)


@pytest.mark.parametrize("kind", [2.0, 1, float("inf")])
def test_clipping_by_the_norm_of_all_gradients(boss: Boss, kind: float) -> None:
    alone = seeded(Tied)
    model = boss.place(copy.deepcopy(alone), cuts=["there", "last"])
    optimizers = boss.optimizer(torch.optim.SGD, **SGD), torch.optim.SGD(alone.parameters(), **SGD)
    norms: list[list[float]] = [[], []]
    most = {2.0: 0.3, 1: 1.5, float("inf"): 0.1}[kind]
    clips = (
        lambda: norms[0].append(boss.clip_grad_norm_(most, kind).item()),
        lambda: norms[1].append(nn.utils.clip_grad_norm_(alone.parameters(), most, kind).item()),
    )
    batches = batches_of_rows([8] * 6)
    for each, optimizer, clip in zip((model, alone), optimizers, clips, strict=True):
        train(each, optimizer, batches, clip=clip)
    assert norms[0] == norms[1]
    assert max(norms[0]) > most > min(norms[0]), norms[0]
    assert_same(model, alone)


def test_a_norm_that_is_not_finite_can_be_refused(boss: Boss) -> None:
    model = boss.place(sequential(), cuts=SEQUENTIAL_CUTS)
    x, _ = batches_of_rows([8])[0]
    (model(x).sum() * float("inf")).backward()
    assert not boss.clip_grad_norm_(1.0).isfinite()
    with pytest.raises(RuntimeError, match=r"norm (nan|inf): they were not clipped"):
        boss.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_a_question_that_nobody_answered_in_time_is_called_off(
    boss: Boss, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a forward is: else the next call waited for the same again, and so on for ever."""
    alone = seeded(sequential)
    model = boss.place(copy.deepcopy(alone), cuts=SEQUENTIAL_CUTS)
    assert_same(model, alone)
    stuck = Forward(call=10**6, num_parts=1, keep=False, training=None, forget=[])
    boss.desk.order(stuck)  # without the input that it waits for
    with monkeypatch.context() as patch:
        patch.setattr(boss.desk.link, "timeout_s", 0.5)
        with pytest.raises(shoal.WireError, match="nothing came"):
            model.state_dict()
    assert_same(model, alone)


def test_an_optimizer_whose_place_another_has_taken(boss: Boss) -> None:
    """Its steps were steps of the other one, with its own options."""
    boss.place(sequential(), cuts=SEQUENTIAL_CUTS)
    first = boss.optimizer(torch.optim.SGD, lr=0.1)
    second = boss.optimizer(torch.optim.Adam, lr=0.1)
    for call in (first.step, first.zero_grad):
        with pytest.raises(shoal.ModelError, match=r"optimizer\(\) has been called since"):
            call()
    second.step()
    boss.place(sequential(), cuts=SEQUENTIAL_CUTS)
    boss.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(shoal.ModelError, match="another model has been placed since"):
        second.step()


def test_optimizers_that_workers_do_not_know(boss: Boss) -> None:
    class Own(torch.optim.SGD):
        pass

    boss.place(sequential(), cuts=SEQUENTIAL_CUTS)
    with pytest.raises(shoal.ModelError, match=r"Own: workers know the optimizers of torch.optim"):
        boss.optimizer(Own, lr=0.1)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        boss.optimizer(torch.optim.SGD, lr=-1)


# -- state -----------------------------------------------------------------------------------------


def test_state_goes_there_and_back(boss: Boss) -> None:
    alone = seeded(sequential)
    model = boss.place(sequential(), cuts=SEQUENTIAL_CUTS)
    model.load_state_dict(alone.state_dict())
    assert_same(model, alone)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = sequential()
    plain.load_state_dict(torch.load(file))
    assert torch.equal(plain(rows()), alone(rows()))
    model.state_dict()["0.weight"].zero_()  # which is the caller's own
    assert_same(model, alone)
    half = {name: torch.zeros_like(t) for name, t in alone.state_dict().items() if name > "2"}
    found = model.load_state_dict(half, strict=False)
    assert found.missing_keys == ["0.weight", "0.bias", "2.weight", "2.bias"][:2]
    alone.load_state_dict(half, strict=False)
    assert_same(model, alone)


def test_state_of_another_model_is_refused_at_once(boss: Boss) -> None:
    """What did not fit was told of by a worker, some calls later."""
    alone = seeded(sequential)
    model = boss.place(copy.deepcopy(alone), cuts=SEQUENTIAL_CUTS)
    state = alone.state_dict()
    with pytest.raises(shoal.ModelError, match=r"missing \['0.weight'\], not of .* \['1.weight'\]"):
        model.load_state_dict({n.replace("0.weight", "1.weight"): t for n, t in state.items()})
    with pytest.raises(shoal.ModelError, match=r"0.bias is \(10,\) in this model, and came as"):
        model.load_state_dict({**state, "0.bias": torch.ones(1)})
    state = {**state, "0.bias": torch.ones(1), "more": torch.ones(1)}
    del state["0.weight"]
    every = r"(?s)missing \['0.weight'\], not of .* \['more'\].*0.bias is \(10,\)"
    with pytest.raises(shoal.ModelError, match=every):
        model.load_state_dict(state)
    assert_same(model, alone)


def test_state_that_changes_as_soon_as_it_was_loaded(boss: Boss) -> None:
    """It was sent from where it lay, while the caller went on to train it."""

    def large() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(STAGES)))

    model = boss.place(large(), cuts=["1", "2"])
    state = {name: torch.ones_like(tensor) for name, tensor in large().state_dict().items()}
    model.load_state_dict(state)
    for tensor in state.values():
        tensor.zero_()
    assert all(bool((tensor == 1).all()) for tensor in model.state_dict().values())


# -- the loss on the last worker -------------------------------------------------------------------


def steps(
    boss: Boss, alone: nn.Module, batches: Sequence[Batch], loss: Any, how: dict[str, Any]
) -> list[tuple[float, float]]:
    """Of each step: the loss, and that of one process."""
    boss.optimizer(torch.optim.SGD, **SGD)
    optimizer = torch.optim.SGD(alone.parameters(), **SGD)
    losses = [boss.train_step(x, y, loss=loss, **how).item() for x, y in batches]
    return list(zip(losses, train(alone, optimizer, batches, loss), strict=True))


LOSSES: dict[str, Any] = {
    "function": F.cross_entropy,
    "module": nn.CrossEntropyLoss(label_smoothing=0.1),
    "module with a tensor": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
    "own function": lambda out, y: F.nll_loss(F.log_softmax(out, 1), y) + 0.1 * out.pow(2).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_train_step_with_losses_of_every_kind(boss: Boss, name: str) -> None:
    alone = seeded(sequential)
    model = boss.place(copy.deepcopy(alone), cuts=SEQUENTIAL_CUTS)
    for mine, theirs in steps(boss, alone, batches_of_rows([8] * 5), LOSSES[name], {}):
        assert mine == theirs
    assert_same(model, alone)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_train_step_with_micro_batches(boss: Boss, schedule: str, reduction: str) -> None:
    alone = seeded(FanOut).double()
    model = boss.place(copy.deepcopy(alone), cuts=FAN_OUT_CUTS, microbatches=4)

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 0.1 * F.cross_entropy(out, y, reduction=reduction)

    how = {"schedule": schedule, "reduction": reduction}
    batches = batches_of_rows([13, 8, 3], torch.float64)
    for mine, theirs in steps(boss, alone, batches, loss, how):
        assert mine == pytest.approx(theirs, rel=1e-9)
    assert_close(model, alone)


def test_train_step_and_plain_steps_take_turns(boss: Boss) -> None:
    """With one loss and then another; and gradients from before do not count."""
    alone = seeded(sequential)
    model = boss.place(copy.deepcopy(alone), cuts=SEQUENTIAL_CUTS)
    mine = boss.optimizer(torch.optim.SGD, **SGD)
    theirs = torch.optim.SGD(alone.parameters(), **SGD)
    for number, (x, y) in enumerate(batches_of_rows([8] * 6)):
        loss = (F.cross_entropy, F.multi_margin_loss)[number // 2 % 2]
        model(x).sum().backward()
        assert boss.train_step(x, y, loss=loss).item() == train(alone, theirs, [(x, y)], loss)[0]
        assert train(model, mine, [(x, y)]) == train(alone, theirs, [(x, y)])
    assert_same(model, alone)


# -- made on the workers ---------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["pipeline_nets:sequential", "pipeline_nets:OwnParameters"])
def test_weights_that_the_workers_make(boss: Boss, given: str) -> None:
    """From the seed, whatever the cuts. Then training is that of one process with these weights."""
    make = getattr(sys.modules["pipeline_nets"], given.partition(":")[2])
    alone = as_module(make, 5)
    materialise(alone, 5, torch.device("cpu"))
    cuts = {"sequential": (["1", "5"], SEQUENTIAL_CUTS), "OwnParameters": (["scaled", "b"],) * 2}
    for each in cuts[make.__name__]:
        model = boss.place(given, cuts=each, init="remote", seed=5)
        assert_same(model, alone)
    batches = batches_of_rows([8] * 4)
    losses = train(model, boss.optimizer(torch.optim.SGD, **SGD), batches)
    assert losses == train(alone, torch.optim.SGD(alone.parameters(), **SGD), batches)
    assert_same(model, alone)


def test_the_boss_never_has_what_the_workers_make(
    boss: Boss, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it send any of it."""
    sent: list[Any] = []
    tell = boss.desk.order_each

    def told(orders: Any, tensors: Any) -> None:
        sent.extend(tensors or [])
        tell(orders, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(boss.desk, "order_each", told)
        boss.place("pipeline_nets:sequential", cuts=SEQUENTIAL_CUTS, init="remote")
    assert sent == [{}] * STAGES
    with pytest.raises(shoal.SettingsError, match="this one is made already"):
        boss.place(sequential(), init="remote")
    with pytest.raises(shoal.ModelError, match="cannot be imported"):
        boss.place("pipeline_nets:nothing", init="remote")


# -- how it is going -------------------------------------------------------------------------------


def test_status_from_inside_and_outside(boss: Boss, office: Office) -> None:
    model = boss.place(sequential(), cuts=SEQUENTIAL_CUTS)
    optimizer = boss.optimizer(torch.optim.SGD, lr=0.1)
    train(model, optimizer, batches_of_rows([8] * 7))
    pids = {each.process.pid for each in office.workers}
    until(lambda: [w.step for w in boss.status().workers] == [7] * STAGES, "all have told")
    status = boss.status()
    assert (status.step, status.wanted) == (7, STAGES)
    assert {worker.pid for worker in status.workers} == pids
    assert [worker.rank for worker in status.workers] == [1, 2, 3]
    assert [worker.stage for worker in status.workers] == [0, 1, 2]
    assert [worker.modules for worker in status.workers] == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert all(worker.device == "cpu" and not worker.is_lost for worker in status.workers)
    assert all(worker.memory_bytes > 2**25 for worker in status.workers)
    assert all(worker.last_seen_s < 10 for worker in status.workers)
    seen = CliRunner().invoke(app, ["status", f"127.0.0.1:{office.port}"], env={"COLUMNS": "120"})
    assert seen.exit_code == 0, seen.output
    assert f"(pid {status.pid} of {status.user} on {status.host}), step 7, 3 of 3" in seen.output
    lines = [line.split() for line in seen.output.splitlines() if " MiB " in line]
    assert [line[0] for line in lines] == ["1", "2", "3"]
    assert {int(line[2]) for line in lines} == pids
    # 7 0 s ago, or: 7 0 s ago, busy
    assert [line[line.index("s") - 2] for line in lines] == ["7"] * STAGES
    works(boss)


def test_status_where_no_boss_is() -> None:
    seen = CliRunner().invoke(app, ["status", "nonsense"])
    assert isinstance(seen.exception, shoal.SettingsError)
    assert "tcp://HOST:PORT" in str(seen.exception)


# -- one boss after the other ----------------------------------------------------------------------


def test_a_cancelled_optim_step_leaves_no_old_gradients(office: Office) -> None:
    """It was cancelled between the step and zero_grad: the next gradients were added to these."""
    office.close_boss()
    layers = JOBS["seed_001"].make()
    alone = JOBS["seed_001"].module(SEED)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    batches = JOBS["seed_001"].batches()[:2]
    train(alone, optimizer, batches, F.mse_loss)

    async def drive() -> dict[str, torch.Tensor]:
        workers = await shoal.AsyncBoss.setup_host(2, office.listen, wait_s=60.0)
        torch.manual_seed(SEED)
        async with shoal.AsyncBoss(workers, layers) as boss:
            await boss.distribute_model()
            placed = await boss.send_optimizer(torch.optim.SGD, {"lr": 0.1})
            step, begun, may_go = placed.step, threading.Event(), threading.Event()

            def noted() -> None:
                begun.set()
                assert may_go.wait(10.0)
                step()

            placed.step = noted  # type: ignore[assignment,method-assign]
            for x, y in batches:
                prediction = await boss.forward(x, {})
                F.mse_loss(prediction, y).backward()
                await boss.backward(prediction.grad)
                begun.clear()
                may_go.clear()
                stepping = asyncio.create_task(boss.optim_step())
                assert await asyncio.to_thread(begun.wait, 10.0)
                stepping.cancel()
                await asyncio.wait([stepping])
                assert stepping.cancelled()
                may_go.set()
            return await boss.state_dict()

    state = asyncio.run(drive())
    for name, tensor in alone.state_dict().items():
        assert torch.equal(state[name], tensor)


def test_the_next_boss_with_fewer_workers_and_await(office: Office) -> None:
    """The seed's own words. Meanwhile the event loop is free."""
    office.close_boss()
    layers = JOBS["seed_001"].make()
    alone = JOBS["seed_001"].module(SEED)
    optimizer = torch.optim.Adam(alone.parameters(), lr=3e-3)
    batches = JOBS["seed_001"].batches()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    async def drive() -> dict[str, torch.Tensor]:
        nonlocal ticks
        ticking = asyncio.create_task(tick())
        workers = await shoal.AsyncBoss.setup_host(2, office.listen, wait_s=60.0)
        torch.manual_seed(SEED)
        async with shoal.AsyncBoss(workers, layers) as boss:
            with pytest.raises(shoal.ModelError, match=r"distribute_model\(\) comes first"):
                await boss.forward(batches[0][0], {})
            await boss.distribute_model()
            with pytest.raises(shoal.ModelError, match=r"send_optimizer\(\) comes first"):
                await boss.optim_step()
            await boss.send_optimizer(torch.optim.Adam, {"lr": 3e-3})
            boss.gather_dependencies()
            ticks = 0
            for x, y in batches:
                prediction = await boss.forward(x, {})
                loss = F.mse_loss(prediction, y)
                loss.backward()
                await boss.backward(prediction.grad)
                await boss.optim_step()
                assert loss.item() == train(alone, optimizer, [(x, y)], F.mse_loss)[0]
            assert ticks >= len(batches)
            with pytest.raises(shoal.ModelError, match="once"):
                await boss.backward(prediction.grad)
            assert [worker.stage for worker in boss.status().workers] == [0, 1]
            state = await boss.state_dict()
        ticking.cancel()
        await boss.close()
        with pytest.raises(shoal.WireError, match="the boss was closed"):
            await boss.forward(batches[0][0], {})
        return state

    state = asyncio.run(drive())
    for name, tensor in alone.state_dict().items():
        assert torch.equal(state[name], tensor)


def test_the_next_boss_with_one_worker(office: Office) -> None:
    office.close_boss()
    with office.make_boss(1) as boss:
        works(boss)
        alone = seeded(Masked)
        model = boss.place(copy.deepcopy(alone), microbatches=2)
        x, kind = rows(), torch.arange(4, dtype=torch.int32)
        assert torch.equal(model(x, x > 0, kind=kind), alone(x, x > 0, kind))
        assert boss.clip_grad_norm_(1.0).item() == 0.0
    assert [each.process.poll() for each in office.workers] == [None] * STAGES
