"""A link between threads of one process: for tests, and for watching how messages behave."""

from __future__ import annotations

from shoal.errors import PeerLost, WireError
from shoal.wire import header
from shoal.wire.link import Job, Link
from shoal.wire.tree import Tree, take_apart


class MemoryLink(Link):
    """Delivers at once, through the same headers and checks as every other link."""

    def __init__(self, rank: int, links: list[MemoryLink], size: int, timeout_s: float) -> None:
        super().__init__(rank, size, timeout_s)
        self._links = links
        self._sent = [0] * size
        self._open = True

    @classmethod
    def crew(cls, size: int, timeout_s: float = 60.0) -> list[MemoryLink]:
        """The links of `size` ranks, joined with each other."""
        links: list[MemoryLink] = []
        links += [cls(rank, links, size, timeout_s) for rank in range(size)]
        return links

    def isend(self, tree: Tree, to: int, tag: str = "") -> Job:
        self._check_peer(to)
        if not self._open:
            raise WireError("the link was closed")
        peer = self._links[to]
        if not peer._open:
            raise PeerLost(f"rank {self.rank} cannot send to rank {to}: it has left")
        parcel = take_apart(tree)
        head, plan = header.encode(parcel, tag, self._sent[to])
        self._sent[to] += 1
        read = header.decode(head)
        if read.plan_bytes:
            read = header.decode_plan(read, plan)
        arrival = peer._inbox.arrive(self.rank, tag, read.plan, read.slots)
        for room, content in zip(arrival.rooms, parcel.buffers, strict=True):
            room.copy_(content)
        peer._inbox.deliver(arrival)
        return _Sent()

    def close(self) -> None:
        if self._open:
            self._open = False
            super().close()
            for peer in self._links:
                peer._inbox.lose(self.rank, PeerLost(f"rank {self.rank} has left"))


class _Sent(Job):
    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> Tree:
        return None
