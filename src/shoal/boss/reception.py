"""The boss's front desk: who has applied, who is hired, who has said where it listens.

Pure but for the clock: it is told of calls and gives answers; sockets are elsewhere.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

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
    WorkerStatus,
    encode,
    read_call,
)
from shoal.version import VERSION
from shoal.wire.zmq_sockets import Card

SILENCE_S = 5.0
"""An applicant that has not called for so long has left."""


@dataclass
class Applicant:
    """A worker that has called. It may call again by another connection, and stays the same."""

    caller: bytes
    """Its newest connection."""
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
        self._applicants: dict[str, Applicant] = {}
        """By id, the first first."""
        self._round = secrets.randbits(40)  # a worker may have an offer of the boss before this one
        self._roster: Roster | None = None
        """Where there is one, nobody more is needed."""
        self.turned_away: dict[str, str] = {}
        """By who it was: why somebody could not be taken."""
        self.troubles: dict[int, Unable] = {}
        """By rank: why a worker that has the roster could not link up."""

    def on_call(self, caller: bytes, content: bytes, key: str) -> bytes | None:
        """What to answer at once. Raises WireError for what is no call."""
        call = read_call(content)
        if isinstance(call, Question):
            return encode(self._told_status())
        if isinstance(call, Ready):
            self._take_card(caller, call)
            return None
        if isinstance(call, Unable):
            known = self._hired_by(caller, call.round)
            if known is not None:
                self.troubles[known.rank] = call
            return None
        return encode(self._take_application(caller, call))

    def _told_status(self) -> Status:
        """Of a boss that still waits: who has come so far."""
        own = self._status()
        return own if own.workers else msgspec.structs.replace(own, workers=self._waiting())

    def _waiting(self) -> list[WorkerStatus]:
        now = self._clock()
        return [
            WorkerStatus(
                rank=rank,
                host=each.application.host,
                pid=each.application.pid,
                device=each.application.device,
                memory_bytes=0,
                stage=None,
                modules=[],
                step=0,
                num_kept=0,
                last_seen_s=now - each.heard_at,
            )
            for rank, each in enumerate(self.present[: self.wanted], start=1)
        ]

    def _take_application(self, caller: bytes, application: Application) -> Answer:
        """There is an answer to every one: who hears nothing calls by another connection."""
        if (application.shoal, application.torch) != self._versions:
            reason = (
                f"it has shoal {application.shoal} and torch {application.torch}, the boss has "
                f"shoal {self._versions[0]} and torch {self._versions[1]}: install the same"
            )
            self.turned_away[application.who] = reason
            return Full(reason)
        known = self._applicants.get(application.id)
        if known is None and self._roster is None:
            known = Applicant(caller, application, self._clock())
            self._applicants[application.id] = known
        if known is None:
            return self._full()
        known.caller, known.heard_at = caller, self._clock()
        if known.rank and known.card is None:  # it has not heard yet that it is hired
            return self._offer(known)
        if known.rank:  # nor, perhaps, who the others are
            return self._roster or Wait(len(self.unready))
        return Wait(self.missing) if self._roster is None else self._full()

    def _full(self) -> Full:
        own = self._status()
        return Full(
            f"the boss {own.script} (pid {own.pid} of {own.user} on {own.host}) has all the "
            f"workers it wants ({self.wanted})"
        )

    def _take_card(self, caller: bytes, ready: Ready) -> None:
        known = self._hired_by(caller, ready.round)
        if known is not None:
            known.card = ready.card
            known.heard_at = self._clock()

    def _hired_by(self, caller: bytes, round_: int) -> Applicant | None:
        """Who calls so, if it speaks of what it is hired for now."""
        found = [each for each in self.hired if each.caller == caller]
        return found[0] if found and round_ == self._round else None

    @property
    def present(self) -> list[Applicant]:
        """Those who have called lately, the first first; and those who are hired."""
        now = self._clock()
        self._applicants = {
            id_: each
            for id_, each in self._applicants.items()
            if each.rank or now - each.heard_at < SILENCE_S
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
    def unready(self) -> list[Applicant]:
        """Those who are hired, and have not said where they listen."""
        return [each for each in self.hired if each.card is None]

    @property
    def are_ready(self) -> bool:
        return len(self.hired) == self.wanted and not self.unready

    def release(self) -> None:
        """Not all who were hired have answered: all apply again, and those who did not, last."""
        late = {each.application.id: each for each in self.unready}
        others = {id_: each for id_, each in self._applicants.items() if id_ not in late}
        self._applicants = others | late
        for each in self._applicants.values():
            each.rank, each.card = 0, None

    def roster(self, card: Card, name: str) -> tuple[Roster, list[tuple[bytes, bytes]]]:
        """All cards, and whom to tell of them. From now on nobody more is needed."""
        cards = [card, *(a.card for a in self.hired if a.card is not None)]
        names = [name, *(worker_name(a.rank, a.application) for a in self.hired)]
        self._roster = roster = Roster(self._round, cards, names)
        return roster, [(a.caller, encode(roster)) for a in self.hired]

    def dismiss(self) -> None:
        """All are linked up: nobody who calls from now on is one of them."""
        self._applicants.clear()


def worker_name(rank: int, application: Application) -> str:
    return f"worker {rank} ({application.who})"
