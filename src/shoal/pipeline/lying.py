"""How a tensor lies in memory, where its message does not show it: with gaps, repeated, or askew.

Some kernels of torch sum in another order when their input lies otherwise, so a value that came
from another stage, or a gradient, is to lie here as it would in one process. A message keeps the
order of dimensions, but closes gaps (a slice of a wider tensor), copies what is repeated (an
expanded one), and arrives where memory begins: at an address that vector units like.
"""

from __future__ import annotations

import torch

from shoal.wire.apart import lies_in_one_piece
from shoal.wire.tree import Tree

Lying = list[list[int]]
"""A tensor's shape, its strides, and how far it is from such an address."""
_ALIGNED = 64
"""Bytes: where the memory of torch's tensors begins."""


def as_sent(tensor: torch.Tensor) -> tuple[torch.Tensor, Lying | None]:
    """What goes: the tensor without repetitions; and how it lies, if that would be lost."""
    askew = _askew(tensor)
    if lies_in_one_piece(tensor) and not askew:
        return tensor, None
    lying = [list(tensor.shape), list(tensor.stride()), [askew]]
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor, lying


def as_it_lay(came: torch.Tensor, lying: Lying | None) -> torch.Tensor:
    """The tensor that `as_sent` was given."""
    if lying is None:
        return came
    shape, strides, (askew,) = lying
    reach = sum((n - 1) * stride for n, stride in zip(came.shape, strides, strict=True)) + 1
    skipped = askew // came.element_size()
    room = torch.empty(skipped + max(reach, 0), dtype=came.dtype, device=came.device)
    return room.as_strided(came.shape, strides, skipped).copy_(came).expand(shape)


def _askew(tensor: torch.Tensor) -> int:
    """Bytes after the last address of that kind."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return 0
    return tensor.data_ptr() % _ALIGNED


def packed(gradient: torch.Tensor | None) -> Tree:
    """A gradient, as it goes."""
    if gradient is None:
        return None
    tensor, lying = as_sent(gradient)
    return tensor if lying is None else [tensor, lying]


def unpacked(came: Tree) -> torch.Tensor | None:
    """The gradient that `packed` was given."""
    return as_it_lay(*came) if isinstance(came, list) else came
