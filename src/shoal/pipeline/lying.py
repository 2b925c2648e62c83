"""How a tensor lies in memory, where its message does not show it: with gaps, or repeated.

Some kernels of torch sum in another order when their input lies otherwise, so a value that came
from another stage, or a gradient, is to lie here as it would in one process. A message keeps the
order of dimensions, but closes gaps (a slice of a wider tensor) and copies what is repeated (an
expanded one).
"""

from __future__ import annotations

import torch

from shoal.wire.apart import lies_in_one_piece
from shoal.wire.tree import Tree

Lying = list[list[int]]
"""A tensor's shape and its strides."""


def as_sent(tensor: torch.Tensor) -> tuple[torch.Tensor, Lying | None]:
    """What goes: the tensor without repetitions; and how it lies, if that would be lost."""
    if lies_in_one_piece(tensor):
        return tensor, None
    lying = [list(tensor.shape), list(tensor.stride())]
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor, lying


def as_it_lay(came: torch.Tensor, lying: Lying | None) -> torch.Tensor:
    """The tensor that `as_sent` was given."""
    if lying is None:
        return came
    shape, strides = lying
    room = torch.empty_strided(came.shape, strides, dtype=came.dtype, device=came.device)
    return room.copy_(came).expand(shape)


def packed(gradient: torch.Tensor | None) -> Tree:
    """A gradient, as it goes."""
    if gradient is None:
        return None
    tensor, lying = as_sent(gradient)
    return tensor if lying is None else [tensor, lying]


def unpacked(came: Tree) -> torch.Tensor | None:
    """The gradient that `packed` was given."""
    return as_it_lay(*came) if isinstance(came, list) else came
