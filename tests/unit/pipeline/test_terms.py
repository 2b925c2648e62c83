"""What a user says of a pipeline, looked at before anything moves: terms, optimizers, shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from shoal.errors import ModelError
from shoal.pipeline.layers import Layer, model_of
from shoal.pipeline.partition import Costs, Unit, Value, cut, cut_for_turns
from shoal.pipeline.plan import Plan, check_optimizer, terms

# -- terms -----------------------------------------------------------------------------------------

PLAN = Plan(stages=2, microbatches=4, loss=F.mse_loss, optimizer=torch.optim.SGD)


@pytest.mark.parametrize(
    "other",
    [
        {"schedule": "gpipe"},
        {"microbatches": 3},
        {"reduction": "sum"},
        {"clip_norm": 1.0},
        {"optimizer": None},
        {"loss": None},
        {"seed": 7},
        {"stages": 3},
    ],
)
def test_terms_that_differ(other: dict[str, Any]) -> None:
    assert terms(replace(PLAN, **other)) != terms(PLAN)


def test_terms_are_the_same_where_only_objects_differ() -> None:
    """A loss may be a lambda, which is another object in every process."""
    assert terms(replace(PLAN, loss=lambda a, b: (a - b).sum())) == terms(PLAN)


# -- optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Rprop", "NAdam"])
def test_optimizers_that_step_by_themselves(kind: str) -> None:
    check_optimizer(getattr(torch.optim, kind)([nn.Parameter(torch.zeros(2))]))


def test_an_optimizer_that_needs_the_loss_again() -> None:
    with pytest.raises(ModelError, match=r"LBFGS: its step\(\) needs a closure"):
        check_optimizer(torch.optim.LBFGS([nn.Parameter(torch.zeros(2))]))


# -- shapes that a list says -----------------------------------------------------------------------


def linear(a: int, b: int, shapes: Any, **words: Any) -> tuple[Any, ...]:
    return nn.Linear, {"in_features": a, "out_features": b, **words}, shapes


def faults_of(*layers: Any) -> list[str]:
    with pytest.raises(ModelError) as caught:
        model_of(layers)
    return caught.value.faults


def test_every_shape_that_does_not_fit_is_reported() -> None:
    found = faults_of(
        linear(1, 16, (32, 2)),
        (nn.ReLU, {}, (32, 17)),
        linear(17, 3, (32, 17), out_variables=["r"]),
        linear(3, 16, [(32, 3), (32, 16)], dependencies=["r"]),
        linear(16, 2, (32, 16), dependencies=["unknown"]),
    )
    assert len(found) == 4
    assert "layer 4 (Linear): takes 'unknown'" in found[0]
    assert found[1].startswith("layer 0 (Linear): does not take (32, 2): ")
    assert found[2] == "layer 3 (Linear): the list says that r is (32, 16), and it is (32, 3)"
    assert found[3].startswith("layer 3 (Linear): does not take (32, 3), (32, 16): ")


def test_a_shape_other_than_what_comes() -> None:
    assert faults_of(linear(1, 16, (32, 1)), (nn.ReLU, {}, (32, 17))) == [
        "layer 1 (ReLU): the list says that its input is (32, 17), and it is (32, 16)"
    ]


def test_what_comes_is_known_further_on_than_it_is_said() -> None:
    first, *others = faults_of(linear(1, 16, (32, 1)), nn.ReLU(), Layer(nn.Linear, 17, 2))
    assert first.startswith("layer 2 (Linear): does not take (32, 16): ")
    assert others == []


class Choosing(nn.Module):
    """Looks at values, of which a shape has none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Holding(nn.Sequential):
    """The user's own within torch's."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Choosing()))


def test_a_lazy_layer_is_left_as_it_is() -> None:
    model = model_of([(nn.LazyLinear, {"out_features": 3}, (32, 4))])
    assert is_lazy(next(model.parameters()))
    assert model(torch.ones(2, 4)).shape == (2, 3)


@pytest.mark.parametrize(
    "layers",
    [
        [linear(4, 8, (32, 4)), linear(8, 2, (128, 8))],  # batches may differ
        [(nn.Embedding, {"num_embeddings": 9, "embedding_dim": 4}, (32, 7)), linear(4, 2, ())],
        [linear(4, 8, (-1, 4)), linear(8, 2, (-1, 8))],
        [linear(4, 8, (32, 4)), (Choosing, {}, (32, 8)), linear(8, 2, (32, 8))],
        [(nn.BatchNorm1d, {"num_features": 4}, (32, 4)), (nn.Dropout, {}, (32, 4))],
        [(nn.LSTM, {"input_size": 4, "hidden_size": 4}, (7, 2, 4)), (nn.Identity, {}, ())],
        [Layer(nn.Linear, 4, 8), Layer(nn.Linear, 9, 2)],  # nothing is said
        [(nn.Linear, {"in_features": 4, "out_features": 2, "dtype": torch.float64}, (32, 4))],
        [linear(4, 8, (32, 4)), (Holding, {}, (32, 8))],
    ],
)
def test_shapes_that_are_no_fault(layers: list[Any]) -> None:
    torch.manual_seed(1)
    model = model_of(layers)
    torch.manual_seed(1)
    again = [Layer(x[0], **x[1]).build() if isinstance(x, tuple) else x.build() for x in layers]
    # Looking at shapes draws no numbers, and changes nothing.
    for tensor, same in zip(
        model.state_dict().values(), nn.Sequential(*again).state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, same)


# -- cuts where stages take turns ------------------------------------------------------------------


def row(*seconds: float) -> list[Unit]:
    return [Unit(f"u{i}", forward_s=each) for i, each in enumerate(seconds)]


def passing(*sizes: int) -> list[Value]:
    """Each from one unit to the next."""
    return [Value(i, (i + 1,), size) for i, size in enumerate(sizes)]


COSTS = Costs(seconds_per_byte=0.01, slack=1.0)


def test_in_turns_every_stage_has_something_to_do() -> None:
    """Least crosses before the units that compute next to nothing."""
    units, values = row(4, 4, 4, 0.01, 0.01), passing(9, 9, 1, 1)
    assert cut(units, values, 3, COSTS) == [1, 3]
    assert cut_for_turns(units, values, 3, COSTS) == [1, 2]


def test_in_turns_the_cut_is_where_least_crosses_if_it_may() -> None:
    units, values = row(4, 4, 4, 4), passing(5, 50, 1)
    assert cut_for_turns(units, values, 2, COSTS) == [3]


def test_in_turns_where_stages_are_more_than_the_work() -> None:
    assert len(cut_for_turns(row(4, 0, 0), passing(1, 1), 3, COSTS)) == 2
