"""One stage at work: forward and backward of single micro-batches, and what it keeps between them.

Values come from earlier stages as leaves of this stage's own autograd graph. Their gradients go
back, and what later stages send back are the gradients that this stage's backward begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.pipeline.graph import Graph
from shoal.pipeline.routes import Routes
from shoal.pipeline.split import OUTPUT, stage_module, values_made
from shoal.wire.tree import Tree, detached, tensors_of, with_tensors

Gradients = list[torch.Tensor | None]
"""Of a value's tensors that need one, in order."""


@dataclass
class _Kept:
    """What the backward pass of a micro-batch will need."""

    leaves: dict[int, list[list[list[torch.Tensor]]]] = field(default_factory=dict)
    """By source: of each value, of each of its places, the tensors that need a gradient."""
    roots: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """By value that was made here: its tensors that need a gradient."""
    loss: torch.Tensor | None = None


class Stage:
    """A stretch of the model, with its own parameters only."""

    def __init__(self, graph: Graph, routes: Routes, number: int) -> None:
        self.number = number
        self.is_last = number == routes.num_stages - 1
        self.module: nn.Module = stage_module(graph, routes, number, training=True)
        self._evaluating = [stage_module(graph, routes, number, training=False)]
        """In a list: not a second child with the same parameters."""
        self._routes = routes
        self._inputs = graph.inputs
        self._makes = values_made(graph, routes, number)
        self._kept: dict[int, _Kept] = {}

    @property
    def num_kept(self) -> int:
        """Micro-batches whose activations are held."""
        return len(self._kept)

    # -- forward -----------------------------------------------------------------------------------

    def forward(
        self, micro_batch: int, inputs: dict[str, Tree], arrived: dict[int, Tree]
    ) -> dict[str, Tree]:
        """The values that this stage makes.

        inputs: of the model, in stage 0. arrived: by source, what `parcel` made there.
        """
        kept = _Kept()
        places = [inputs[name] for name in self._inputs] if self.number == 0 else []
        by_value: dict[str, list[Tree]] = {}
        for source, parcel in arrived.items():
            ports = self._routes.between(source, self.number)
            kept.leaves[source] = []
            for port, (tree, needs) in zip(ports, parcel, strict=True):
                copies = [_with_leaves(tree, needs) for _ in port.places]
                by_value[port.value] = [copy for copy, _ in copies]
                kept.leaves[source].append([leaves for _, leaves in copies])
        for port in self._routes.ports[self.number]:
            places += by_value[port.value]
        module = self.module if self.module.training else self._evaluating[0]
        made = dict(zip(self._makes, module(*places), strict=True))
        if torch.is_grad_enabled():
            for value, tree in made.items():
                if value != OUTPUT:
                    kept.roots[value] = _needing(tree)
            self._kept[micro_batch] = kept
        return made

    def parcel(self, made: dict[str, Tree], target: int) -> Tree:
        """What a later stage gets of the values made: each, and which tensors need a gradient."""
        return [
            [detached(tree), [tensor.requires_grad for tensor in tensors_of(tree).values()]]
            for tree in (made[port.value] for port in self._routes.between(self.number, target))
        ]

    def keep_loss(self, micro_batch: int, loss: torch.Tensor) -> None:
        """In the last stage: what the backward pass begins with."""
        self._kept[micro_batch].loss = loss

    # -- backward ----------------------------------------------------------------------------------

    def backward(
        self, micro_batch: int, arrived: dict[int, list[list[Gradients]]]
    ) -> dict[int, list[list[Gradients]]]:
        """Adds to the gradients of the parameters; returns those of what came, by source.

        arrived: by later stage, of each value that went there, of each of its places.
        """
        kept = self._kept.pop(micro_batch)
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        if kept.loss is not None and kept.loss.requires_grad:
            kept.loss.backward()
        # In the order in which one process would add them up: what was used last comes first.
        for target in sorted(arrived, reverse=True):
            ports = self._routes.between(self.number, target)
            for port, of_places in zip(ports, arrived[target], strict=True):
                for of_place in reversed(of_places):
                    for root, gradient in zip(kept.roots[port.value], of_place, strict=True):
                        if gradient is not None:
                            roots.append(root)
                            gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, gradients)
        return {
            source: [[[leaf.grad for leaf in place] for place in places] for places in values]
            for source, values in kept.leaves.items()
        }

    def forget(self) -> None:
        """Nothing that was kept will be needed."""
        self._kept.clear()


def _needing(tree: Tree) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(tree).values() if tensor.requires_grad]


def _with_leaves(tree: Tree, needs: Sequence[bool]) -> tuple[Tree, list[torch.Tensor]]:
    """The same values, those that need a gradient as leaves."""
    tensors = tensors_of(tree)
    leaves: list[torch.Tensor] = []
    made: dict[Any, torch.Tensor] = {}
    for (path, tensor), needed in zip(tensors.items(), needs, strict=True):
        made[path] = tensor.detach()
        if needed and torch.is_grad_enabled():
            leaves.append(made[path].requires_grad_())
    return with_tensors(tree, made), leaves
