"""What is put together of all stages."""

from __future__ import annotations

import torch

from shoal.pipeline.whole import total_norm

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def test_the_norm_of_gradients_of_several_dtypes_is_torchs_own_to_the_bit() -> None:
    """Which puts the norms together dtype by dtype."""
    torch.manual_seed(0)
    for number in range(100):
        gradients = [torch.randn(7).to(DTYPES[(number + k * k) % 3]) for k in range(6)]
        found = total_norm([torch.linalg.vector_norm(each) for each in gradients])
        assert torch.equal(found, torch.nn.utils.get_total_norm(gradients))
