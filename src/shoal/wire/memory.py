"""A link between threads of one process: for tests, and for watching how messages behave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from shoal.errors import PeerLost, WireError
from shoal.wire import front
from shoal.wire.header import DEFAULT_LIMIT_BYTES
from shoal.wire.link import DONE, FAREWELL_S, Job, Link, has_left
from shoal.wire.slots import view_of
from shoal.wire.tree import Tree


class MemoryLink(Link):
    """Delivers at once, through the same headers and checks as every other link."""

    def __init__(self, rank: int, links: Sequence[MemoryLink], size: int, timeout_s: float) -> None:
        super().__init__(rank, size, timeout_s)
        self._links = links
        self._sent = [0] * size
        self._packer = front.Packer(DEFAULT_LIMIT_BYTES)
        self._reader = front.FrontReader(DEFAULT_LIMIT_BYTES)
        self._open = True

    @classmethod
    def crew(cls, size: int, timeout_s: float = 60.0) -> list[Self]:
        """The links of `size` ranks, joined with each other."""
        links: list[Self] = []
        links += [cls(rank, links, size, timeout_s) for rank in range(size)]
        return links

    def isend(self, tree: Tree, to: int, tag: str = "", *, lend: bool = False) -> Job:
        self._check(to, tag)
        if not self._open:
            raise WireError("the link was closed")
        peer = self._links[to]
        if not peer._open:
            raise self._inbox.lost(to)
        head, buffers = self._packer.pack(tree, tag, self._sent[to])
        self._sent[to] += 1
        _, read = self._reader.read(memoryview(head))
        arrival = peer._inbox.arrive(self.rank, read)
        for number, start, end in read.small:
            arrival.take(number, bytearray(head[start:end]))
        for number, buffer in zip(read.behind, buffers, strict=True):
            arrival.room(number)[:] = view_of(buffer)
        peer._inbox.deliver(arrival)
        return DONE

    def close(self, farewell_s: float = FAREWELL_S, reason: str = "") -> None:
        if self._open and not self.is_inherited:
            self._open = False
            super().close(farewell_s, reason)
            for peer in self._links:
                peer._inbox.lose(self.rank, PeerLost(has_left(f"rank {self.rank}", reason)))
