"""What optimizers hold, tried with a small weight, against what they say themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.pipeline.footprint import ADAMS, bytes_per_weight_byte, state_per_weight_byte


@pytest.mark.parametrize(
    ("kind", "options", "held"),
    [
        ("SGD", {"lr": 0.1}, 0),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, 1),
        ("Adam", {}, 2),
        ("AdamW", {"amsgrad": True}, 3),
        ("Adagrad", {}, 1),
        ("SparseAdam", {}, 2),
    ],
)
def test_state_of_an_optimizer(kind: str, options: dict[str, Any], held: float) -> None:
    found = state_per_weight_byte(getattr(torch.optim, kind), options)
    assert found == pytest.approx(held, abs=0.01)


def test_what_lbfgs_gathers() -> None:
    """Steps and changes of gradients, up to its history, and the vectors of now."""
    weight = nn.Parameter(torch.linspace(-1, 1, 50, dtype=torch.float64))
    made = torch.optim.LBFGS([weight], lr=0.1, max_iter=30, history_size=4)

    def evaluate() -> torch.Tensor:
        made.zero_grad()
        loss = ((weight - 3) ** 4).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    made.step(evaluate)  # type: ignore[no-untyped-call]
    (state,) = made.state.values()
    vectors = [*state["old_dirs"], *state["old_stps"], state["d"], state["prev_flat_grad"]]
    assert len(vectors) == 2 * 4 + 2
    assert state_per_weight_byte(torch.optim.LBFGS, {"history_size": 4}) == len(vectors) + 2


def test_a_function_that_makes_one_is_tried_too() -> None:
    """Else a stage would hold many times its limit."""

    def with_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        flat = [p for p in parameters if p.ndim < 2]
        groups = [{"params": flat}, {"params": [p for p in parameters if p.ndim >= 2]}]
        return torch.optim.AdamW(groups, amsgrad=True)

    def looks_for_others(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameters[7]], lr=0.1)

    assert state_per_weight_byte(lambda ps: torch.optim.LBFGS(ps, history_size=9), {}) == 22
    assert state_per_weight_byte(with_groups, {}) == pytest.approx(3, abs=0.01)
    assert state_per_weight_byte(looks_for_others, {}) == ADAMS


def test_all_of_it() -> None:
    assert bytes_per_weight_byte(None, {}, 1) == 2
    assert bytes_per_weight_byte(lambda ps: torch.optim.SGD(ps, lr=0.1), {}, 1) == 2
    assert bytes_per_weight_byte(torch.optim.SGD, {"lr": 0.1}, 2) == 4
