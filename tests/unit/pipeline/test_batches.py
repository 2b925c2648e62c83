"""What is said of a batch that does not fit the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.errors import ModelError
from shoal.pipeline.batches import Batches
from shoal.pipeline.plan import Plan

BATCHES = Batches([("x", "x"), ("bias_1", "bias")], Plan(stages=2))


@pytest.mark.parametrize("x", [(torch.ones(4, 2), None), {"x": torch.ones(4, 2), "bias": None}])
def test_an_input_that_is_none_is_named_where_a_step_cannot_take_it(x: Any) -> None:
    """`if bias is not None` was read as true, and all that was said is that nobody adds None."""
    told = r"step add .*\nx: bias is None here.* inputs="
    with pytest.raises(ModelError, match=told), BATCHES.explaining(x):
        raise ModelError("step add of the model does not take what comes to it")


@pytest.mark.parametrize("x", [(torch.ones(4, 2), torch.ones(4, 2)), None, torch.ones(4, 2)])
def test_other_faults_stay_as_they_are(x: Any) -> None:
    """None for the whole batch is that of a rank which has none."""
    with pytest.raises(ModelError, match=r"^step add$"), BATCHES.explaining(x):
        raise ModelError("step add")
