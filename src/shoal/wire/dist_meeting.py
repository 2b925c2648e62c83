"""How two ranks come to have a group of gloo's, and what they tell each other beforehand."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from shoal.wire.connections import Connection, connections
from shoal.wire.gpu_lane import GpuLane
from shoal.wire.lending import Lender, Seals, is_readable
from shoal.wire.loans import Loans

MakeLane = Callable[[dist.Store, int], GpuLane]


class Met(NamedTuple):
    group: Any
    lane: GpuLane | None
    loans: Loans
    connections: set[Connection]
    """Those of the group, if nobody else made one meanwhile."""


class Meeting:
    """Of one rank with others, one after the other, at a store."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        address: str,
        timeout_s: float,
        seals: Seals | None,
        make_lane: MakeLane | None,
    ) -> None:
        """seals: where this rank lends. make_lane: for tensors that go from GPU to GPU."""
        gloo: Any = dist.ProcessGroupGloo
        self._options = gloo._Options()
        self._options._timeout = timedelta(seconds=timeout_s)
        self._options._threads = 1
        self._options._devices = [gloo.create_device(hostname=address)]
        self._make_group = gloo
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._seals = seals
        self._make_lane = make_lane

    def with_rank(self, other: int, *, may_lend: bool) -> Met:
        """may_lend: to each other, if both do; the other says the same. Raises RuntimeError."""
        low, high = sorted((self._rank, other))
        store = dist.PrefixStore(f"{low}-{high}", self._store)
        place = int(self._rank > other)
        before = connections()
        group = self._make_group(store, place, 2, self._options)
        lane = self._make_lane(store, place) if self._make_lane else None
        made = connections() - before
        loans = Loans(self._rank)
        if may_lend and lane is None:
            self._introduce(store, other, loans)
        return Met(group, lane, loans, made)

    def _introduce(self, store: dist.Store, other: int, loans: Loans) -> None:
        """Tell each other who lends where, and who can read it."""

        def exchange(what: str, own: str) -> bytes:
            store.set(f"{what}-{self._rank}", own)
            its = f"{what}-{other}"
            store.wait([its], timedelta(seconds=self._timeout_s))
            return store.get(its)

        lender = self._seals.lender if self._seals else None
        told = exchange("lender", msgspec.json.encode(lender).decode())
        its = msgspec.json.decode(told, type=Lender | None)
        if self._seals and its and is_readable(its, self._rank):
            loans.lender = its
        loans.borrows = exchange("borrows", "yes" if loans.lender else "no") == b"yes"
