"""What torch.fx would lose: kept, or refused with the line; never another training."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from shoal.errors import ModelError
from shoal.pipeline.graph import check_shared, read
from shoal.pipeline.trace import WAYS_OUT, trace

WIDTH = 4


class Layers(nn.Module):
    """A base for those below: two layers, a buffer, and Python's own state."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("run", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.plain = torch.ones(WIDTH)
        self.number = 0
        self.seen: list[Any] = []


class NoGrad(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            t = self.a(x)  # here
        return self.b(x) + t


class Decorated(Layers):
    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        return self.a(x)  # here

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.features(x))


class Inference(Layers):
    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        return x * 2  # here


class EnableGrad(Layers):
    """Seen only where gradients are off, as in inference."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.a(x).relu()  # here


class Autocast(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.a(x)  # here
        return self.b(x.float())


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)  # here

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class StraightThrough(Layers):
    """Its steps would be read, and its own backward lost."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Sign.apply(self.a(x))
        return result


class Counts(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1  # here
        return self.b(x)


class Numbers(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.number += 1  # here
        return self.b(x) * self.number


class Remembers(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return self.b(x) * len(self.seen)  # here


class Appends(Layers):
    def forward(self, x: Tensor) -> Tensor:  # here
        self.seen.append(x.detach())
        return self.b(x)


class Meter:
    calls = 0


class CountsElsewhere(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.by_name = {"meter": [Meter()]}

    def forward(self, x: Tensor) -> Tensor:  # here
        self.by_name["meter"][0].calls += 1
        return self.b(x)


class Noise(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) + torch.rand(WIDTH)  # here


class PythonNoise(Layers):
    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 2:
            x = self.a(x)  # here
        return x


DICE = random.Random(1)
TORCH_DICE = torch.Generator()
NUMPY_DICE = numpy.random.default_rng(1)


class GlobalDice(Layers):
    """Drops its first layer so seldom that it was not seen in a few readings: it never did."""

    def forward(self, x: Tensor) -> Tensor:
        if DICE.random() > 1e-9:
            x = self.a(x)  # here
        return x


class GlobalTorchDice(Layers):
    def forward(self, x: Tensor) -> Tensor:
        if torch.rand((), generator=TORCH_DICE) > 1e-9:  # here
            x = self.a(x)
        return x


class GlobalNumpyDice(Layers):
    def forward(self, x: Tensor) -> Tensor:
        if NUMPY_DICE.random() > 1e-9:
            x = self.a(x)  # here
        return x


class Force(Layers):
    """Minus the gradient of an energy."""

    def forward(self, x: Tensor) -> Tensor:
        energy = torch.tanh(self.a(x)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)  # here
        return -force


class Average(Layers):
    """As of a momentum encoder: on parameters themselves, not on what is read."""

    def forward(self, x: Tensor) -> Tensor:
        for a, b in zip(self.a.parameters(), self.b.parameters(), strict=True):
            a.data = a.data * 0.9 + b.data * 0.1  # here
        return self.a(x) + self.b(x)


class Plain(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.plain.add_(1)  # here
        return self.b(x) * self.plain


class Penalty(Layers):
    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(p.pow(2).sum() for p in self.parameters())
        return self.b(x) + penalty  # here


class Sums(Layers):
    """The zeros would be a constant, and grow from batch to batch."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(WIDTH)
        total += self.b(x).mean(0)  # here
        return x + total


class AsksGradients(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * (2 if torch.is_grad_enabled() else 1)  # here


class Catches(Layers):
    def forward(self, x: Tensor) -> Tensor:
        try:
            with torch.no_grad():
                x = self.a(x)
        except Exception:
            x = self.b(x)
        return x


class AsksForATensor(Layers):
    """torch.fx would say no, and the mask would never be used."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if isinstance(h, torch.Tensor):  # here
            h = h.masked_fill(x > 0, 0.0)
        return self.b(h)


class AsksTorch(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) if torch.is_tensor(x) else self.a(x)  # here


class AsksForASequence(Layers):
    def forward(self, x: Any) -> Tensor:
        return self.a(x[0] if isinstance(x, Sequence) else x)  # here


class Matches(Layers):
    def forward(self, x: Any) -> Tensor:
        match x:
            case Tensor():  # here
                return self.a(x)
        return self.b(x)


class LooksUp(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.shape[0] in {1, 2, 3} else self.b(x)  # here


class LooksUpAShape(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.shape in {(3, WIDTH)} else self.b(x)  # here


class AsksForAShape(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if isinstance(x.shape, tuple) else self.b(x)  # here


class AsksForAnAttribute(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if hasattr(x, "mask") else self.b(x)  # here


class WritesElsewhere(Layers):
    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        torch.logical_and(mask, x < 1, out=mask)  # here
        return self.a(x) * mask


ALL: list[tuple[type[Layers], str]] = [
    (NoGrad, "takes a step inside torch.no_grad"),
    (Decorated, "takes a step inside torch.no_grad"),
    (Inference, "takes a step inside torch.no_grad"),
    (EnableGrad, "takes a step inside torch.no_grad"),
    (Autocast, "takes a step inside torch.autocast"),
    (StraightThrough, "torch.autograd.Function"),
    (Counts, "sets the attribute 'count'"),
    (Numbers, "sets the attribute 'number'"),
    (Remembers, "does not do the same when it is called again"),
    (Appends, "changes what it keeps in 'seen'"),
    (CountsElsewhere, "changes what it keeps in 'by_name'"),
    (Noise, "draws random numbers"),
    (PythonNoise, "draws random numbers"),
    (GlobalDice, "draws random numbers"),
    (GlobalTorchDice, "draws random numbers"),
    (GlobalNumpyDice, "draws random numbers"),
    (Force, "computes gradients itself"),
    (Average, "changes a tensor of the model"),
    (Plain, "changes a tensor of the model"),
    (Penalty, "computes with parameters that it does not take by name"),
    (Sums, "changes in place a tensor that it made"),
    (AsksGradients, "does not do the same when it is called again"),
    (AsksForATensor, "asks what kind of thing a value is"),
    (AsksTorch, "asks what kind of thing a value is"),
    (AsksForASequence, "asks what kind of thing a value is"),
    (Matches, "asks what kind of thing a value is"),
    (LooksUp, "looks for a value in a set"),
    (LooksUpAShape, "looks for a value in a set"),
    (AsksForAShape, "asks what kind of thing a value is"),
    (AsksForAnAttribute, "asks what kind of thing a value is"),
    (WritesElsewhere, "write into another tensor (out=)"),
]
IDS = [kind.__name__ for kind, _ in ALL]


def modules(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_module"]


def line_in(kind: type) -> int:
    """Of the comment "here"; of Sign for what uses it."""
    lines = Path(__file__).read_text().splitlines()
    name = "Sign(" if kind is StraightThrough else f"{kind.__name__}("
    first = next(i for i, line in enumerate(lines) if line.startswith(f"class {name}"))
    return next(i for i in range(first, len(lines)) if lines[i].endswith("# here")) + 1


@pytest.mark.parametrize(("kind", "what"), ALL, ids=IDS)
def test_in_the_models_own_forward_it_is_refused_with_the_line(
    kind: type[Layers], what: str
) -> None:
    model = kind()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError) as caught:
        trace(model)
    text = str(caught.value)
    assert text.startswith(f"{kind.__name__}.forward ")
    assert what in text
    assert f"\n  {__file__}:{line_in(kind)}: " in text
    assert text.endswith(WAYS_OUT)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [*(kind for kind, _ in ALL), Catches], ids=[*IDS, "Catches"])
def test_a_module_that_does_it_is_kept_whole(kind: type[Layers]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(kind(), nn.ReLU()))
    assert modules(trace(model)) == ["0", "1.0", "1.1"]


def test_one_that_a_forward_catches_is_refused_all_the_same() -> None:
    with pytest.raises(ModelError, match=r"^Catches\.forward takes a step inside torch\.no_grad"):
        trace(Catches())


def test_the_module_whose_forward_does_it_is_whole_not_the_one_it_calls() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return self.inner(x)

    assert modules(trace(nn.Sequential(Outer(), nn.ReLU()))) == ["0", "1"]


def test_what_is_no_change_of_what_a_module_keeps() -> None:
    """A logger's own memory, values that a config makes when asked, a list that stays the same."""

    class Config:
        width = WIDTH

        @functools.cached_property
        def scale(self) -> float:
            return 1 / self.width

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.config = nn.Linear(WIDTH, WIDTH), Config()
            self.log, self.seen = logging.getLogger("test.asks"), [1]

        def forward(self, x: Tensor) -> Tensor:
            self.log.debug("forward")
            return self.a(x) * self.config.scale * self.seen[0]

    graph = read(nn.Sequential(Asks(), Asks()))
    assert modules(graph.training) == ["0.a", "1.a"]
    graph.values.check()


def test_what_surrounds_no_step_is_no_matter() -> None:
    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = torch.ones(WIDTH) * 2
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                x = self.a(x)
            return x * scale

    assert modules(trace(Net())) == ["a"]


@pytest.mark.parametrize("kind", [Noise, PythonNoise], ids=["torch", "python"])
def test_reading_leaves_random_numbers_as_they_were(kind: type[Layers]) -> None:
    def drawn() -> list[float]:
        torch.manual_seed(3)
        random.seed(3)
        trace(nn.Sequential(kind(), nn.ReLU())) if is_read else kind()
        return [torch.rand(()).item(), random.random()]

    is_read = False
    expected = drawn()
    is_read = True
    assert drawn() == expected


# -- hooks -----------------------------------------------------------------------------------------


def own_forward(model: nn.Module) -> None:
    model.forward = lambda x: x  # type: ignore[method-assign]


class Called(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * 2


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: m.register_forward_hook(lambda *_: None), "has hooks of its own"),
        (lambda m: m.register_forward_pre_hook(lambda *_: None), "has hooks of its own"),
        (lambda m: m.register_full_backward_hook(lambda *_: None), "has hooks of its own"),
        (own_forward, "has a forward of its own"),
    ],
    ids=["hook", "pre-hook", "backward hook", "forward"],
)
def test_what_a_model_does_beside_its_forward_is_refused(
    change: Callable[[nn.Module], Any], what: str
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    change(model)
    with pytest.raises(ModelError, match=f"^Sequential {what}.*nn.Sequential\\(model\\)"):
        read(model)
    read(nn.Sequential(model))  # the way out


def test_a_call_of_its_own() -> None:
    with pytest.raises(ModelError, match=r"^Called has a __call__ of its own"):
        trace(Called())
    assert modules(trace(nn.Sequential(Called()))) == ["0.a"]


def test_a_module_with_backward_hooks_is_kept_whole() -> None:
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    inner.register_full_backward_hook(lambda *_: None)
    assert modules(trace(nn.Sequential(inner, nn.ReLU()))) == ["0", "1"]


def test_a_graph_module_is_a_model() -> None:
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    assert modules(trace(model)) == ["0", "1"]


# -- buffers ---------------------------------------------------------------------------------------


class Causal(nn.Module):
    """Attention as it is often written: a piece of the mask, as long as the batch's texts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("causal", torch.ones(16, 16).tril())

    def forward(self, x: Tensor) -> Tensor:
        assert len(self.causal) == self.causal.size(0) == 16
        length = x.size(1)
        q, k, v = self.qkv(x).split(WIDTH, dim=2)
        weights = (q @ k.transpose(1, 2)).masked_fill(
            self.causal[:length, :length] == 0, float("-inf")
        )
        return functional.softmax(weights, dim=-1) @ v


def test_pieces_of_a_buffer_whose_size_comes_with_the_batch() -> None:
    model = Causal()
    graph = trace(model)
    assert "getitem" in [node.name for node in graph.nodes]
    read_model = fx.GraphModule(model, graph)
    for length in (5, 16):
        x = torch.randn(2, length, WIDTH)
        assert torch.equal(read_model(x), model(x))


def test_a_plain_tensor_cannot_be_cut_to_what_comes_with_the_batch() -> None:
    """Nobody would guess from torch.fx's words that a buffer can."""

    class Cuts(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.plain[: x.shape[1]]

    with pytest.raises(ModelError, match=r"slice indices .* give the tensor to register_buffer"):
        trace(Cuts())


def test_rows_of_a_buffer() -> None:
    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            first, *_ = self.run
            return x * first + sum(self.run) + self.run.dim() + self.run.numel()

    model = Net()
    x = torch.randn(2, WIDTH)
    assert torch.equal(fx.GraphModule(model, trace(model))(x), model(x))


class Averages(Layers):
    """Running statistics by steps in place, the first of which knows nothing of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.count.add_(1)
        self.run.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.b(x - self.run)


def test_steps_in_place_on_buffers_are_taken_with_every_batch() -> None:
    model, plain = Averages(), Averages()
    plain.load_state_dict(model.state_dict())
    read_model = fx.GraphModule(model, trace(model))
    for _ in range(3):
        x = torch.randn(2, WIDTH)
        assert torch.equal(read_model(x), plain(x))
    assert int(model.count) == 3
    assert torch.equal(model.run, plain.run)


def test_no_cut_comes_between_a_buffer_and_a_step_in_place_on_it() -> None:
    """Beyond it the step would change a copy."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            run = self.run.mul_(0.9)
            x = self.b(x)
            run.add_(1)
            return x

    graph = read(Net())
    assert graph.units == ["mul_", "b", "add_"]
    for cut in (1, 2):
        with pytest.raises(ModelError, match=r"mul_ and add_ share"):
            check_shared(graph, [cut])


def test_an_operator_in_place_changes_its_tensor_under_every_name() -> None:
    class Net(Layers):
        def forward(self, x: Tensor, size: Tensor) -> Tensor:
            value = self.a(x)
            same = value
            same += 1
            same *= 2
            width = x.shape[0]
            width += 1
            size -= 1
            return self.b(same + value) * width + size

    model = Net()
    graph = trace(model)
    x = torch.randn(3, WIDTH)
    found = fx.GraphModule(model, graph)(x, torch.ones(1))
    assert torch.equal(found, model(x, torch.ones(1)))


def test_a_value_of_a_buffer_cannot_decide() -> None:
    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if self.count > 3 else self.b(x)

    with pytest.raises(ModelError, match=r"^Net cannot be read by torch\.fx"):
        trace(Net())
    assert modules(trace(nn.Sequential(Net(), nn.ReLU()))) == ["0", "1"]


def test_a_module_with_other_steps_in_eval_is_kept_whole() -> None:
    class Inner(Layers):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.run.mul_(0.9)
            return x - self.run

    class Late(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return x if self.training else x + 1

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Inner(), Late(), nn.ReLU())
    assert read(model).units == ["_0", "_1", "_2", "_3"]


def test_functions_of_torch_may_ask_of_what_kind_a_value_is() -> None:
    """Those that are written in C do, of all that they are given."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            n = x.size(0)
            for _ in range(20):  # also when Python has got used to it
                x = x + torch.zeros((n, WIDTH), dtype=x.dtype)
            return torch.cat([self.a(x), torch.arange(n)[:, None].expand(n, WIDTH)])

    model = Net()
    x = torch.randn(3, WIDTH)
    assert torch.equal(fx.GraphModule(model, trace(model))(x), model(x))


def note(buffer: Tensor, value: Tensor) -> None:
    buffer.add_(value.detach().mean(0))


fx.wrap("note")


def test_what_a_wrapped_function_does_is_done_though_nobody_uses_what_it_gives() -> None:
    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            note(self.run, h)
            torch._assert(h.size(0) > 1, "too few")
            return self.b(h)

    model = Net()
    read_model = fx.GraphModule(model, trace(model))
    read_model(torch.ones(2, WIDTH))
    assert not torch.equal(model.run, torch.ones(WIDTH))
    with pytest.raises(AssertionError, match="too few"):
        read_model(torch.ones(1, WIDTH))


# -- what is kept elsewhere ------------------------------------------------------------------------


KEPT: dict[str, Any] = {}


class KeepsOutside(Layers):
    """Between two readings it kept what stands for a value, and gave that to real batches."""

    def forward(self, x: Tensor) -> Tensor:
        if "inverse" not in KEPT:
            KEPT["inverse"] = torch.linalg.inv(self.run.diag())
        return self.b(x) @ KEPT["inverse"]


class KeepsByCache(Layers):
    @functools.cache  # noqa: B019 (that is the point)
    def inverse(self) -> Tensor:
        return torch.linalg.inv(self.run.diag())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) @ self.inverse()


@pytest.mark.parametrize("kind", [KeepsOutside, KeepsByCache])
@pytest.mark.parametrize("is_inside", [True, False])
def test_what_it_computed_is_kept_where_nobody_can_put_it_back(
    kind: type[Layers], is_inside: bool
) -> None:
    KEPT.clear()
    model = nn.Sequential(nn.Tanh(), kind()) if is_inside else kind()
    with pytest.raises(ModelError, match="keeps what it has computed for later calls"):
        trace(model)


@pytest.mark.parametrize("name", ["T", "mT", "real"])
def test_an_attribute_that_is_a_tensor_is_a_step_where_it_is_named(name: str) -> None:
    """torch.fx has the step where it is used first: gradients were summed in another order."""

    class Named(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            named = getattr(x, name)
            return torch.sin(x) + torch.tanh(x) + named.sum()

    steps = [node.name for node in trace(Named()).nodes]
    assert steps.index("getattr_1") < steps.index("sin")
