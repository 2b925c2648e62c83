"""A loss as data, for the worker that has the last stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from shoal.pipeline.portable import pack, to_data

Loss = Callable[[Any, Any], torch.Tensor] | nn.Module
"""A function of torch.nn.functional, a module of torch.nn, or any function that fx can trace."""


def loss_to_data(loss: Loss) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Raises ModelError for what workers do not know. With the tensors that it has."""
    module = loss if isinstance(loss, nn.Module) else None
    graph = fx.Graph()
    given = (graph.placeholder("output_"), graph.placeholder("target"))
    if module is not None:
        graph.output(graph.call_module("loss", given))
        root: Any = {"loss": module}
    else:
        graph.output(graph.call_function(loss, given))
        root = {}
    data, tensors = to_data(fx.GraphModule(root, graph, "Loss"))
    return pack(data), tensors
