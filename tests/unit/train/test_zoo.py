"""The nets are those of the tutorials: sizes worked out by hand, shapes, the skip."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.pipeline.graph import read
from shoal.settings import TrainSettings
from shoal.train.build import build_model
from shoal.train.models import zoo
from shoal.train.models.catalog import MODELS

# Each layer: weights + biases (batch norm: scale + shift).
PARAMETERS = {
    "mnist-cnn": (1 * 32 * 9 + 32)
    + (32 * 64 * 9 + 64)
    + (64 * 128 * 9 + 128)
    + (128 * 3 * 3 * 625 + 625)
    + (625 * 10 + 10),
    "convnet": (1 * 16 * 25 + 16)
    + (16 + 16)
    + (16 * 32 * 25 + 32)
    + (32 + 32)
    + (7 * 7 * 32 * 10 + 10),
    "tutorial-cnn": (1 * 10 * 25 + 10) + (10 * 20 * 25 + 20) + (320 * 50 + 50) + (50 * 10 + 10),
    "residual-mlp": (1 * 512 + 512) + 3 * (512 * 512 + 512) + (512 * 1 + 1),
}
TOTALS = {
    "mnist-cnn": 819_557,
    "convnet": 29_034,
    "tutorial-cnn": 21_840,
    "residual-mlp": 789_505,
}


def build(name: str, seed: int = 0) -> nn.Module:
    return build_model(TrainSettings(model=name, seed=seed))


def test_the_catalogue_lists_all_of_them() -> None:
    assert set(MODELS) == set(PARAMETERS)
    nets = {n for n, v in vars(zoo).items() if isinstance(v, type) and issubclass(v, nn.Module)}
    assert {entry.factory for entry in MODELS.values()} == nets


@pytest.mark.parametrize("name", MODELS)
def test_how_many_parameters(name: str) -> None:
    assert PARAMETERS[name] == TOTALS[name]
    assert sum(p.numel() for p in build(name).parameters()) == TOTALS[name]


@pytest.mark.parametrize("name", MODELS)
def test_as_many_steps_as_the_catalogue_says(name: str) -> None:
    assert len(read(build(name)).units) == MODELS[name].num_steps


@pytest.mark.parametrize("name", MODELS)
def test_takes_the_shape_that_the_catalogue_says(name: str) -> None:
    x = torch.rand(3, *MODELS[name].input_shape)
    assert build(name)(x).shape == ((3, 1) if name == "residual-mlp" else (3, 10))


@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_follow_from_the_seed(name: str) -> None:
    one, same, other = build(name, 1), build(name, 1), build(name, 2)
    pairs = list(zip(one.parameters(), same.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q in pairs)
    first = next(iter(one.parameters()))
    assert not torch.equal(first, next(iter(other.parameters())))


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_learns(name: str) -> None:
    model = build(name).eval()  # no dropout: nothing may be missed by chance
    model(torch.rand(8, *MODELS[name].input_shape)).pow(2).sum().backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == []


def test_the_residual_mlp_has_its_skip() -> None:
    """What fc2 gives is added to what fc4 takes: with fc3 silenced, fc2 still reaches the end."""
    model = build("residual-mlp")
    assert isinstance(model, zoo.ResidualMlp)
    with torch.no_grad():
        model.fc3.weight.zero_()
        model.fc3.bias.zero_()
        x = torch.rand(5, 1)
        skip = model.fc2(F.relu(model.fc1(x)))
        by_hand = torch.sigmoid(model.fc5(F.relu(model.fc4(skip))))
        torch.testing.assert_close(model(x), by_hand)
    assert by_hand.std() > 0, "it does depend on x"


def test_batch_norm_and_dropout_are_where_they_should_be() -> None:
    def kinds(name: str) -> list[str]:
        return [type(m).__name__ for m in build(name).modules()]

    assert kinds("convnet").count("BatchNorm2d") == 2
    assert {"Dropout2d", "Dropout"} <= set(kinds("tutorial-cnn"))
    for name in ("mnist-cnn", "residual-mlp"):
        assert not [kind for kind in kinds(name) if "Dropout" in kind or "Norm" in kind]
