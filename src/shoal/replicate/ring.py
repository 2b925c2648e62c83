"""`ring`: all links busy at once; each rank sends 2(N-1)/N of the buffer, the least there is.

The buffer is cut into N chunks. Rank r begins with chunk r; in each tick every rank sends one chunk
to the right and receives one from the left. N = 3, what each rank *sends*:

    tick            rank 0   rank 1   rank 2
    reduce    0       c0       c1       c2       receive, add to own
    -scatter  1       c2       c0       c1       now rank r holds the whole sum of chunk r + 1
    all       2       c1       c2       c0       receive, replace own
    -gather   3       c0       c1       c2       now every rank holds every sum
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.layout import share
from shoal.replicate.sync import Courier, Peers, Pending, Sync

TAG = 0x21


class Ring(Sync):
    """Reduce-scatter, then all-gather, over send and receive."""

    name = "ring"

    def __init__(self, peers: Peers, timeout_s: float) -> None:
        super().__init__(peers, timeout_s)
        self._courier = Courier(timeout_s)
        self._spare: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def start(self, buffer: torch.Tensor) -> Pending:
        return self._courier.submit(lambda: self._sum(buffer))

    def _sum(self, buffer: torch.Tensor) -> None:
        n, me = self.peers.size, self.peers.me
        chunks = []
        for rank in range(n):
            part = share(buffer.numel(), rank, n)
            chunks.append(buffer[part.start : part.stop])
        spare = self._spare_like(chunks[0])
        for tick in range(n - 1):
            mine, theirs = chunks[(me - tick) % n], chunks[(me - tick - 1) % n]
            incoming = spare[: theirs.numel()]
            self._exchange(mine, incoming)
            theirs.add_(incoming)
        for tick in range(n - 1):
            mine, theirs = chunks[(me - tick + 1) % n], chunks[(me - tick) % n]
            self._exchange(mine, theirs)

    def _exchange(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        """Send to the right and receive from the left, both at once: neither waits for the other.

        An empty chunk (fewer elements than ranks) is empty on both ends of the link, and stays.
        """
        peers = self.peers
        work = []
        if incoming.numel():
            left = peers.ranks[peers.me - 1]
            work.append(dist.irecv(incoming, left, group=peers.group, tag=TAG))
        if outgoing.numel():
            right = peers.ranks[(peers.me + 1) % peers.size]
            work.append(dist.isend(outgoing, right, group=peers.group, tag=TAG))
            self.bytes_sent += outgoing.nbytes
        for item in work:
            assert item is not None
            item.wait()

    def _spare_like(self, largest_chunk: torch.Tensor) -> torch.Tensor:
        """A buffer to receive into, kept from one step to the next."""
        key = (largest_chunk.dtype, largest_chunk.device)
        spare = self._spare.get(key)
        if spare is None or spare.numel() < largest_chunk.numel():
            spare = self._spare[key] = torch.empty_like(largest_chunk)
        return spare

    def close(self) -> None:
        self._courier.close()
