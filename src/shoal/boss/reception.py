"""The boss's front desk: who has applied, who is hired, who has said where it listens.

Pure but for the clock: it is told of calls and gives answers; sockets are elsewhere.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal.boss.calls import (
    Answer,
    Application,
    Full,
    Hired,
    Question,
    Ready,
    Roster,
    Status,
    Unable,
    Wait,
    encode,
    read_call,
)
from shoal.version import VERSION
from shoal.wire.zmq_sockets import Card

SILENCE_S = 5.0
"""An applicant that has not called for so long has left."""


@dataclass
class Applicant:
    """A worker that has called."""

    caller: bytes
    application: Application
    heard_at: float
    rank: int = 0
    """0 while it is not hired."""
    card: Card | None = None


class Reception:
    """Takes calls. `present` are those who can be hired."""

    def __init__(
        self,
        wanted: int,
        torch_version: str,
        *,
        timeout_s: float,
        hung_s: float,
        status: Callable[[], Status],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wanted = wanted
        self._versions = (VERSION, torch_version)
        self._timeout_s = timeout_s
        self._hung_s = hung_s
        self._status = status
        self._clock = clock
        self._applicants: dict[bytes, Applicant] = {}
        self._round = secrets.randbits(40)  # a worker may have an offer of the boss before this one
        self._is_open = True
        self.turned_away: dict[str, str] = {}
        """By who it was: why somebody could not be taken."""
        self.troubles: dict[int, Unable] = {}
        """By rank: why a worker that has the roster could not link up."""

    def on_call(self, caller: bytes, content: bytes, key: str) -> bytes | None:
        """What to answer at once. Raises WireError for what is no call."""
        call = read_call(content)
        if isinstance(call, Question):
            return encode(self._status())
        if isinstance(call, Ready):
            self._take_card(caller, call)
            return None
        if isinstance(call, Unable):
            known = self._applicants.get(caller)
            if known is not None and known.rank and call.round == self._round:
                self.troubles[known.rank] = call
            return None
        answer = self._take_application(caller, call)
        return None if answer is None else encode(answer)

    def _take_application(self, caller: bytes, application: Application) -> Answer | None:
        known = self._applicants.get(caller)
        if known is not None:
            known.heard_at = self._clock()
            if known.rank:  # it has not heard yet that it is hired
                return self._offer(known) if known.card is None else None
            return Wait(self.missing) if self._is_open else self._full()
        if (application.shoal, application.torch) != self._versions:
            reason = (
                f"it has shoal {application.shoal} and torch {application.torch}, the boss has "
                f"shoal {self._versions[0]} and torch {self._versions[1]}: install the same"
            )
            self.turned_away[application.who] = reason
            return Full(reason)
        if not self._is_open:
            return self._full()
        self._applicants[caller] = Applicant(caller, application, self._clock())
        return Wait(self.missing)

    def _full(self) -> Full:
        own = self._status()
        return Full(
            f"the boss {own.script} (pid {own.pid} of {own.user} on {own.host}) has all the "
            f"workers it wants ({self.wanted})"
        )

    def _take_card(self, caller: bytes, ready: Ready) -> None:
        known = self._applicants.get(caller)
        if known is not None and known.rank and ready.round == self._round:
            known.card = ready.card
            known.heard_at = self._clock()

    @property
    def present(self) -> list[Applicant]:
        """Those who have called lately, the first first."""
        now = self._clock()
        self._applicants = {
            caller: each
            for caller, each in self._applicants.items()
            if now - each.heard_at < SILENCE_S
        }
        return list(self._applicants.values())

    @property
    def missing(self) -> int:
        return max(self.wanted - len(self.present), 0)

    def hire(self) -> list[tuple[bytes, bytes]]:
        """Offers to the first who came, as (caller, what to tell it). Nobody else is needed."""
        self._round += 1
        offers = []
        for rank, each in enumerate(self.present[: self.wanted], start=1):
            each.rank, each.card = rank, None
            offers.append((each.caller, encode(self._offer(each))))
        return offers

    def _offer(self, applicant: Applicant) -> Hired:
        size = self.wanted + 1
        return Hired(self._round, applicant.rank, size, self._timeout_s, self._hung_s)

    @property
    def hired(self) -> list[Applicant]:
        """By rank."""
        return sorted((a for a in self._applicants.values() if a.rank), key=lambda a: a.rank)

    @property
    def are_ready(self) -> bool:
        return len(self.hired) == self.wanted and all(a.card is not None for a in self.hired)

    def release(self) -> None:
        """Not all who were hired have answered: all apply again."""
        for each in self._applicants.values():
            each.rank, each.card = 0, None

    def roster(self, card: Card, name: str) -> tuple[Roster, list[tuple[bytes, bytes]]]:
        """All cards, and whom to tell of them. From now on nobody is needed."""
        self._is_open = False
        cards = [card, *(a.card for a in self.hired if a.card is not None)]
        names = [name, *(worker_name(a.rank, a.application) for a in self.hired)]
        roster = Roster(self._round, cards, names)
        return roster, [(a.caller, encode(roster)) for a in self.hired]


def worker_name(rank: int, application: Application) -> str:
    return f"worker {rank} ({application.who})"
