"""Gradients packed into a few flat buffers, because a message per parameter is slow.

A bucket's buffer has a tail with one flag per parameter: 1 where this rank has a gradient. Summed
with the rest, it tells which parameters nobody used, at no cost of its own, so that their
gradients stay `None` as they would in one process.

    | grad of p0 ........ | grad of p1 ... | grad of p2 | f0 f1 f2 |
"""

from __future__ import annotations

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
    """Only parameters of one kind (dtype) share a bucket."""


def plan_buckets(parameters: Sequence[Packable], bucket_bytes: int) -> list[list[int]]:
    """Indices of `parameters`, grouped into buckets in the order the backward pass fills them.

    The backward pass goes from the last layer to the first, so the plan is made from the end. A
    bucket closes when it has reached `bucket_bytes` or the kind changes.
    """
    buckets: list[list[int]] = []
    open_bytes = 0
    open_kind = None
    for index in reversed(range(len(parameters))):
        p = parameters[index]
        if open_kind != p.kind or open_bytes >= bucket_bytes:
            buckets.append([])
            open_bytes, open_kind = 0, p.kind
        buckets[-1].append(index)
        open_bytes += p.num_elements * p.element_bytes
    return buckets


class Bucket:
    """Some parameters' gradients in one buffer, ready to be averaged over the ranks."""

    def __init__(self, parameters: Sequence[Parameter], device: torch.device) -> None:
        self.parameters = list(parameters)
        total = sum(p.numel() for p in self.parameters)
        self.buffer = torch.zeros(
            total + len(self.parameters), dtype=self.parameters[0].dtype, device=device
        )
        self._flags = self.buffer[total:]
        self._views: list[torch.Tensor] = []
        offset = 0
        for p in self.parameters:
            self._views.append(self.buffer[offset : offset + p.numel()].view(p.shape))
            offset += p.numel()
        self.reset()

    def reset(self) -> None:
        self._filled = [False] * len(self.parameters)
        self.num_missing = len(self.parameters)

    def fill(self, slot: int, scale: float, is_stand_in: bool = False) -> bool:
        """Take the gradient of one parameter, times `scale`. False if it was taken before.

        Where the batch was a stand-in, of weight zero, a gradient of zeros counts as none.
        """
        if self._filled[slot]:
            return False
        self._filled[slot] = True
        self.num_missing -= 1
        parameter, view = self.parameters[slot], self._views[slot]
        if is_stand_in and parameter.grad is not None and not parameter.grad.any():
            parameter.grad = None
        grad = parameter.grad
        if grad is None:
            view.zero_()
            self._flags[slot] = 0
            return True
        if grad.is_sparse:
            grad = grad.to_dense()
        if scale == 1.0:
            view.copy_(grad)
        elif grad.device == view.device:
            torch.mul(grad, scale, out=view)  # one pass: the scaling rides on the copy
        else:
            view.copy_(grad).mul_(scale)
        self._flags[slot] = 1
        return True

    def fill_rest(self, scale: float, is_stand_in: bool = False) -> None:
        """Parameters the backward pass did not reach: what they hold already, or nothing."""
        for slot in range(len(self.parameters)):
            self.fill(slot, scale, is_stand_in)

    @torch.no_grad()
    def hand_out(self) -> None:
        """Give every parameter its averaged gradient, without a copy where it can be a view."""
        unused = None
        for slot, (p, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if p.grad is None:
                unused = self._flags.eq(0).tolist() if unused is None else unused
                if unused[slot]:
                    continue  # nobody used it: None, as in one process
            if view.device == p.device:
                p.grad = view
            else:
                p.grad = view.to(p.device)
        self.reset()
