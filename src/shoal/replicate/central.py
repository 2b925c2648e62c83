"""`central`: one rank collects, averages and tells the others.

rank 1 ──┐                 ┌──> rank 1
rank 2 ──┼──> rank 0, / N ─┼──> rank 2
rank 3 ──┘                 └──> rank 3
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.replicate.sync import Courier, Peers, Pending, Sync


class Central(Sync):
    """Reduced to the first rank, averaged there, broadcast."""

    name = "central"
    scales_first = False

    def __init__(self, peers: Peers, timeout_s: float) -> None:
        super().__init__(peers, timeout_s)
        self._courier = Courier(timeout_s)

    def start(self, buffer: torch.Tensor) -> Pending:
        return self._courier.submit(lambda: self._average(buffer))

    def _average(self, buffer: torch.Tensor) -> None:
        centre, group = self.peers.ranks[0], self.peers.group
        dist.reduce(buffer, centre, group=group)
        if self.peers.me == 0:
            buffer.div_(self.peers.size)
            # Counted as the star that it is to the reader; torch may relay along a tree.
            self.bytes_sent += (self.peers.size - 1) * buffer.nbytes
        else:
            self.bytes_sent += buffer.nbytes
        dist.broadcast(buffer, centre, group=group)

    def close(self) -> None:
        self._courier.close()
