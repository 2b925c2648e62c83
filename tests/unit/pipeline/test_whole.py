"""What is put together of all stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import shoal
from shoal.errors import ModelError
from shoal.pipeline.whole import total_norm

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def test_the_norm_of_gradients_of_several_dtypes_is_torchs_own_to_the_bit() -> None:
    """Which puts the norms together dtype by dtype."""
    torch.manual_seed(0)
    for number in range(100):
        gradients = [torch.randn(7).to(DTYPES[(number + k * k) % 3]) for k in range(6)]
        found = total_norm([torch.linalg.vector_norm(each) for each in gradients])
        assert torch.equal(found, torch.nn.utils.get_total_norm(gradients))


def test_a_state_with_other_names_than_the_models_is_refused_by_name() -> None:
    """Pruning puts weight_orig and weight_mask in the place of weight: it was a KeyError."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with shoal.join() as crew:
        pipe = crew.pipeline(net, stages=1)
        layer = pipe.module.get_submodule("1")
        prune.l1_unstructured(layer, "weight", amount=0.5)
        with pytest.raises(ModelError, match=r"no 1\.weight any more, but 1\.weight_orig, 1\.wei"):
            pipe.state_dict()
        prune.remove(layer, "weight")
        assert pipe.state_dict().keys() == net.state_dict().keys()
