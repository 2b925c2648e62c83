"""A message on its way in: slots that are filled one by one, in places that the asker brought."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from shoal.wire.blocks import Blocks
from shoal.wire.front import Front
from shoal.wire.slots import DTYPE_NAMES, aligned, allocate, memory_of, view_of
from shoal.wire.tree import Tree, tensors_of

if TYPE_CHECKING:
    from shoal.wire.inbox import ReceiveJob

_NOTHING = torch.empty(0)


class Arrival:
    """A message on its way in: its transport fills the slots, one by one."""

    __slots__ = ("_blocks", "_is_aligned", "_places", "_tensors", "front", "job", "peer")

    def __init__(self, peer: int, front: Front, is_aligned: bool, blocks: Blocks) -> None:
        self.peer = peer
        self._blocks = blocks
        self._is_aligned = is_aligned
        self.job: ReceiveJob | None = None
        self.front = front
        self._places: dict[int, torch.Tensor] = {}
        """By slot: tensors that the asker brought, to be filled."""
        self._tensors = [_NOTHING] * len(front.slots)

    @property
    def is_in_place(self) -> bool:
        return bool(self._places)

    def assign(self, job: ReceiveJob) -> None:
        """Whoever asked first gets it, in the places that it brought, if they fit."""
        self.job = job
        if job._into is not None:
            self._places = _fitting(job._into, self.front)

    def room(self, number: int) -> memoryview:
        """Where the bytes of a slot go: in place, where the asker brought a place."""
        place = self._places.get(number)
        if place is None:
            self._tensors[number] = allocate(self.front.slots[number], self._blocks)
        else:
            self._tensors[number] = place
            increment_version(place)  # or autograd would not know that what it saved has changed
        return self.memory(number)

    def memory(self, number: int) -> memoryview:
        """The same room again."""
        return view_of(memory_of(self._tensors[number].detach()))

    def take(self, number: int, content: Any) -> bool:
        """The bytes of a slot: a writable buffer that nobody else will use again.

        Unless they were copied, because the asker brought a place: then this returns True.
        """
        if number in self._places:
            self.room(number)[:] = content
            return True
        tensor = self.front.shapers[number](content)
        self._tensors[number] = aligned(tensor) if self._is_aligned else tensor
        return False

    def put(self, number: int, tensor: torch.Tensor) -> None:
        """A slot that needs no more work: from GPU to GPU."""
        self._tensors[number] = tensor

    @property
    def must_move(self) -> bool:
        """Whoever brought the places is not waiting any more, and will use them otherwise."""
        return self.is_in_place and self.job is not None and self.job._given_up

    def move(self) -> None:
        """Out of these places, with what has come so far, into memory of our own."""
        self._tensors = [tensor.detach().clone() for tensor in self._tensors]
        self._places = {}

    def message(self) -> Tree:
        """All slots are full: what came."""
        return self.front.build(self._tensors)


def _fitting(into: Tree, front: Front) -> dict[int, torch.Tensor]:
    """By slot: the tensors of `into`, if what comes can be received right into them."""
    tensors = tensors_of(into)
    places = {}
    for number, path in front.recipe.paths.items():
        tensor, slot = tensors.get(path), front.slots[number]
        if (
            tensor is None
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or tensor.is_conj()  # its memory holds other values than it has
            or tensor.is_neg()
            or slot.is_on_gpu
            or slot.kind != DTYPE_NAMES.get(tensor.dtype)
            or slot.shape != list(tensor.shape)
        ):
            return {}
        places[number] = tensor
    return places if len(places) == len(tensors) else {}
