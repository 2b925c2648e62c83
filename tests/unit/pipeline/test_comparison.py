"""Stages against the model itself: what torch.fx reads wrongly, and what reaches over a cut.

Each of the models below was once trained as another one, without a word.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from shoal.errors import ModelError
from shoal.pipeline import comparison
from shoal.pipeline.build import as_module
from shoal.pipeline.comparison import Comparison
from shoal.pipeline.graph import read
from shoal.pipeline.losses import Loss
from shoal.pipeline.plan import Plan
from shoal.pipeline.routes import route
from shoal.train.models.zoo import ConvNet, MnistCnn, ResidualMlp, TutorialCnn

WIDTH = 6


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def rows(count: int = 8, *shape: int) -> Tensor:
    return torch.randn(count, *(shape or (WIDTH,)), generator=torch.Generator().manual_seed(1))


def compare(
    model: nn.Module,
    cuts: list[int] | None = None,
    loss: Loss | None = F.mse_loss,
    x: Tensor | None = None,
    mode: bool | None = None,
) -> None:
    """By all cuts, one at a time, unless some are given."""
    graph = read(model)
    x = rows() if x is None else x
    y = torch.zeros(len(x), WIDTH) if loss else None
    for row in [[cut] for cut in range(1, len(graph.units))] if cuts is None else [cuts]:
        plan = Plan(stages=len(row) + 1, loss=loss)
        made = Comparison.of(graph, route(graph, row), plan, is_here=True)
        made.check({graph.inputs[0]: x}, y, mode)


# -- other models ----------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = square(), square()


class Adapted(Two):
    """Weights that a hook computes with, of another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.b.register_forward_hook(lambda _, given, made: made + self.high(self.low(given[0])))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class OwnForward(Two):
    """The same by a forward that is put into a layer."""

    def __init__(self) -> None:
        super().__init__()
        before = self.b.forward
        self.b.forward = lambda x: before(x) + self.a(x)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Decoder(nn.Module):
    """Kept whole: it branches. Its weight is another's, in a list that torch does not look into."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.tied = [layer]

    def forward(self, x: Tensor) -> Tensor:
        return x if x.isnan().any() else F.linear(x, self.tied[0].weight.t())


class TiedByList(Two):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(self.b)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Scaled(nn.Module):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = [other]

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.other[0].weight.mean()


def parametrized() -> nn.Module:
    model = nn.Sequential(square(), nn.Tanh(), square())
    parametrize.register_parametrization(model[2], "weight", Scaled(model[0]))
    return model


class Views(Two):
    """Weights that are parts of a larger one, made beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.first, self.second = self.flat[0], self.flat[1]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second


class Transposed(Two):
    def __init__(self) -> None:
        super().__init__()
        self.back = self.b.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x)))) @ self.back


class Subscript(Two):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x)) @ self._parameters["w"].T  # type: ignore[union-attr]


class Functional(Two):
    """A layer that is called with other weights than its own."""

    def forward(self, x: Tensor) -> Tensor:
        still = {name: weight.detach() for name, weight in self.b.named_parameters()}
        return torch.func.functional_call(self.b, still, torch.tanh(self.a(x))) + self.b(x)


class Goes(Two):
    """Goes back within forward()."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.sum().backward(retain_graph=True)
        return self.b(torch.tanh(h))


class ByDict(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * {WIDTH: 3.0}.get(x.shape[-1], 1.0))


class ByDtype(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.tanh(h) if x.dtype is torch.float32 else h)


class ByNone(Two):
    """What a layer gives is never None while it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h, weights = self.attention(x[:, None], x[:, None], x[:, None], need_weights=False)
        return self.b(h[:, 0] if weights is None else h[:, 0] * 2)


class ByMatch(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        match x.shape:
            case (_, 6):
                h = torch.tanh(h)
        return self.b(h)


class ByFailing(Two):
    def forward(self, x: Tensor) -> Tensor:
        try:
            scale = float(x.shape[1])
        except TypeError:
            scale = 1.0
        return self.b(torch.tanh(self.a(x)) / scale)


class Collects(Two):
    """What hooks collect, and forward() uses."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.a.register_forward_hook(lambda _, given, made: self.seen.append(made))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        h = torch.tanh(self.a(x))
        return self.b(sum(self.seen, h))


class Lossy(Two):
    """What is kept for the backward pass is rounded."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.round(), lambda t: t):
            h = torch.tanh(self.a(x))
        return self.b(h)


class SumOfWeights(Two):
    """A number that is another one after each step."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = sum(weight.norm() for weight in self.parameters())
        return self.b(torch.tanh(self.a(x))) / size


class NumberOfBuffer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * next(self.buffers()).sum().item())


class Gives(nn.Module):
    """Kept whole; gives a dict."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"h": x} if not x.isnan().any() else {}


class Updates(Two):
    def __init__(self) -> None:
        super().__init__()
        self.gives = Gives()

    def forward(self, x: Tensor) -> Tensor:
        found = self.gives(self.a(x))
        found.update(h=found["h"] * 2)
        return self.b(found["h"])


class Stands(nn.Module):
    """Kept whole, with a call of its own, which the tracer makes a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2

    def forward(self, x: Tensor) -> Tensor:
        return x if x.isnan().any() else self.inner(x)


class ChangesView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            return x
        x += 1
        return x * 2


class ViewChanged(Two):
    """A module changes a part of what another stage uses whole."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = ChangesView()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        part = h[:, :3]
        return self.b(torch.cat([self.changes(part), h[:, 3:]], 1)) + h


@fx.wrap
def plus_weight(x: Tensor) -> Tensor:
    return x + OUTSIDE.weight.sum()


OUTSIDE = square()


class Reaches(Two):
    def __init__(self) -> None:
        super().__init__()
        self.outside = OUTSIDE

    def forward(self, x: Tensor) -> Tensor:
        return plus_weight(self.b(torch.tanh(self.outside(self.a(x)))))


OTHERS: dict[Callable[[], nn.Module], str] = {
    Adapted: "low.weight, which is not in that stage",
    OwnForward: "a.weight, which is not in that stage",
    TiedByList: "b.weight",
    parametrized: "0.weight, which is not in that stage",
    Views: "gradient of flat",
    Transposed: "gradient of b.weight",
    Subscript: "gradient of w",
    Functional: "gradient of b.weight",
    Goes: "the gradient of",
    ByDict: "the output differs",
    ByDtype: "the output differs",
    ByNone: "the output differs",
    ByMatch: "the output differs",
    ByFailing: "the output differs",
    Collects: "the output differs",
    Lossy: "gradient of",
    SumOfWeights: "the output differs",
    NumberOfBuffer: "the output differs",
    Updates: "the output differs",
    lambda: nn.Sequential(square(), Stands(), square()): "the output differs",
    ViewChanged: "differs",
    Reaches: "outside.weight",
}


@pytest.mark.parametrize(
    ("make", "words"), OTHERS.items(), ids=lambda it: getattr(it, "__name__", "")
)
def test_another_model_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ModelError, match="in stages is not") as caught:
        compare(make())
    assert words in str(caught.value), caught.value


class Counts(nn.Module):
    """Kept whole. What it counts is a parameter, if one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls.add_(1)
        return x * self.calls


class CountingLoss(Counts):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        target.mul_(0.5)
        return F.mse_loss(super().forward(x), target)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_parameters_that_a_forward_changes_are_put_back(num_stages: int, microbatches: int) -> None:
    model, loss, y = nn.Sequential(square(), Counts(), square()), CountingLoss(), torch.ones(8, 6)
    graph = read(model)
    plan = Plan(stages=num_stages, loss=loss, microbatches=microbatches)
    cuts = list(range(1, num_stages))
    made = Comparison.of(graph, route(graph, cuts), plan, is_here=True)
    made.check({graph.inputs[0]: rows()}, y, None)
    assert (model[1].calls, loss.calls) == (0, 0)
    assert y.eq(1).all()


def test_a_loss_alone_with_its_model_is_not_called_beforehand() -> None:
    """It would count on by itself, in a closure, where nobody can put it back."""
    calls = iter(range(100))
    graph = read(nn.Sequential(square(), square()))
    plan = Plan(stages=1, loss=lambda o, y: F.mse_loss(o, y) * next(calls))
    made = Comparison.of(graph, route(graph, []), plan, is_here=True)
    made.check({graph.inputs[0]: rows()}, torch.ones(8, 6), None)
    assert next(calls) == 0


def test_a_loss_that_looks_at_the_model() -> None:
    """In one process it sees all weights; in the last stage only those that are there."""
    model = nn.Sequential(square(), nn.Tanh(), square())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + sum(p.square().sum() for p in model.parameters())

    with pytest.raises(
        ModelError, match=r"stage 1 computes with 0\.weight, which is not in"
    ) as caught:
        compare(model, [2], loss)
    assert "sum(p.square().sum() for p in model.parameters())" in str(caught.value)
    assert "weight_decay= of the optimizer" in str(caught.value)


def test_a_loss_that_looks_at_what_another_stage_has_left() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.size = square(), torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            self.size = h.square().mean()
            return h

    model = nn.Sequential(Encoder(), nn.Tanh(), square())
    encoder: Any = model[0]
    with pytest.raises(ModelError, match="stage 1 computes with a value of stage 0 that did not"):
        compare(model, [1], lambda output, target: F.mse_loss(output, target) + encoder.size)


class Peeks(nn.Module):
    """In training, at a weight of another stage."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.layer, self.other = square(), [other]

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) if not x.isnan().any() else x
        return x * self.other[0].weight.mean() if self.training else x


def peeking() -> nn.Sequential:
    first = square()
    return nn.Sequential(first, nn.Tanh(), Peeks(first))


@pytest.mark.parametrize("target", [torch.empty(0), torch.zeros(8, WIDTH + 1), "none of it"])
def test_a_target_that_is_none_is_no_reason_not_to_compare(target: Any) -> None:
    """It matters in the last stage, and rank 0 has whatever stands for it."""
    model = peeking()
    graph = read(model)
    plan = Plan(stages=2, loss=F.mse_loss)
    made = Comparison.of(graph, route(graph, [2]), plan, is_here=True)
    with pytest.raises(ModelError, match=r"0\.weight, which is not in that stage"):
        made.check({graph.inputs[0]: rows()}, target, None)


class Annealed(nn.Module):
    """A loss that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(output, target) / self.calls


def test_a_loss_that_counts_is_as_it_was() -> None:
    loss = Annealed()
    compare(nn.Sequential(square(), nn.Tanh(), square()), [2], loss)
    assert loss.calls == 0


def test_what_reaches_over_a_cut_is_told_of_a_model_that_never_does_the_same() -> None:
    calls = iter(range(10_000))
    with pytest.raises(ModelError, match=r"0\.weight, which is not in that stage"):
        compare(peeking(), [2], lambda output, target: output.sum() * next(calls))


class Notes(nn.Module):
    """Kept whole; writes down what another layer reads."""

    def __init__(self, notes: Any) -> None:
        super().__init__()
        self.layer, self.notes = square(), notes

    def forward(self, x: Tensor) -> Tensor:
        if not x.isnan().any():
            write(self.notes, int((x > 0).sum()))
        return self.layer(x)


class Looks(nn.Module):
    def __init__(self, notes: Any) -> None:
        super().__init__()
        self.layer, self.notes = square(), notes

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / look(self.notes) if not x.isnan().any() else x


@dataclass(slots=True)
class Page:
    count: int = 1


class Book:
    def __init__(self) -> None:
        self.count = 1


def write(notes: Any, count: int) -> None:
    match notes:
        case dict():
            notes["count"] = count
        case list():
            notes.append(count)
        case numpy.ndarray():
            notes[0] = count
        case _:
            notes.count = count


def look(notes: Any) -> float:
    match notes:
        case dict():
            return float(notes["count"])
        case list() | numpy.ndarray():
            return float(notes[-1])
    return float(notes.count)


@pytest.mark.parametrize(
    "make", [lambda: {"count": 1}, lambda: [1], lambda: numpy.ones(1), Page, Book]
)
def test_what_modules_of_two_stages_tell_each_other(make: Callable[[], Any]) -> None:
    """In one process it arrives, on ranks of their own it would not."""
    notes = make()
    model = nn.Sequential(Notes(notes), nn.Tanh(), Looks(notes))
    with pytest.raises(ModelError, match=r"stage 0 changes 0\.notes, which stage 1 has, too"):
        compare(model, [1])
    assert look(notes) == 1  # as it was
    compare(nn.Sequential(Notes(notes), Looks(notes), nn.Tanh()), [2])  # in one stage they may
    compare(nn.Sequential(Looks(notes), nn.Tanh(), Looks(notes)), [1])  # and if nobody writes


class Sizes:
    count = 1.0

    @functools.cached_property
    def scale(self) -> float:
        return self.count * 2


def test_what_an_object_makes_when_it_is_asked_is_told_to_nobody() -> None:
    """Each rank's makes its own."""

    class Asks(nn.Module):
        def __init__(self, sizes: Sizes) -> None:
            super().__init__()
            self.sizes, self.log = sizes, logging.getLogger("test.sizes")

        def forward(self, x: Tensor) -> Tensor:
            self.log.debug("asks")
            return x * self.sizes.scale if not x.isnan().any() else x

    sizes = Sizes()
    compare(nn.Sequential(square(), Asks(sizes), square(), Asks(sizes)), [2])


def test_a_cache_that_nobody_can_put_back_is_filled_with_the_models_own_weights() -> None:
    """It had those that the model was tried with, somewhat other ones, and kept them for good."""

    class Inverts(nn.Module):
        matrix: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("matrix", torch.eye(WIDTH) * 2)

        @functools.cache  # noqa: B019 (that is the point)
        def inverse(self) -> Tensor:
            return torch.linalg.inv(self.matrix)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.inverse() if not x.isnan().any() else x

    inverts = Inverts()
    compare(nn.Sequential(square(), inverts, square()), [1])
    assert inverts.inverse().equal(torch.eye(WIDTH) / 2)


def test_what_autocast_keeps_of_the_weights_it_was_tried_with_is_forgotten() -> None:
    model = nn.Sequential(square(), nn.Tanh(), square())
    x = rows()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare(model, [1])
        after = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = model(x)
    assert torch.equal(after, alone)
    assert after.requires_grad


def test_what_only_eval_does() -> None:
    class Asks(Two):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(h * ({WIDTH: 3.0}.get(x.shape[-1], 1.0) if not self.training else 1.0))

    with pytest.raises(ModelError, match="the output differs"):
        compare(Asks(), [1])


# -- the same models -------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Counts, collects, draws and keeps means: all of which is as before afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = (
            square(),
            nn.BatchNorm1d(WIDTH),
            nn.Dropout(),
            square(),
        )
        self.keeps = Keeps()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.keeps(self.drop(self.norm(self.a(x)))))


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.seen, self.means = 0, [0.0], {"mean": torch.zeros(WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if not x.isnan().any():
            self.seen.append(x.mean().item())
            self.means["mean"].mul_(0.9).add_(x.detach().mean(0))
        return x * len(self.seen) + self.means["mean"]


class Bags(nn.Module):
    """A function that gives some of its own defaults and leaves out others."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(9, WIDTH, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        return self.bags(x[:, None])


SAME: dict[Callable[[], nn.Module], tuple[int, ...]] = {
    MnistCnn: (1, 28, 28),
    ConvNet: (1, 28, 28),
    TutorialCnn: (1, 28, 28),
    ResidualMlp: (1,),
    Noisy: (WIDTH,),
    lambda: nn.Sequential(square(), nn.ReLU(inplace=True), square()): (WIDTH,),
    lambda: nn.Sequential(square(), nn.LayerNorm(WIDTH), square().double().float()): (WIDTH,),
    lambda: nn.Sequential(nn.Embedding(9, WIDTH), nn.Flatten(), square()): (),
    lambda: nn.Sequential(Bags(), square()): (),
}


@pytest.mark.parametrize("mode", [None, True, False], ids=["as it came", "train", "eval"])
@pytest.mark.parametrize("room", [comparison.ROOM, 0.0], ids=["computed", "dry"])
@pytest.mark.parametrize(
    ("make", "shape"), SAME.items(), ids=lambda it: getattr(it, "__name__", "")
)
def test_the_same_model_passes_and_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    room: float,
    mode: bool | None,
) -> None:
    monkeypatch.setattr(comparison, "ROOM", room)
    model = make()
    before, plain = copy.deepcopy(model), [dict(vars(each)) for each in model.modules()]
    dice = torch.random.get_rng_state()
    x = rows(8, *shape) if shape else torch.arange(8) % 9
    compare(model, loss=None, x=x, mode=mode)
    assert torch.equal(torch.random.get_rng_state(), dice)
    for name, tensor in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert all(weight.grad is None for weight in model.parameters())
    for each, was in zip(model.modules(), plain, strict=True):
        now = {k: v for k, v in vars(each).items() if not k.startswith("_tensor_constant")}
        assert now.keys() == was.keys()
        assert all(now[k] is was[k] for k in now)
    if isinstance(model, Noisy):
        keeps = model.keeps
        assert (keeps.count, keeps.seen, keeps.means["mean"].tolist()) == (0, [0.0], [0.0] * WIDTH)


def test_a_model_that_does_not_take_few_samples_is_tried_with_all() -> None:
    class Fixed(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)).view(8, WIDTH))

    class Wrong(Two):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x)).view(8, WIDTH)
            return self.b(h * {WIDTH: 3.0}.get(x.shape[-1], 1.0))

    compare(Fixed())
    with pytest.raises(ModelError, match="the output differs"):
        compare(Wrong(), [1])


def test_a_model_that_never_does_the_same_cannot_be_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its own dice are in a closure, where nobody finds them. It is said, and goes on."""
    calls = iter(range(1000))

    class Random(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * next(calls) if not x.isnan().any() else x

    with caplog.at_level(logging.WARNING):
        compare(nn.Sequential(square(), Random(), square()), [1])
    assert "does not compute the same when it is called again" in caplog.text


def test_a_model_that_fails_is_left_to_its_first_step() -> None:
    graph = read(nn.Sequential(square(), nn.Linear(WIDTH + 1, 2)))
    made = Comparison.of(graph, route(graph, [1]), Plan(stages=2), is_here=True)
    made.check({graph.inputs[0]: rows()}, None, None)


@pytest.mark.parametrize(
    ("make", "words"),
    {
        ByDict: "aten.mul.Tensor, a step of the model, is none of the stages",
        ByDtype: "aten.tanh.default, a step of the model",
        ByNone: "a step of the model",
        ByMatch: "a step of the model",
        ByFailing: "aten.div.Tensor, a step of the model",
        SumOfWeights: "a step of the model",
        parametrized: "stage 1 computes with 0.weight, which is not in that stage",
    }.items(),
    ids=lambda it: getattr(it, "__name__", ""),
)
def test_without_room_it_is_compared_what_would_be_computed(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], words: str
) -> None:
    monkeypatch.setattr(comparison, "ROOM", 0.0)
    with pytest.raises(ModelError, match="in stages is not") as caught:
        compare(make())
    assert words in str(caught.value)
    assert "Both would compute the batch" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)


def test_another_buffer_is_found_without_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Means(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("means", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.means.add_(h.detach().mean(0) if x.dtype is torch.float32 else h.detach().sum(0))
            return self.b(torch.tanh(h))

    monkeypatch.setattr(comparison, "ROOM", 0.0)
    with pytest.raises(ModelError, match="the buffer means comes about otherwise"):
        compare(Means(), [5])


def test_without_room_and_by_its_values_a_model_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(comparison, "ROOM", 0.0)
    with caplog.at_level(logging.INFO):
        compare(nn.Sequential(square(), Stands(), square()), [1])
    assert "which steps it takes depends on values" in caplog.text


def test_a_small_model_on_meta_is_made_to_be_compared() -> None:
    """On the rank that compares, and only there."""
    graph = read(as_module(ByDict))
    made = Comparison.of(graph, route(graph, [1]), Plan(stages=2), is_here=True)
    with pytest.raises(ModelError, match="the output differs"):
        made.check({graph.inputs[0]: rows()}, None, None)
    assert all(weight.is_meta for weight in graph.model.parameters())
    other = Comparison.of(graph, route(graph, [1]), Plan(stages=2), is_here=False)
    assert other.graph is None


def test_a_large_model_on_meta_is_compared_without_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("it is made")

    monkeypatch.setattr(comparison, "MADE_BYTES", 100)
    monkeypatch.setattr(comparison, "materialise", refuse)
    graph = read(as_module(ByDict))
    made = Comparison.of(graph, route(graph, [1]), Plan(stages=2), is_here=True)
    with pytest.raises(ModelError, match="the output comes about otherwise"):
        made.check({graph.inputs[0]: rows()}, None, None)


# -- losses of micro-batches -----------------------------------------------------------------------


def _by_pairs(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


LOSSES: dict[str, tuple[Any, str, bool]] = {
    "a function around cross_entropy": (lambda o, y: F.cross_entropy(o, y), "mean", True),
    "pairs of samples": (_by_pairs, "mean", True),
    "a mean that is to be a sum": (lambda o, y: o.square().mean(), "sum", True),
    "cross_entropy": (F.cross_entropy, "mean", False),
    "cross_entropy with options": (functools.partial(F.cross_entropy, ignore_index=2), "mean", 0),
    "a mean over samples": (lambda o, y: (o.mean(1) - y).square().mean(), "mean", False),
    "a sum": (lambda o, y: F.cross_entropy(o, y, reduction="sum"), "sum", False),
    "what is left of large numbers": (lambda o, y: 1 + 1e-4 * o.float().mean() - 1, "mean", 0),
    "one that is infinite": (lambda o, y: o.mean() + torch.inf, "mean", False),
    "a mean of few, in short": (
        lambda o, y: (o.bfloat16() * (y > 0)[:, None]).sum() / (y > 0).sum(),
        "mean",
        True,
    ),
    "one that is drawn": (lambda o, y: o.mean() * torch.rand(()), "mean", False),
    "one that fails with one sample": (lambda o, y: o[1].mean(), "mean", False),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_loss_that_is_another_one_of_micro_batches_is_told(
    name: str, microbatches: int, caplog: pytest.LogCaptureFixture
) -> None:
    loss, reduction, is_told = LOSSES[name]
    model = nn.Sequential(square(), nn.BatchNorm1d(WIDTH), square())
    before = copy.deepcopy(model.state_dict())
    graph = read(model)
    plan = Plan(stages=2, loss=loss, reduction=reduction, microbatches=microbatches)
    made = Comparison.of(graph, route(graph, [1]), plan, is_here=True)
    with caplog.at_level(logging.WARNING):
        made.check({graph.inputs[0]: rows()}, torch.tensor([1, -100, 2, 4] * 2), None)
    assert ("with several micro-batches another model" in caplog.text) == (
        is_told and microbatches > 1
    )
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_a_loss_that_counts_otherwise_later_in_a_sorted_batch_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By length: the first samples have no padding."""
    model = nn.Sequential(square(), square())
    graph = read(model)
    plan = Plan(stages=2, loss=lambda o, y: F.cross_entropy(o, y), microbatches=2)
    made = Comparison.of(graph, route(graph, [1]), plan, is_here=True)
    with caplog.at_level(logging.WARNING):
        made.check({graph.inputs[0]: rows(40)}, torch.tensor([1] * 30 + [-100] * 10), None)
    assert "with several micro-batches another model" in caplog.text
