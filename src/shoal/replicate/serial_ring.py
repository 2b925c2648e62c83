"""`serial-ring`: two passes round the ring, one rank at a time. The easiest to follow.

    first pass    0 ──> 1 ──> 2 ──> 3 ──> 0      each adds its own; the sum comes home to rank 0
    second pass   0 ──> 1 ──> 2                  the sum is handed on; the last rank has it already

Only one link works at a time, so a step takes 2(N-1) transfers of the whole gradient.
"""

from __future__ import annotations

import torch

from shoal.replicate.sync import Courier, Peers, Pending, Sync

TAG = 0x5E


class SerialRing(Sync):
    """Sum round the ring, then spread it round the ring, then divide."""

    name = "serial-ring"
    on_host = True
    scales_first = False

    def __init__(self, peers: Peers, timeout_s: float) -> None:
        super().__init__(peers, timeout_s)
        self._courier = Courier(timeout_s)

    def start(self, buffer: torch.Tensor) -> Pending:
        return self._courier.submit(lambda: self._average(buffer))

    def _average(self, buffer: torch.Tensor) -> None:
        me, last = self.peers.me, self.peers.size - 1
        if me == 0:
            self._send(buffer)
            self._receive(buffer)  # the sum of all, from the last rank
            if last > 1:
                self._send(buffer)
        else:
            incoming = torch.empty_like(buffer)
            self._receive(incoming)
            buffer.add_(incoming)  # keep our own gradient: receive beside it, then add
            self._send(buffer)
            if me < last:
                self._receive(buffer)
                if me < last - 1:
                    self._send(buffer)
        buffer.div_(self.peers.size)

    def _send(self, buffer: torch.Tensor) -> None:
        right = self.peers.ranks[(self.peers.me + 1) % self.peers.size]
        self.peers.post.send(buffer, right, TAG).wait()
        self.bytes_sent += buffer.nbytes

    def _receive(self, buffer: torch.Tensor) -> None:
        left = self.peers.ranks[self.peers.me - 1]
        self.peers.post.receive(buffer, left, TAG).wait()

    def close(self) -> None:
        self._courier.close()
