"""`all-reduce`: the collective does it, on torch's own threads."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.replicate.sync import Pending, Sync


class AllReduce(Sync):
    """Every rank gets the sum at once; torch chooses the algorithm (gloo: a ring)."""

    name = "all-reduce"

    def start(self, buffer: torch.Tensor) -> Pending:
        n = self.peers.size
        self.bytes_sent += 2 * (n - 1) * buffer.nbytes // n
        work: Pending = dist.all_reduce(buffer, group=self.peers.group, async_op=True)
        return work
