"""Gradients grouped into a few messages, because a message per parameter is slow.

A large gradient is a bucket of its own and is averaged where it lies. Small ones are packed into a
buffer. The last bucket has a tail with one flag per parameter of the model: 1 where this rank has
a gradient. Summed with the rest, it tells which parameters nobody used, at no cost of its own, so
that their gradients stay `None` as they would in one process.

    | grad of p7 ... | grad of p5 | grad of p2 .... | f0 f1 f2 f3 f4 f5 f6 f7 |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Parameter = torch.nn.Parameter


@dataclass(frozen=True)
class Packable:
    """What the plan has to know of a parameter."""

    num_elements: int
    element_bytes: int
    kind: str
    """Only parameters of one kind (dtype) share a buffer."""

    @property
    def size_bytes(self) -> int:
        return self.num_elements * self.element_bytes


@dataclass(frozen=True)
class PlannedBucket:
    indices: tuple[int, ...]
    is_packed: bool


def plan_buckets(
    parameters: Sequence[Packable], bucket_bytes: int, alone_bytes: int
) -> list[PlannedBucket]:
    """Buckets of parameter numbers, in the order the backward pass fills them.

    The backward pass goes from the last layer to the first, so the plan is made from the end. A
    parameter of `alone_bytes` or more is a bucket of its own; a packed bucket closes when it has
    reached `bucket_bytes`. The last bucket is a packed one, if need be an empty one.
    """
    planned: list[PlannedBucket] = []
    still_open: dict[str, list[int]] = {}
    for index in reversed(range(len(parameters))):
        p = parameters[index]
        if p.size_bytes >= alone_bytes:
            planned.append(PlannedBucket((index,), is_packed=False))
            continue
        members = still_open.setdefault(p.kind, [])
        members.append(index)
        if sum(parameters[i].size_bytes for i in members) >= bucket_bytes:
            planned.append(PlannedBucket(tuple(still_open.pop(p.kind)), is_packed=True))
    # The one whose last gradient comes first closes first.
    for members in sorted(still_open.values(), key=lambda m: -m[-1]):
        planned.append(PlannedBucket(tuple(members), is_packed=True))
    if parameters and not planned[-1].is_packed:
        planned.append(PlannedBucket((), is_packed=True))
    return planned


class Bucket(ABC):
    """Some parameters whose gradients are averaged in one message."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = list(parameters)
        self.reset()

    def reset(self) -> None:
        self.has_gradient: list[bool | None] = [None] * len(self.parameters)
        """Of each parameter: None as long as it was not taken."""
        self.num_missing = len(self.parameters)

    def fill(self, slot: int, scale: float, is_stand_in: bool = False) -> bool:
        """Take the gradient of one parameter, times `scale`. False if it was taken before.

        Where the batch was a stand-in, of weight zero, a gradient of zeros counts as none.
        """
        if self.has_gradient[slot] is not None:
            return False
        parameter = self.parameters[slot]
        grad = parameter.grad
        if grad is not None and is_stand_in and not grad.any():
            grad = parameter.grad = None
        if grad is not None and grad.is_sparse:
            grad = grad.to_dense()
        self.has_gradient[slot] = grad is not None
        self.num_missing -= 1
        self._take(slot, grad, scale)
        return True

    def fill_rest(self, scale: float, is_stand_in: bool = False) -> None:
        """Parameters the backward pass did not reach: what they hold already, or nothing."""
        for slot in range(len(self.parameters)):
            self.fill(slot, scale, is_stand_in)

    @torch.no_grad()
    def hand_out(self, unused: Sequence[bool]) -> None:
        """Give every parameter its averaged gradient, but those that nobody used."""
        for slot, parameter in enumerate(self.parameters):
            if not unused[slot]:
                parameter.grad = self._mean(slot).to(parameter.device)
        self.reset()

    @abstractmethod
    def payload(self) -> torch.Tensor:
        """What is to be averaged, once nothing is missing: one dimension, contiguous."""

    @abstractmethod
    def _take(self, slot: int, grad: torch.Tensor | None, scale: float) -> None: ...

    @abstractmethod
    def _mean(self, slot: int) -> torch.Tensor: ...


class PackedBucket(Bucket):
    """Small gradients copied into one buffer, and handed out as views of it."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        dtype: torch.dtype,
        device: torch.device,
        num_flags: int = 0,
    ) -> None:
        super().__init__(parameters)
        total = sum(p.numel() for p in self.parameters)
        self.buffer = torch.zeros(total + num_flags, dtype=dtype, device=device)
        self.flags = self.buffer[total:]
        self._views: list[torch.Tensor] = []
        offset = 0
        for p in self.parameters:
            self._views.append(self.buffer[offset : offset + p.numel()].view(p.shape))
            offset += p.numel()

    def payload(self) -> torch.Tensor:
        return self.buffer

    def _take(self, slot: int, grad: torch.Tensor | None, scale: float) -> None:
        view = self._views[slot]
        if grad is None:
            view.zero_()
        elif grad.device == view.device:
            torch.mul(grad, scale, out=view)  # one pass: the scaling rides on the copy
        else:
            view.copy_(grad).mul_(scale)

    def _mean(self, slot: int) -> torch.Tensor:
        return self._views[slot]


class LoneBucket(Bucket):
    """One large gradient, averaged in place: a copy of it would cost as much as the sum does."""

    def __init__(self, parameter: Parameter, device: torch.device) -> None:
        super().__init__([parameter])
        self._device = device
        self._gradient = torch.empty(0)

    def payload(self) -> torch.Tensor:
        return self._gradient.view(-1)

    def _take(self, slot: int, grad: torch.Tensor | None, scale: float) -> None:
        if grad is None:
            parameter = self.parameters[0]
            self._gradient = torch.zeros(
                parameter.shape, dtype=parameter.dtype, device=self._device
            )
            return
        self._gradient = grad.to(self._device).contiguous()
        if scale != 1.0:
            self._gradient.mul_(scale)

    def _mean(self, slot: int) -> torch.Tensor:
        gradient, self._gradient = self._gradient, torch.empty(0)
        return gradient
