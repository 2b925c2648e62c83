"""What a dist link knows of one peer, and a job that waits for a message to have gone there."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.errors import PeerLost, ShoalError
from shoal.interrupts import Rouse
from shoal.wire.dist_arrivals import Arrivals
from shoal.wire.dist_departures import Departure, Departures
from shoal.wire.dist_turns import Turns
from shoal.wire.link import Job, not_taken
from shoal.wire.loans import LendJob, Loan, Loans
from shoal.wire.terms import seconds
from shoal.wire.tree import Tree

if TYPE_CHECKING:
    from shoal.wire.dist_link import DistLink


A_MOMENT_S = 0.002
"""A wait that is over so soon is nobody else's business."""


@dataclass(eq=False)
class Peer:
    rank: int
    name: str
    arrivals: Arrivals
    departures: Departures
    loans: Loans
    turns: Turns = field(default_factory=Turns)
    lost: PeerLost | None = None
    parting: PeerLost | None = None
    """Why we are breaking off, while gloo ends all that is under way with errors of its own."""
    has_goodbye: bool = False
    """Whether we have said it."""
    is_over: bool = False
    """Nothing will be received from it any more."""
    rouse: Rouse | None = None
    """Ends a receive that waits."""
    threads: list[threading.Thread] = field(default_factory=list)


class Outgoing(Job):
    """A message that is being sent."""

    __slots__ = ("_departure", "_link", "_peer")

    def __init__(self, link: DistLink, peer: Peer, departure: Departure) -> None:
        self._link = link
        self._peer = peer
        self._departure = departure

    def done(self) -> bool:
        return self._link._wait_until(self._is_over, 0)  # which looks for peers that are hung

    def _is_over(self) -> bool:
        return self._departure.is_over or self._peer.lost is not None

    def wait(self, timeout_s: float | None = None) -> Tree:
        limit_s = seconds(timeout_s, self._link.timeout_s)
        # Mostly it has gone in a moment, and nobody else needs to know that we wait.
        bell = self._departure.bell
        if bell.acquire(timeout=min(limit_s, A_MOMENT_S)):
            bell.release()
            return None
        if not self._link._wait_until(self._is_over, limit_s):
            raise not_taken(self._peer.name, limit_s)
        if not self._departure.is_over and self._peer.lost:
            raise copy.copy(self._peer.lost)
        return None


class DistLendJob(LendJob):
    """Whoever waits for it receives from its peer, as who waits for a message of that does."""

    __slots__ = ("_link", "_peer")

    def __init__(self, link: DistLink, peer: Peer, loan: Loan) -> None:
        super().__init__(loan, peer.name, link.timeout_s)
        self._link = link
        self._peer = peer

    @property
    def peer(self) -> int:
        return self._peer.rank

    @property
    def is_over(self) -> bool:
        return self._loan.is_over or self._peer.lost is not None

    def _await(self, limit_s: float) -> bool:
        if limit_s > 0:
            return self._link._wait_for(self, limit_s)
        return self._link._wait_until(lambda: self.is_over, 0)  # which looks for peers that hang

    def _why_not(self) -> ShoalError | None:
        return copy.copy(self._peer.lost)
