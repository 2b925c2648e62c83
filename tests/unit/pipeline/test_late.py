"""Weight gradients that are put off: the same as at once, none forgotten, nothing kept."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.pipeline.graph import read
from shoal.pipeline.routes import route
from shoal.pipeline.split import OUTPUT
from shoal.pipeline.stage import Stage

WIDTH = 6
NUM_MICRO_BATCHES = 3


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class InTwoPlaces(nn.Module):
    """One layer is used twice, one once, and of one the weight is used by itself as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.once, self.read = square(), square(), square(), square()

    def forward(self, x: Tensor) -> Tensor:
        x = self.once(self.twice(self.twice(self.first(x))).relu())
        return F.linear(self.read(x), self.read.weight)


class Tied(nn.Module):
    """Two layers, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.c = square(), square(), square(), square()
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(self.first(x)).tanh()))


class Whole(nn.Module):
    """Kept whole by the tracing: what its layers do is its own business."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + F.linear(x, self.inner.weight)


Whole.__module__ = "torch.nn"  # what torch.fx takes for a leaf


class Recomputed(nn.Module):
    """Its activations are computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(square(), nn.ReLU(), square())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return found


Recomputed.__module__ = "torch.nn"


class GoesBack(nn.Module):
    """Asks for a gradient itself, in the forward pass, as losses with a penalty do."""

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((x**3).sum(), x, retain_graph=True)
        return x * slope.detach()


class Unused(nn.Module):
    """The loss does not depend on a layer, and a branch ends early."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = square(), square(), square()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        return self.a(x), self.b(x)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def without_input_gradient() -> nn.Module:
    """Nobody waits for anything of stage 1; its weights need theirs all the same."""
    return nn.Sequential(frozen(square()), square(), nn.ReLU(), square())


def hooked_output() -> nn.Module:
    """Its gradient is scaled by a hook, which was called for each of the halves."""

    def scale(layer: nn.Module, given: object, made: Tensor) -> None:
        made.register_hook(lambda gradient: gradient * 0.5)

    model = nn.Sequential(square(), square(), square())
    model[1].register_forward_hook(scale)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "layers in a row": (lambda: nn.Sequential(*(square() for _ in range(4))), 3),
    "convolutions": (
        lambda: nn.Sequential(
            square(), nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Flatten()
        ),
        1,
    ),
    "a step in place behind a layer": (
        lambda: nn.Sequential(square(), square(), nn.ReLU(inplace=True), square()),
        2,
    ),
    "no bias": (lambda: nn.Sequential(square(), nn.Linear(WIDTH, 3, bias=False)), 1),
    "a layer in two places": (InTwoPlaces, 1),
    "tied weights": (Tied, 1),
    "a frozen layer": (lambda: nn.Sequential(square(), frozen(square()), square()), 1),
    "a frozen weight": (
        lambda: nn.Sequential(square(), bias_only(square()), square()),
        2,
    ),
    "nothing before it that learns": (without_input_gradient, 2),
    "a module that is kept whole": (lambda: nn.Sequential(square(), Whole(), square()), 1),
    "computed again": (lambda: nn.Sequential(square(), Recomputed(False), square()), 1),
    "computed again, reentrant": (lambda: nn.Sequential(square(), Recomputed(True), square()), 0),
    "a layer that the loss does not need": (Unused, 2),
    "a layer with a hook on what it gives": (hooked_output, 1),
    "a module that goes back itself": (lambda: nn.Sequential(square(), square(), GoesBack()), 1),
    "layers that are no linear ones": (
        lambda: nn.Sequential(square(), nn.LayerNorm(WIDTH), nn.PReLU()),
        0,
    ),
}


def bias_only(layer: nn.Linear) -> nn.Linear:
    layer.weight.requires_grad_(False)
    return layer


def loss_of(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    first = output[0] if isinstance(output, tuple) else output
    return (first * torch.linspace(-1, 1, first.numel()).view_as(first)).sum()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(NUM_MICRO_BATCHES)]


class Pair:
    """A model in two stages, of which the first is the model's first step."""

    def __init__(self, model: nn.Module) -> None:
        graph = read(model)
        routes = route(graph, [1])
        (self._input,) = graph.inputs
        self.first, self.last = (Stage.of(graph, routes, number) for number in range(2))

    def forward(self, x: Tensor, number: int) -> None:
        made = self.first.forward((0, number), {self._input: x}, {})
        made = self.last.forward((0, number), {}, {0: self.first.parcel(made, 1)})
        self.last.keep_loss((0, number), loss_of(made[OUTPUT]))

    def backward(self, number: int) -> None:
        gradients = self.last.backward((0, number), {})
        self.first.backward((0, number), {1: gradients[0]})


@pytest.mark.parametrize(("make", "num_late"), CASES.values(), ids=CASES)
def test_the_same_to_the_bit(make: Callable[[], nn.Module], num_late: int) -> None:
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    for x in batches():
        loss_of(plain(x)).backward()
    pair = Pair(model)
    for number, x in enumerate(batches()):
        pair.forward(x, number)
        pair.backward(number)
        if number == 0:  # one is done with at once: then others are added to
            calls = 0
            while pair.last.backward_weights():
                calls += 1
            assert calls == num_late
    while pair.last.backward_weights():
        continue
    assert pair.first.num_late == pair.last.num_late == pair.last.num_kept == 0
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name


def test_what_others_wait_for_comes_first() -> None:
    model = nn.Sequential(square(), square(), nn.ReLU(), square())
    pair = Pair(model)
    pair.forward(batches()[0], 0)
    pair.backward(0)
    assert model[0].weight.grad is not None  # stage 0 needed what stage 1 sent
    assert (model[1].weight.grad, model[3].weight.grad) == (None, None)
    assert (pair.last.num_late, pair.last.num_kept) == (1, 1)
    assert pair.last.backward_weights()
    assert (model[1].weight.grad, model[3].weight.grad).count(None) == 1
    assert pair.last.backward_weights()
    assert not pair.last.backward_weights()


def test_the_oldest_comes_first() -> None:
    model = nn.Sequential(square(), square())
    pair = Pair(model)
    xs = batches()
    for number in (1, 0):
        pair.forward(xs[number], number)
        pair.backward(number)
    assert pair.last.backward_weights()
    plain = copy.deepcopy(model)
    plain.zero_grad()
    loss_of(plain(xs[1])).backward()
    assert torch.equal(model[1].weight.grad, plain[1].weight.grad)


def test_what_is_forgotten_is_not_added() -> None:
    model = nn.Sequential(square(), square())
    pair = Pair(model)
    pair.forward(batches()[0], 0)
    pair.backward(0)
    pair.last.forget()
    assert (pair.last.num_late, pair.last.num_kept) == (0, 0)
    assert not pair.last.backward_weights()
    assert model[1].weight.grad is None


def test_afterwards_no_activation_is_alive() -> None:
    model = nn.Sequential(square(), square(), nn.Tanh(), square())
    pair = Pair(model)
    alive: list[weakref.ref[Tensor]] = []
    hook = model[2].register_forward_hook(lambda m, args, made: alive.append(weakref.ref(made)))
    pair.forward(batches()[0], 0)
    hook.remove()
    pair.backward(0)
    assert alive[0]() is not None
    while pair.last.backward_weights():
        continue
    assert alive[0]() is None


def test_the_users_layers_are_left_as_they_were() -> None:
    """Hooks that stayed would go along wherever a model is copied or saved, with the stage."""
    model = nn.Sequential(square(), square())
    pair = Pair(model)
    pair.forward(batches()[0], 0)
    assert not any(layer._forward_hooks for layer in model.modules())
    copied = copy.deepcopy(model)
    assert torch.equal(copied(batches()[0]), model(batches()[0]))


def test_a_forward_that_fails_leaves_no_hook() -> None:
    model = nn.Sequential(square(), square(), nn.Linear(WIDTH + 1, 2))
    pair = Pair(model)
    with pytest.raises(RuntimeError, match="shape"):
        pair.forward(batches()[0], 0)
    assert not any(layer._forward_hooks for layer in model.modules())
    assert pair.last.num_kept == 0
