"""Plain values that steps were read with: who changes one is told, who changes others is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.pipeline.fixed import FixedNones
from shoal.pipeline.graph import read


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.tau, self.sizes, self.epoch, self.by_name = 1.0, [1, 2], 0, {"a": 2}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / self.tau * self.sizes[0] * self.by_name["a"]


class Branches(nn.Module):
    """Kept whole: what it has is asked for in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.tau if x.sum() > 0 else x


class Config:
    """Of the user's own."""

    def __init__(self) -> None:
        self.tau, self.epoch, self.inner = 1.0, 0, {"k": {"tau": 1.0}}
        self.scale = 1.0


@dataclass(slots=True)
class Page:
    number: float = 1.0


class Shown:
    """By a property."""

    def __init__(self) -> None:
        self._hidden = 1.0

    @property
    def tau(self) -> float:
        return self._hidden


def given(page: Page) -> float:
    return page.number


def clip(x: Tensor, at: float) -> Tensor:
    return x.clamp(max=at)


class Takes(nn.Module):
    """From all kinds of things."""

    beta: Tensor
    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.config, self.act = nn.Linear(2, 2), Config(), torch.relu
        self.words, self.page, self.clipped = {"tau": 1.0, "epoch": 0}, Page(), partial(clip, at=9)
        self.log, self.shown, self.last = logging.getLogger("a model"), Shown(), nn.Tanh()
        self.number, self.pairs, self.plain = numpy.float32(1), ((1.0, 2.0),), torch.tensor(1.0)
        self.register_buffer("beta", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.layer(x)) * self.config.tau * float(self.number) * self.pairs[0][0]
        x = self.clipped(x) * self.words["tau"] * self.of_class * given(self.page)
        self.log.debug("read")
        return (
            self.last(self.scaled(x))
            * self.shown.tau
            * self.plain
            * self.beta
            * self.config.inner["k"]["tau"]
        )

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.config.scale


CHANGES: dict[str, Callable[[Takes], object]] = {
    "config of the model was {tau: 1.0,": lambda model: setattr(model.config, "tau", 2.0),
    "when it was read, and is {tau: 1.0, inner:": lambda model: setattr(model.config, "scale", 2.0),
    "words of the model was": lambda model: model.words.update(tau=2.0),
    "page of the model was {number: 1.0}": lambda model: setattr(model.page, "number", 2.0),
    "clipped of the model was": lambda model: setattr(model, "clipped", partial(clip, at=1)),
    "shown of the model was {_hidden: 1.0}": lambda model: setattr(model.shown, "_hidden", 2.0),
    "last of the model was Tanh()": lambda model: setattr(model, "last", nn.ReLU()),
    "of_class of the model was": lambda model: setattr(model, "of_class", 2.0),
    "config of the model was": lambda model: model.config.inner["k"].update(tau=2.0),
    "number of the model was": lambda model: setattr(model, "number", numpy.float32(2)),
    "pairs of the model was": lambda model: setattr(model, "pairs", ((2.0, 2.0),)),
    "plain of the model was tensor(1.) when it was read, and is tensor(2.) now": lambda model: (
        setattr(model, "plain", torch.tensor(2.0))
    ),
    "beta of the model was tensor(1.)": lambda model: setattr(model, "beta", torch.tensor(2.0)),
    "act of the model was relu when it was read, and is tanh now": lambda model: setattr(
        model, "act", torch.tanh
    ),
}


@pytest.mark.parametrize(("words", "change"), CHANGES.items())
def test_whatever_it_was_read_from(words: str, change: Callable[[Takes], object]) -> None:
    model = Takes()
    values = read(model).values
    model.config.epoch += 1  # no words of forward()'s
    model.words["epoch"] += 1
    model.log.setLevel(logging.ERROR)
    model.plain.fill_(1)
    model.beta.mul_(1)
    values.check()
    change(model)
    with pytest.raises(ModelError) as caught:
        values.check()
    assert words in str(caught.value)


def test_what_is_none_in_one_batch_is_none_in_all() -> None:
    nones = FixedNones([("x_1", "x"), ("mask_1", "mask")])
    nones.check({"x_1": [torch.ones(2), None], "mask_1": {"a": 1}})
    nones.check({"x_1": [torch.zeros(3), None], "mask_1": {"a": 2}})
    with pytest.raises(ModelError, match=r"x: mask\['a'\] is None, and was not in the first batch"):
        nones.check({"x_1": [torch.ones(2), None], "mask_1": {"a": None}})
    with pytest.raises(ModelError, match=r"x: x\[1\] is not None, and was in the first batch"):
        nones.check({"x_1": [torch.ones(2), 1], "mask_1": {"a": 1}})


@pytest.mark.parametrize(
    ("name", "value"), [("tau", 0.5), ("tau", 1), ("sizes", [3, 2]), ("by_name", {"a": 3})]
)
def test_a_value_that_was_read_and_is_changed(name: str, value: Any) -> None:
    model = nn.Sequential(Scales(), nn.Tanh())
    values = read(model).values
    values.check()
    setattr(model[0], name, value)
    with pytest.raises(ModelError, match=rf"0\.{name} of the model was .* and is .* now"):
        values.check()


def test_a_list_that_is_changed_in_place() -> None:
    model = Scales()
    values = read(model).values
    model.sizes[0] = 7
    with pytest.raises(ModelError, match=r"sizes of the model was \[1, 2\]"):
        values.check()


def test_what_forward_does_not_ask_for_is_the_scripts_own() -> None:
    model = nn.Sequential(Scales(), Branches())
    values = read(model).values
    model[0].epoch += 1
    model[1].tau = 0.5
    values.check()


def test_a_model_that_is_gone_cannot_change() -> None:
    model = Scales()
    values = read(model).values
    del model
    values.check()


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h if any(p.requires_grad for p in self.a.parameters()) else h.detach())


def test_whether_a_weight_is_trained_is_no_question_for_a_forward() -> None:
    with pytest.raises(ModelError, match="asks whether a weight is trained") as caught:
        read(Asks())
    assert "any(p.requires_grad for p in" in str(caught.value)
    graph = read(nn.Sequential(nn.Tanh(), Asks()))  # but one that is kept whole may ask
    assert graph.units == ["_0", "_1"]
    assert torch.is_grad_enabled()
