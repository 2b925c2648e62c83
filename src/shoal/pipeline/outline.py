"""What ranks compare of their models: all that must be the same for cuts to mean the same."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from shoal.pipeline.graph import Graph
from shoal.wire.slots import bytes_of

MAX_LETTERS = 80


def outline(graph: Graph) -> list[str]:
    """A line for each thing."""
    tensors = [
        f"{n} {str(t.dtype)[6:]} {tuple(t.shape)}" for n, t in graph.model.state_dict().items()
    ]
    steps = [
        f"step {node.name}: {node.op} {_short(_plain([node.args, node.kwargs]))}"
        for node in graph.nodes()
    ]
    return [*steps, *tensors, *_unsent(graph)]


def _short(text: str) -> str:
    return text if len(text) <= MAX_LETTERS else f"{text[:40]} ... {_digest(text.encode())}"


def _plain(arguments: Any) -> str:
    """What is the same in every process; of what is not, its kind."""
    match arguments:
        case dict():
            return str({str(key): _plain(value) for key, value in arguments.items()})
        case list() | tuple():
            return str([_plain(value) for value in arguments])
        case slice():
            return f"slice {_plain([arguments.start, arguments.stop, arguments.step])}"
        case bool() | int() | float() | complex() | str() | None | torch.dtype() | fx.Node():
            return repr(arguments)
    return type(arguments).__name__


def _unsent(graph: Graph) -> list[str]:
    """Tensors that modules hold as plain attributes: they do not go from rank to rank."""
    sent = {str(node.target) for node in graph.training.nodes if node.op == "get_attr"}
    sent |= {str(node.target) for node in graph.evaluating.nodes if node.op == "get_attr"}
    return [
        f"{path}.{name}".strip(".") + f" of the values {_digest(_bytes(tensor))}"
        for path, module in graph.model.named_modules()
        for name, tensor in vars(module).items()
        if isinstance(tensor, torch.Tensor)
        and not (tensor.is_meta or f"{path}.{name}".strip(".") in sent)
        and tensor.layout is torch.strided
    ]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()).numpy().data


def _digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
