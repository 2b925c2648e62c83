"""Who is told of as waited for in vain, and when."""

from __future__ import annotations

import pytest

from shoal.launch import missed
from shoal.launch.missed import SURE_S, Missed
from shoal.report.events import Waiting, encode

WAITS = encode(Waiting(text="waiting for rank 1 of 3, 2 s"))
WAITS_NO_MORE = encode(Waiting(text=""))


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(missed, "time", made)
    return made


def test_a_rank_that_ended_is_told_of_once_when_another_waits_on(clock: Clock) -> None:
    told: list[str] = []
    watch = Missed(told.append)
    watch.note_event(0, WAITS)
    watch.note_end(1, "desktop")
    watch.note_event(0, WAITS)
    assert told == [], "it may have been said before the end"
    clock.now_s += SURE_S + 1
    watch.note_event(0, WAITS_NO_MORE)
    assert told == []
    watch.note_event(2, WAITS)
    watch.note_event(0, WAITS)
    (text,) = told
    assert text.startswith("rank 1 (desktop) has ended with exit code 0, and rank 2 still waits")


def test_ranks_that_end_and_are_not_waited_for_are_nobodys_concern(clock: Clock) -> None:
    told: list[str] = []
    watch = Missed(told.append)
    watch.note_end(1, "desktop")
    clock.now_s += 1000
    assert told == []
