"""Tensors from GPU to GPU by NCCL, not staged in host memory.

There is a group for each direction: NCCL does what it is told in order, so on one group alone two
ranks that send to each other at once would each wait for the other to receive.

Untested on real GPUs; the tests drive it with groups of gloo's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

MakeGroup = Callable[[dist.Store, int], Any]
"""A group of two, from the place where they meet and this one's rank in it."""


def nccl_group(store: dist.Store, rank: int) -> Any:
    make: Any = dist.ProcessGroupNCCL
    return make(store, rank, 2, make.Options())


class GpuLane:
    """This rank's GPU, and that of one peer."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        device: torch.device,
        make_group: MakeGroup = nccl_group,
    ) -> None:
        """rank: 0 or 1, this one's among the two."""
        self._device = device
        up, down = (make_group(dist.PrefixStore(way, store), rank) for way in ("up", "down"))
        self._out, self._in = (up, down) if rank == 0 else (down, up)
        self._other = 1 - rank

    def stays(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor goes this way."""
        return tensor.is_cuda and tensor.device == self._device

    def send(self, tensor: torch.Tensor) -> _Transfer:
        return _Transfer(self._out.send([tensor], self._other, 0), self._device)

    def receive(self, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        """Waits for it."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        _Transfer(self._in.recv([tensor], self._other, 0), self._device).wait()
        return tensor


class _Transfer:
    def __init__(self, work: Any, device: torch.device) -> None:
        self._work = work
        self._device = device

    def wait(self, timeout: object = None) -> None:
        if self._device.type != "cuda":
            self._work.wait()
            return
        with torch.cuda.device(self._device):
            self._work.wait()  # holds up the stream only, not us
            torch.cuda.current_stream().synchronize()
