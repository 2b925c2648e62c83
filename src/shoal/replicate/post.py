"""How a sync that goes from rank to rank sends its chunks: by torch.distributed, or by a link."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from shoal.wire.link import Link


class Delivery(Protocol):
    """A chunk under way."""

    def wait(self) -> object: ...


class Post(Protocol):
    """Sends and receives at once; chunks between two ranks keep their order per tag."""

    def send(self, chunk: torch.Tensor, to: int, tag: int) -> Delivery: ...

    def receive(self, place: torch.Tensor, source: int, tag: int) -> Delivery: ...


class GroupPost:
    """torch.distributed, on a group's own connections."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def send(self, chunk: torch.Tensor, to: int, tag: int) -> Delivery:
        # With fewer elements than ranks some chunks are empty, on both ends of a link alike.
        if not chunk.numel():
            return _NOTHING
        return dist.isend(chunk, to, group=self._group, tag=tag) or _NOTHING

    def receive(self, place: torch.Tensor, source: int, tag: int) -> Delivery:
        if not place.numel():
            return _NOTHING
        return dist.irecv(place, source, group=self._group, tag=tag) or _NOTHING


class LinkPost:
    """A link of the wire's."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, chunk: torch.Tensor, to: int, tag: int) -> Delivery:
        return self._link.isend(chunk, to, f"sync {tag}")

    def receive(self, place: torch.Tensor, source: int, tag: int) -> Delivery:
        return self._link.irecv(source, f"sync {tag}", into=place)


class _Nothing:
    def wait(self) -> None:
        return None


_NOTHING = _Nothing()
