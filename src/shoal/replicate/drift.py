"""Models whose copies would not stay equal, though their gradients are."""

from __future__ import annotations

from torch import nn

from shoal.errors import ModelError


def check_no_drift(model: nn.Module) -> None:
    """Raises ModelError where a forward pass changes weights, of its own samples' rows only."""
    tables = [
        name
        for name, each in model.named_modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None
    ]
    if tables:
        raise ModelError(
            f"{', '.join(tables)}: max_norm= makes rows shorter in the forward pass, and each "
            "replica those that its own samples use: their weights would no longer be equal. Leave "
            "it out, and after each step do torch.renorm(weight, 2, 0, max_norm, out=weight) on "
            "every rank, under torch.no_grad()."
        )
