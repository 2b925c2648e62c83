"""Weight gradients that can wait: an earlier stage does not need them, it needs its own.

A layer's backward pass has two halves that need nothing of each other: the gradient of what came
into it, which goes on to the layers before, and those of its weights, which go nowhere. Computed
and sent in this order, the stage before begins about a third earlier with its own backward pass:

    stage 1    F0  B0  W0  F1  B1  W1               B: sent as soon as it is there
    stage 0    F0  F1      B0          B1

Nothing is computed twice or differently. The second half waits until the stage has nothing else to
do, or until no further micro-batch may be kept (`Runner`). `Late` notes, as a stage runs forward,
at which place of autograd's graph each layer's output was made; the first half stops there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from shoal.pipeline.staged import StageModule, graphs_of, uses
from shoal.pipeline.steps import StepByStep

KINDS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
"""Whose two halves share no work. Not what derives from them, which may do anything."""
_RECOMPUTING = "CheckpointFunctionBackward"
"""torch's reentrant checkpoint, which knows no halves of a backward pass."""


class Place:
    """Where a layer made its output, and the gradient there once it is known."""

    def __init__(self, layer: nn.Module, output: torch.Tensor) -> None:
        self.layer = layer
        self.edge = get_gradient_edge(output)
        found: list[torch.Tensor] = []  # known to the graph, which must not know this place
        output.register_hook(found.append)
        self._found = found

    def expect(self) -> None:
        """The first half comes now: a loss, or a module, may have gone back here by itself."""
        self._found.clear()

    def backward(self) -> None:
        """The second half: adds to the gradients of the layer's weights."""
        if self._found:  # else nothing of the loss depends on it
            torch.autograd.backward([self.edge], self._found[:1], inputs=_trainable(self.layer))


class Late:
    """The layers of a stage whose weight gradients can wait."""

    def __init__(self, module: nn.Module, *, is_first: bool) -> None:
        """module: the stage's.

        is_first: nobody waits for gradients of that stage, and it puts nothing off.
        """
        self._layers = [] if is_first else _layers(module)
        self._module = module
        self._is_checked = False

    @contextmanager
    def noting(self) -> Iterator[list[Place]]:
        """While a micro-batch goes forward. What it gives has all places at the end.

        Hooks are there only meanwhile: the layers are the user's, who may copy or save them.
        """
        places: list[Place] = []
        # What hooks of the user's keep (save_on_cpu does) is not let go of by halves.
        is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None

        def note(layer: nn.Module, args: object, output: object) -> None:
            if isinstance(output, torch.Tensor) and output.requires_grad and _trainable(layer):
                places.append(Place(layer, output))

        layers = [] if is_hooked else self._layers
        handles = [layer.register_forward_hook(note) for layer in layers]
        try:
            yield places
        finally:
            for handle in handles:
                handle.remove()
        uses = Counter(id(place.layer) for place in places)
        places[:] = [place for place in places if uses[id(place.layer)] == 1]

    def first_half(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        leaves: Iterable[torch.Tensor],
        places: Sequence[Place],
    ) -> bool:
        """Gradients of the leaves and of all weights but those of `places`.

        False: it was the whole, since there is nothing that can wait.
        """
        if not places or not self._can_be_halved(roots):
            torch.autograd.backward(roots, gradients)
            return False
        later = {id(weight) for place in places for weight in place.layer.parameters()}
        now = [weight for weight in _trainable(self._module) if id(weight) not in later]
        for place in places:
            place.expect()
        ends: list[Any] = [*leaves, *now, *(place.edge for place in places)]
        torch.autograd.backward(roots, gradients, retain_graph=True, inputs=ends)
        return True

    def _can_be_halved(self, roots: Sequence[torch.Tensor]) -> bool:
        if not self._is_checked:
            self._is_checked = True
            if any(node.name() == _RECOMPUTING for node in _nodes(roots)):
                self._layers = []
        return bool(self._layers)


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def _layers(module: nn.Module) -> list[nn.Module]:
    """Layers that are steps of their own, with weights that no other step uses.

    If one did, their gradients would be sums of which a half has only a part. Nor those of which a
    call does more than the layer: nobody knows which half that belongs to.
    """
    used = {id(it): it for it in (attrgetter(path)(module) for path in _uses(module))}
    users: dict[int, set[int]] = defaultdict(set)
    for it in used.values():
        for tensor in it.parameters() if isinstance(it, nn.Module) else [it]:
            users[id(tensor)].add(id(it))
    return [
        it
        for it in used.values()
        if type(it) in KINDS
        and all(users[id(weight)] == {id(it)} for weight in it.parameters())
        and not (it._forward_hooks or it._forward_pre_hooks or "forward" in vars(it))
    ]


def _uses(module: nn.Module) -> set[str]:
    """Paths of the modules and tensors that the steps of a stage name."""
    if isinstance(module, StepByStep):
        return {path for program in module.programs for path in program.uses}
    assert isinstance(module, StageModule)
    return {path for graph in graphs_of(module) for path in uses(graph)}


def _nodes(roots: Iterable[torch.Tensor]) -> Iterable[Node]:
    ahead = [root.grad_fn for root in roots]
    seen: set[Node] = set()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            ahead += [before for before, _ in node.next_functions]
