"""A loss as data, for the worker that has the last stage."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from shoal.errors import ModelError
from shoal.pipeline.portable import pack, to_data
from shoal.pipeline.trace import WAYS_OUT, trace

Loss = Callable[[Any, Any], torch.Tensor] | nn.Module
"""A function of torch.nn.functional, a module of torch.nn, or any function that fx can trace."""


IGNORED = -100
"""The target that torch's own losses ignore, unless told otherwise."""


def loss_to_data(loss: Loss) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Raises ModelError for what workers do not know. With the tensors that it has."""
    calling = _Calling(loss)
    try:
        traced = fx.GraphModule(calling, trace(calling))
    except ModelError as error:
        why = re.sub(r"^_Calling(\.forward)?", "", str(error).removesuffix(WAYS_OUT)).strip()
        raise ModelError(
            f"loss: {why}\n"
            "Use a function of torch.nn.functional or a module of torch.nn, or compute the loss "
            "here: loss(model(x), y).backward()."
        ) from error
    returned = traced.graph.output_node().args[0]
    if not isinstance(returned, fx.Node):
        what = "nothing" if returned is None else f"a {type(returned).__name__}"
        raise ModelError(f"loss: it returned {what}; it must return a tensor, of one number.")
    data, tensors = to_data(traced)
    return pack(data), tensors


def check_mean(loss: Loss, target: Any, reduction: str) -> None:
    """Raises ModelError for a loss of torch's that is not what `reduction` says, over samples.

    Those of micro-batches would be put together to something else than that of the batch.
    """
    said = getattr(loss, "reduction", reduction)
    if said != reduction:
        raise ModelError(
            f"loss: it has reduction={said!r}, and train_step has {reduction!r}: with several "
            "micro-batches both must be the same, 'mean' or 'sum'."
        )
    is_of_classes = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    is_of_classes = is_of_classes or loss in (nn.functional.cross_entropy, nn.functional.nll_loss)
    if reduction != "mean" or not is_of_classes or not isinstance(target, torch.Tensor):
        return
    if target.is_floating_point():  # probabilities: each sample counts as one
        return
    what = None
    if getattr(loss, "weight", None) is not None:
        what = "it weighs classes"
    elif (target == getattr(loss, "ignore_index", IGNORED)).any():
        what = "it ignores some of the targets"
    if what:
        raise ModelError(
            f"loss: {what}, so it is no mean over samples, and cannot be put together from "
            "those of micro-batches. Use microbatches=1, or compute it here: "
            "loss(model(x), y).backward()."
        )


class _Calling(nn.Module):
    """A loss, of whatever kind, as a module."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Any, target: Any) -> Any:
        return self.loss(output, target)
