"""Old weights of a model that was trained in a pipeline are nobody's to begin with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.errors import ModelError
from shoal.pipeline.stale import check_not_stale, note_trained


def trained() -> nn.Sequential:
    """On rank 0, which has the first layer."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    check_not_stale(model)
    note_trained(model, model[0])
    return model


def test_weights_of_other_stages_are_old() -> None:
    with pytest.raises(
        ModelError, match=r"still has the old weights of other stages \(2\.weight and 1"
    ):
        check_not_stale(trained())


def test_once_the_trained_ones_were_loaded_they_are_not() -> None:
    model = trained()
    model.load_state_dict({name: torch.ones_like(t) for name, t in model.state_dict().items()})
    check_not_stale(model)


def test_one_that_was_left_out_is() -> None:
    model = trained()
    model.load_state_dict({"2.weight": torch.ones(2, 2)}, strict=False)
    with pytest.raises(ModelError, match=r"\(2\.bias\)"):
        check_not_stale(model)
