"""Plain values that steps were read with: who changes one is told, who changes others is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import ModelError
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
