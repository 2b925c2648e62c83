"""What a model holds is as it was after it has been tried."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from trees import same

from shoal.pipeline import reach
from shoal.pipeline.graph import read
from shoal.pipeline.keeping import as_it_was
from shoal.pipeline.reach import reachable


@dataclass
class Settings:
    """Of the user's own: an object that is no module."""

    step: int = 0
    seen: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Slots:
    step: int = 0


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.number, self.text = 1, "a"
        self.plain = torch.zeros(3)
        self.row, self.table, self.group = [1], {"a": [1]}, {1}
        self.queue, self.counts = deque([1], maxlen=2), Counter(a=1)
        self.settings = Settings()
        self.hidden = [nn.Linear(2, 2)]
        self.dice, self.torch_dice = random.Random(1), torch.Generator().manual_seed(1)
        self.numpy_dice, self.old_dice = numpy.random.default_rng(1), numpy.random.RandomState(1)
        self.slots, self.array = Slots(), numpy.zeros(2)
        self.register_buffer("kept", torch.ones(3))


def snapshot(model: Holds) -> list[Any]:
    return [
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [model.number, model.text, list(model.row), {k: list(v) for k, v in model.table.items()}],
        [set(model.group), list(model.queue), dict(model.counts)],
        [model.settings.step, list(model.settings.seen), model.plain.clone()],
        [model.dice.getstate(), model.torch_dice.get_state(), torch.random.get_rng_state()],
        [random.getstate(), sorted(vars(model)), sorted(model._buffers), model.layer.weight.grad],
        model.hidden[0].weight.requires_grad,
        [model.slots.step, model.array.tolist(), str(model.numpy_dice.bit_generator.state)],
        [str(model.old_dice.get_state()), DICE.getstate(), GLOBAL_DICE.get_state()],
    ]


DICE, GLOBAL_DICE = random.Random(2), torch.Generator()


def change(model: Holds) -> None:
    """All that a forward() might."""
    model.slots.step += 1
    model.array += 1
    model.numpy_dice.random()
    model.old_dice.rand()
    DICE.random()
    torch.rand((), generator=GLOBAL_DICE)
    model.number, model.text, model.new = 2, "b", 3
    del model.plain
    model.row.append(2)
    model.table["a"].append(2)
    model.table["b"] = []
    model.group.add(2)
    model.queue.extend([2, 3])
    model.counts["b"] += 1
    model.settings.step += 1
    model.settings.seen.append(0.5)
    model.kept = model.kept + 1
    model.register_buffer("another", torch.ones(1))
    model.norm(torch.randn(4, 3))
    model.layer(torch.randn(4, 3)).sum().backward()
    model.hidden[0].requires_grad_(False)
    model.dice.random()
    torch.rand(1, generator=model.torch_dice)
    random.random()


def test_everything_is_put_back() -> None:
    model = Holds()
    held = [model.row, model.table, model.kept, model.plain, model.settings]
    before = snapshot(model)
    with as_it_was(model):
        change(model)
    assert same(snapshot(model), before)
    now = [model.row, model.table, model.kept, model.plain, model.settings]
    assert all(one is other for one, other in zip(now, held, strict=True))


def test_also_after_an_error() -> None:
    model = Holds()

    def fail() -> None:
        with as_it_was(model):
            model.number = 2
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert model.number == 1


@pytest.mark.parametrize("with_weights", [True, False])
def test_weights_only_if_asked_for(with_weights: bool) -> None:
    model = Holds()
    before = model.layer.weight.detach().clone()
    with as_it_was(model, with_weights=with_weights):
        model.layer.weight.data.add_(1)
    assert torch.equal(model.layer.weight, before) == with_weights


def test_a_model_that_leads_to_very_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first things are found, and no more time is spent than on so many."""
    monkeypatch.setattr(reach, "MAX_THINGS", 50)
    model = nn.Linear(2, 2)
    model.data_set = [[number] for number in range(1000)]  # type: ignore[assignment]
    assert len(reachable(model)) == 50


def test_a_model_that_leads_to_itself() -> None:
    model = nn.Linear(2, 2)
    model.row = [model]  # type: ignore[assignment]
    model.row.append(model.row)  # type: ignore[operator]
    with as_it_was(model):
        model.row.append(1)  # type: ignore[operator]
    assert len(model.row) == 2  # type: ignore[arg-type]


class Counts(nn.Module):
    """Kept whole, with counters that no attribute shows."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.bank = {"calls": 0}, []

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"] += 1
        self.bank.append(x)
        return x if x.sum() > 0 else -x


def test_reading_a_model_does_not_count() -> None:
    """Proxies were left in its lists, and the first batch was the fourth."""
    model = nn.Sequential(nn.Linear(2, 2), Counts())
    read(model)
    assert model[1].state == {"calls": 0}
    assert model[1].bank == []
