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

from shoal.layout import share
from shoal.replicate.post import Delivery
from shoal.replicate.sync import Courier, Peers, Pending, Sync

TAG = 0x2100


class Ring(Sync):
    """Reduce-scatter, then all-gather, over send and receive."""

    name = "ring"
    on_host = True

    def __init__(self, peers: Peers, timeout_s: float) -> None:
        super().__init__(peers, timeout_s)
        self._courier = Courier(timeout_s)
        self._spare = torch.empty(0)

    def start(self, buffer: torch.Tensor) -> Pending:
        return self._courier.submit(lambda: self._sum(buffer))

    def _sum(self, buffer: torch.Tensor) -> None:
        n, me = self.peers.size, self.peers.me
        chunks = []
        for rank in range(n):
            part = share(buffer.numel(), rank, n)
            chunks.append(buffer[part.start : part.stop])
        beside = self._spare_for(buffer, n - 1, chunks[0].numel())

        ticks = range(2 * (n - 1))
        sends = [chunks[(me - tick) % n] for tick in ticks]
        receives = [chunks[(me - tick - 1) % n] for tick in ticks]
        # While sums are made, what comes is added to our own: it must not land on top of it.
        landing = [b[: r.numel()] for b, r in zip(beside, receives, strict=False)]
        landing += receives[n - 1 :]
        # All receives are posted before anything is sent, so that no sender waits for its
        # receiver to be ready. A chunk that is received late in the game lands where an early send
        # came from; that send is over by then, since what we receive was made from it.
        coming = [self._receive(place, tick) for tick, place in enumerate(landing)]
        going = []
        for tick in ticks:
            going.append(self._send(sends[tick], tick))
            coming[tick].wait()
            if tick < n - 1:
                receives[tick].add_(landing[tick])
        for work in going:
            work.wait()

    def _receive(self, place: torch.Tensor, tick: int) -> Delivery:
        left = self.peers.ranks[self.peers.me - 1]
        return self.peers.post.receive(place, left, TAG + tick)

    def _send(self, chunk: torch.Tensor, tick: int) -> Delivery:
        right = self.peers.ranks[(self.peers.me + 1) % self.peers.size]
        self.bytes_sent += chunk.nbytes
        return self.peers.post.send(chunk, right, TAG + tick)

    def _spare_for(self, buffer: torch.Tensor, count: int, size: int) -> list[torch.Tensor]:
        """Room to receive beside the buffer, kept from one step to the next."""
        spare = self._spare
        if (
            spare.dtype != buffer.dtype
            or spare.device != buffer.device
            or spare.numel() < count * size
        ):
            spare = self._spare = buffer.new_empty(count * size)
        return [spare[i * size : (i + 1) * size] for i in range(count)]

    def close(self) -> None:
        self._courier.close()
