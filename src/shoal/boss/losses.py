"""A loss as data, for the worker that has the last stage."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx, nn

from shoal.errors import ModelError
from shoal.pipeline.losses import Loss
from shoal.pipeline.portable import pack, to_data
from shoal.pipeline.staged import StageModule
from shoal.pipeline.trace import WAYS_OUT, trace


def loss_to_data(loss: Loss) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Raises ModelError for what workers do not know. With the tensors that it has.

    loss: a function of torch.nn.functional, a module of torch.nn, or one that fx can trace.
    """
    calling = _Calling(loss)
    try:
        steps = trace(calling)
    except ModelError as error:
        why = re.sub(r"^_Calling(\.forward)?", "", str(error).removesuffix(WAYS_OUT)).strip()
        raise ModelError(
            f"loss: {why}\n"
            "Use a function of torch.nn.functional or a module of torch.nn, or compute the loss "
            "here: loss(model(x), y).backward()."
        ) from error
    returned = steps.output_node().args[0]
    if not isinstance(returned, fx.Node):
        what = f"a {type(returned).__name__}"
        raise ModelError(f"loss: it returned {what}; it must return a tensor, of one number.")
    data, tensors = to_data(StageModule(calling, steps))
    return pack(data), tensors


class _Calling(nn.Module):
    """A loss, of whatever kind, as a module."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Any, target: Any) -> Any:
        return self.loss(output, target)
