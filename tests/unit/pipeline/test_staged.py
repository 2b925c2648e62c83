"""The steps of a stage as a module: the names of its layers, both modes, and who keeps its mode."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.pipeline.graph import check_shared, read
from shoal.pipeline.in_place import check_in_place
from shoal.pipeline.routes import route
from shoal.pipeline.split import stage_module, values_kept
from shoal.pipeline.staged import StageModule

WIDTH = 4


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def whole(model: nn.Module) -> StageModule:
    graph = read(model)
    return stage_module(graph, route(graph, []), 0)


class Called(nn.Module):
    """A layer, a parameter and a step of any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, square())
        self.inner = nn.Module()
        setattr(self.inner, name, nn.Parameter(torch.randn(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(getattr(self, self.name)(x)) * getattr(self.inner, self.name)


@pytest.mark.parametrize(
    "name", ["code", "graph", "meta", "output", "graphs", "forwards", "steps", "input"]
)
def test_a_layer_may_have_any_name(name: str) -> None:
    """fx.GraphModule has some of these for itself."""
    model = Called(name)
    stage, x = whole(model), torch.randn(2, WIDTH)
    assert torch.equal(stage(x)[0], model(x))
    assert set(stage.state_dict()) == set(model.state_dict())
    graph = read(model)
    for number, part in enumerate(stage_module(graph, route(graph, [1]), n) for n in range(2)):
        assert part(x), number


def test_a_layer_that_is_called_like_a_word_of_python() -> None:
    with pytest.raises(ModelError, match="called like a word of Python's"):
        whole(Called("lambda"))


def test_it_has_what_only_eval_uses() -> None:
    """Weights that are used in eval() only were not part of the state that was loaded."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.w = square(), nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.register_buffer("average", torch.zeros(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.a(x)), self.w if self.training else self.average)

    model = Averaged()
    stage, x = whole(model), torch.randn(2, WIDTH)
    assert set(stage.state_dict()) == {"a.weight", "a.bias", "w", "average"}
    stage.load_state_dict({**stage.state_dict(), "average": torch.ones(WIDTH, WIDTH)})
    for mode in (True, False):
        assert torch.equal(stage.train(mode)(x)[0], model.train(mode)(x))


class EvalShares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = square(), square()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.a(x)), self.b.weight if self.training else self.a.weight)


def test_weights_that_only_eval_shares_stay_together() -> None:
    with pytest.raises(ModelError, match=r"a and linear share parameters \(a.weight\)"):
        check_shared(read(EvalShares()), [2])


class EvalChanges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = square(), square()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(F.relu(h, inplace=not self.training)) + h


def test_what_only_eval_changes_in_place_is_not_parted() -> None:
    with pytest.raises(ModelError, match="relu changes a in place"):
        check_in_place(read(EvalChanges()), [3])


class FrozenNorm(nn.Module):
    """Keeps a batch norm as it is, also in train()."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = square(), nn.BatchNorm1d(WIDTH), square()

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))


def test_a_train_of_the_users_is_followed() -> None:
    model = nn.Sequential(FrozenNorm(), square())
    stage = whole(model)
    for mode in (True, False, True):
        assert stage.train(mode) is stage
        assert stage.get_submodule("0.norm").training is False
        assert stage.get_submodule("0.b").training is mode
        assert stage.training is mode


def test_a_copy_of_it_works() -> None:
    model = nn.Sequential(square(), nn.Tanh())
    stage, x = whole(model), torch.randn(2, WIDTH)
    assert torch.equal(copy.deepcopy(stage)(x)[0], model(x))


class Remembers(nn.Module):
    """Kept whole; gives on memory that it keeps and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.memory.add_(x.detach().mean(0))
        return (x, self.memory) if not x.isnan().any() else (x, x)


def test_memory_that_a_module_may_keep_is_known() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.memory, self.b = square(), Remembers(), square()

        def forward(self, x: Tensor) -> Tensor:
            h, kept = self.memory(self.a(x))
            return self.b(h) + kept

    graph = read(Net())
    cut = graph.units.index("b")
    assert values_kept(graph, route(graph, [cut]), 0) == ["getitem", "getitem_1"]
    assert values_kept(graph, route(graph, [1]), 0) == []
