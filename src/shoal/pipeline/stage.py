"""One stage at work: forward and backward of single micro-batches, and what it keeps between them.

Values come from earlier stages as leaves of this stage's own autograd graph (`Arrival`). Their
gradients go back, and what later stages send back are the gradients that this stage's backward
begins with.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shoal.errors import ModelError
from shoal.pipeline import kinds
from shoal.pipeline.graph import Graph
from shoal.pipeline.late import Late, Place
from shoal.pipeline.lying import Lying, as_it_lay, as_sent, packed, unpacked
from shoal.pipeline.routes import Routes
from shoal.pipeline.split import (
    OUTPUT,
    stage_module,
    values_kept,
    values_made,
)
from shoal.wire.front import SMALL_BYTES
from shoal.wire.tree import Tree, tensors_of, with_tensors

Gradients = dict[str, list[Tree]]
"""By value: of its tensors that need one, in order, as `packed` makes them."""
Roots = Sequence[tuple[torch.Tensor, torch.Tensor | None]]
"""What a backward pass begins with: tensors and their gradients."""
Key = tuple[int, int]
"""Which run of the pipeline, and which micro-batch of it."""


class Arrival:
    """A tensor from elsewhere that needs a gradient."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.leaf = tensor.requires_grad_()
        self._found: list[torch.Tensor] = []  # known to the graph, which must not know this
        self.value: torch.Tensor = _Entrance.apply(self.leaf, self._found)  # type: ignore[no-untyped-call]
        """What the stage computes with."""

    @property
    def gradient(self) -> torch.Tensor | None:
        """After the backward pass; None where nothing of the loss depends on the tensor."""
        return self._found[0] if self._found else None


class _Entrance(torch.autograd.Function):
    """Takes the gradient as autograd has it, which is how an earlier step of one process gets it.

    Not from the leaf: there it is laid out as the leaf lies, and what sums over it in the earlier
    stage would do so in another order.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        ctx.found = found
        ctx.set_materialize_grads(False)
        return leaf.detach()  # not a view, which a module that is kept whole could not change

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is not None:
            ctx.found.append(gradient)
        return None, None


@dataclass
class _Kept:
    """What the backward pass of a micro-batch will need."""

    came: dict[str, list[Arrival]] = field(default_factory=dict)
    """By value from elsewhere: its tensors that need a gradient."""
    made: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """By value that was made here: its tensors that need a gradient."""
    places: list[Place] = field(default_factory=list)
    """Layers whose weight gradients come last."""
    loss: torch.Tensor | None = None


class Stage:
    """A stretch of the model, with its own parameters only."""

    def __init__(
        self,
        routes: Routes,
        number: int,
        module: nn.Module,
        *,
        inputs: Sequence[str],
        makes: Sequence[str],
        keeps: Collection[str] = (),
    ) -> None:
        """module: takes the steps of its mode.

        inputs: names of the model's inputs. makes: names of what the module returns. keeps: those
        of them whose memory a module of the user's may change later.
        """
        self.number = number
        self.routes = routes
        self.is_last = number == routes.num_stages - 1
        self.module = module
        self._makes = makes
        self._keeps = keeps
        self._late = Late(module, is_first=number == 0)
        ports = routes.ports[number]
        self._takes = list(inputs) if number == 0 else [port.value for port in ports]
        later = {port.value for each in routes.ports[number + 1 :] for port in each}
        self._passed_by = [port.value for port in ports if port.value in later]
        self._names: dict[str, str] = {}
        """Of the values of the last `forward`, by name: the first name of the very tensor."""
        self._kept: dict[Key, _Kept] = {}
        self._left: deque[tuple[Key, list[Place]]] = deque()
        """Of micro-batches that went backward: layers whose weight gradients are still to come."""

    @classmethod
    def of(cls, graph: Graph, routes: Routes, number: int) -> Stage:
        """The stage of that number of a model."""
        module = stage_module(graph, routes, number)
        makes = values_made(graph, routes, number)
        return cls(
            routes,
            number,
            module,
            inputs=graph.inputs,
            makes=makes,
            keeps=values_kept(graph, routes, number),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that it computes with: parameters, buffers of its state or not, and constants."""
        return {
            name: tensor.detach()
            for found in (self.module.named_parameters, self.module.named_buffers)
            for name, tensor in found(remove_duplicate=False)
        }

    @property
    def num_kept(self) -> int:
        """Micro-batches whose activations are held."""
        return len(self._kept)

    @property
    def num_late(self) -> int:
        """Micro-batches that went backward, and of which some weight gradients are to come."""
        return len(self._left)

    # -- forward -----------------------------------------------------------------------------------

    def forward(
        self, key: Key, inputs: dict[str, Tree], arrived: dict[int, Tree]
    ) -> dict[str, Tree]:
        """The values that this stage makes.

        inputs: of the model, in stage 0. arrived: by source, what `parcel` made there.
        """
        kept = _Kept()
        came = self._unpacked(arrived, kept)
        values = inputs | came
        takes = [values[name] for name in self._takes]
        before = self._versions(values)
        has_gradients = torch.is_grad_enabled()
        noting: AbstractContextManager[list[Place]] = (
            self._late.noting() if has_gradients else nullcontext([])
        )
        with noting as kept.places:
            made = dict(zip(self._makes, self.module(*takes), strict=True))
        self._check_unchanged(before, values)
        self._note_names(came, made)
        if has_gradients:
            for value, tree in made.items():
                if value != OUTPUT and self._names[value] == value:
                    kept.made[value] = needing(tree)
            self._kept[key] = kept
        return made

    def _unpacked(self, arrived: dict[int, Tree], kept: _Kept) -> dict[str, Tree]:
        """Values from elsewhere, each tensor once, by whatever names it came."""
        self._names = {}
        found: dict[str, Tree] = {}
        for source, parcel in arrived.items():
            ports = self.routes.between(source, self.number)
            for (value, _), content in zip(ports, parcel, strict=True):
                if isinstance(content, dict):
                    self._names[value] = value
                    found[value] = kinds.read(content, self._device(arrived))
                    continue
                is_name = isinstance(content, str)
                self._names[value] = name = content if is_name else _name_in(content, value)
                if not is_name and name not in found:
                    found[name], kept.came[name] = arrivals_of(*content[:3])
        return {value: found[name] for value, name in self._names.items()}

    def _device(self, arrived: dict[int, Tree]) -> torch.device:
        came = tensors_of(list(arrived.values())).values()
        tensors = itertools.chain(self.module.parameters(), self.module.buffers(), came)
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def _note_names(self, came: dict[str, Tree], made: dict[str, Tree]) -> None:
        first: dict[tuple[str, int], str] = {}
        for value, tree in [*came.items(), *made.items()]:
            name = self._names.setdefault(value, value)
            if isinstance(tree, torch.Tensor):
                alias = self.routes.aliases.get(value, value)
                self._names[value] = first.setdefault((alias, id(tree)), name)

    def _versions(self, values: dict[str, Tree]) -> dict[str, list[int]]:
        """How often what came here, and later stages get too, has been changed in place."""
        return {
            name: [t._version for t in tensors_of(values[name]).values() if not t.is_inference()]
            for name in self._passed_by
        }

    def _check_unchanged(self, before: dict[str, list[int]], values: dict[str, Tree]) -> None:
        """Steps that do so were refused; but a module that is kept whole may do so unseen."""
        if changed := [name for name, now in self._versions(values).items() if now != before[name]]:
            raise ModelError(
                f"stage {self.number} changes {changed[0]} in place, inside a module that is kept "
                "whole, and a later stage uses it, too, and would not see the change. Make a new "
                "tensor there, with torch.where for example; or cut elsewhere: not between where "
                "it is made and its last use."
            )

    def parcel(self, made: dict[str, Tree], target: int) -> Tree:
        """What a later stage gets of the values made: each, and which tensors need a gradient.

        One that is the very tensor of another (`x.float()` gives back what it was given, if that
        is float) goes by that one's name: once, and with one gradient.
        """
        names = [port.value for port in self.routes.between(self.number, target)]
        if odd := [name for name in names if not kinds.crosses(made[name])]:
            raise ModelError(
                f"{odd[0]} is a {type(made[odd[0]]).__name__}, or has one in it, and would not "
                f"arrive as such in stage {target}, which uses it: only tensors, plain values, "
                "tuples, lists and dicts of them cross a cut. Cut after its last use, or take it "
                "apart before the cut; automatic cuts do so."
            )
        known = {port.value for port in self.routes.ports[target]} - set(names)
        parcel: list[Tree] = []
        for value in names:
            name = self._names[value]
            if name in known:
                parcel.append(name)
            else:
                parcel.append(_content(self._for_good(value, made[value]), name, value))
            known.add(name)
        return parcel

    def _for_good(self, name: str, tree: Tree) -> Tree:
        """Copies of what a layer keeps, and changes with the next micro-batch, before this went."""
        buffers = {_where(buffer) for buffer in self._large_buffers}
        if not buffers and name not in self._keeps:
            return tree
        return with_tensors(
            tree,
            {
                path: t.clone() if _where(t) in buffers or name in self._keeps else t
                for path, t in tensors_of(tree).items()
            },
        )

    @cached_property
    def _large_buffers(self) -> list[torch.Tensor]:
        """Small ones are copied to be sent."""
        return [b for b in self.module.buffers() if _where(b) and b.nbytes >= SMALL_BYTES]

    def keep_loss(self, key: Key, loss: torch.Tensor) -> None:
        """In the last stage: what the backward pass begins with."""
        self._kept[key].loss = loss

    # -- backward ----------------------------------------------------------------------------------

    def backward(
        self, key: Key, arrived: dict[int, Gradients], begin: Roots = ()
    ) -> dict[int, Gradients]:
        """Adds to the gradients of the parameters; returns those of what came, by whom they go to.

        To those of some parameters `backward_weights` adds, when the others have been sent.
        arrived: by later stage, of each value that its gradients are for. Of a value that was only
        used here they are what this stage's own are added to. begin: what else to begin with.
        """
        kept = self._kept.pop(key)
        roots = [root for root, _ in begin]
        gradients = [gradient for _, gradient in begin]
        if kept.loss is not None and kept.loss.requires_grad:
            roots.append(kept.loss)
            gradients.append(None)
        tensors = kept.made | {
            name: [each.value for each in came] for name, came in kept.came.items()
        }
        passing: Gradients = {}
        """Of what only earlier stages use."""
        for of_values in arrived.values():
            for name, of_value in of_values.items():
                if name not in tensors:
                    passing[name] = of_value
                    continue
                for tensor, gradient in zip(tensors[name], map(unpacked, of_value), strict=True):
                    if gradient is not None:
                        roots.append(tensor)
                        gradients.append(gradient)
        leaves = [each.leaf for came in kept.came.values() for each in came]
        if roots and self._late.first_half(roots, gradients, leaves, kept.places):
            self._kept[key] = kept
            self._left.append((key, kept.places))
        sent: dict[int, Gradients] = {earlier: {} for earlier in self.routes.backs(self.number)}
        for name, came in kept.came.items():
            passing[name] = [packed(each.gradient) for each in came]
        for name, of_value in passing.items():
            sent[self.routes.before(name, self.number)][name] = of_value
        return sent

    def backward_weights(self) -> bool:
        """Of what `backward` has left: one layer's, the oldest first. Whether there was one."""
        if not self._left:
            return False
        key, places = self._left[0]
        if places:
            places.pop().backward()
        if not places:  # nothing of this micro-batch is needed any more
            self._left.popleft()
            self._kept.pop(key, None)
        return True

    def forget(self, call: int | None = None) -> None:
        """Nothing that was kept, of one call or at all, will be needed."""
        self._kept = {
            key: kept for key, kept in self._kept.items() if call is not None and key[0] != call
        }
        self._left = deque(left for left in self._left if left[0] in self._kept)


def _where(tensor: torch.Tensor) -> int:
    """Where its memory begins; 0 where it has no piece of its own (sparse ones)."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def needing(tree: Tree) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(tree).values() if tensor.requires_grad]


def _content(tree: Tree, name: str, value: str) -> Tree:
    """A value as it goes: tensors, which of them need a gradient, how they lie if that is lost.

    And its name, where that is another one's than the value's.
    """
    if kind := kinds.written(tree):
        return kind
    tensors = tensors_of(tree)
    sent = {path: as_sent(tensor.detach()) for path, tensor in tensors.items()}
    content = [
        with_tensors(tree, {path: tensor for path, (tensor, _) in sent.items()}),
        [tensor.requires_grad for tensor in tensors.values()],
    ]
    lying = [how for _, how in sent.values()]
    if name != value:
        return [*content, lying, name]
    return [*content, lying] if any(lying) else content


def _name_in(content: Any, value: str) -> str:
    """What `_content` was given."""
    return content[3] if len(content) > 3 else value


def arrivals_of(
    tree: Tree, needs: Sequence[bool], lying: Sequence[Lying | None] = ()
) -> tuple[Tree, list[Arrival]]:
    """The same values; those that need a gradient have arrived."""
    tensors = tensors_of(tree)
    arrivals: list[Arrival] = []
    made: dict[Any, torch.Tensor] = {}
    for (path, tensor), needed, how in zip(
        tensors.items(), needs, lying or [None] * len(needs), strict=True
    ):
        made[path] = as_it_lay(tensor.detach(), how)
        if needed and torch.is_grad_enabled():
            arrivals.append(Arrival(made[path]))
            made[path] = arrivals[-1].value
    return with_tensors(tree, made), arrivals
