"""The boss's front desk, with a clock that stands still until it is told otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from mutations import mutate

from shoal.boss.calls import (
    Answer,
    Application,
    Full,
    Hired,
    Question,
    Ready,
    Roster,
    Status,
    Wait,
    encode,
    read_answer,
    read_call,
)
from shoal.boss.reception import SILENCE_S, Reception
from shoal.errors import WireError
from shoal.version import VERSION
from shoal.wire.zmq_sockets import Card

OWN = Card("tcp://127.0.0.1:1024", "boss")
STATUS = Status("laptop", 7, "ann", "train.py", 12, 2, [])


def application(who: str, **changes: object) -> Application:
    made = Application(who, ord(who[0]), "cpu", 2**30, VERSION, "2.13", f"id of {who}")
    return msgspec.structs.replace(made, **changes)


class Desk:
    """A reception, and those who call there: each is known by the first letter of its name."""

    def __init__(self, wanted: int) -> None:
        self.now = 100.0
        self.reception = Reception(
            wanted, "2.13", timeout_s=30.0, hung_s=5.0, status=lambda: STATUS, clock=self.clock
        )

    def clock(self) -> float:
        return self.now

    def call(self, who: str, what: Application | Ready | Question) -> Answer | None:
        content = self.reception.on_call(who.encode(), encode(what), "")
        return None if content is None else read_answer(content)

    def apply(self, who: str, **changes: object) -> Answer | None:
        return self.call(who, application(who, **changes))

    def hire(self) -> dict[str, Hired]:
        return {caller.decode(): _hired(offer) for caller, offer in self.reception.hire()}

    def settle(self, *others: str) -> Roster:
        """All who are hired say where they listen."""
        for who, offer in self.hire().items():
            self.call(who, ready(offer, who))
        assert self.reception.are_ready
        roster, offers = self.reception.roster(OWN, "the boss")
        assert [read_answer(content) for _, content in offers] == [roster] * len(offers)
        assert [caller.decode() for caller, _ in offers] == list(others)
        return roster


def _hired(content: bytes) -> Hired:
    offer = read_answer(content)
    assert isinstance(offer, Hired)
    return offer


def ready(offer: Hired, who: str) -> Ready:
    return Ready(offer.round, Card(f"tcp://{who}:1", who))


@pytest.fixture
def desk() -> Desk:
    return Desk(2)


# -- until there are enough ------------------------------------------------------------------------


def test_those_who_apply_are_told_how_many_are_missing(desk: Desk) -> None:
    assert desk.apply("anna") == Wait(1)
    assert desk.apply("anna") == Wait(1)  # again, and no second one
    assert desk.apply("bert") == Wait(0)
    assert [each.application.host for each in desk.reception.present] == ["anna", "bert"]


def test_who_is_silent_has_left(desk: Desk) -> None:
    desk.apply("anna")
    desk.now += SILENCE_S / 2
    desk.apply("bert")
    desk.now += SILENCE_S / 2
    assert desk.reception.missing == 1
    assert [each.application.host for each in desk.reception.present] == ["bert"]
    assert desk.apply("anna") == Wait(0)  # and may come back


def test_another_version_is_turned_away_with_the_reason(desk: Desk) -> None:
    for changes in ({"shoal": "0.0"}, {"torch": "1.0"}):
        answer = desk.apply("anna", **changes)
        assert isinstance(answer, Full)
        assert f"the boss has shoal {VERSION} and torch 2.13" in answer.reason
        assert next(iter(changes.values())) in answer.reason
    assert list(desk.reception.turned_away) == ["anna, pid 97"]
    assert desk.reception.missing == 2


def test_who_asks_a_boss_that_waits_is_told_who_has_come(desk: Desk) -> None:
    assert desk.call("xaver", Question()) == STATUS
    for who in ("anna", "bert", "carl"):
        desk.apply(who)
    desk.now += 2.0
    told = desk.call("xaver", Question())
    assert isinstance(told, Status)
    assert [(w.rank, w.host, w.pid, w.stage) for w in told.workers] == [
        (1, "anna", 97, None), (2, "bert", 98, None),
    ]  # fmt: skip
    assert [w.last_seen_s for w in told.workers] == [2.0, 2.0]
    assert (told.script, told.wanted) == (STATUS.script, STATUS.wanted)


# -- hiring ----------------------------------------------------------------------------------------


def test_the_first_who_came_are_hired(desk: Desk) -> None:
    for who in ("anna", "bert", "carl"):
        desk.apply(who)
    offers = desk.hire()
    assert {who: (o.rank, o.size) for who, o in offers.items()} == {"anna": (1, 3), "bert": (2, 3)}
    assert offers["anna"].timeout_s == 30.0
    assert offers["anna"].hung_s == 5.0
    assert desk.apply("carl") == Wait(0)
    assert desk.apply("anna") == offers["anna"]  # which it did not hear
    assert not desk.reception.are_ready


def test_the_roster_has_everybody_by_rank(desk: Desk) -> None:
    desk.apply("anna")
    desk.apply("bert")
    roster = desk.settle("anna", "bert")
    assert [card.token for card in roster.cards] == ["boss", "anna", "bert"]
    assert roster.names == ["the boss", "worker 1 (anna, pid 97)", "worker 2 (bert, pid 98)"]


def test_cards_of_those_who_are_not_hired_or_of_another_round_do_not_count(desk: Desk) -> None:
    for who in ("anna", "bert", "carl"):
        desk.apply(who)
    offers = desk.hire()
    desk.call("carl", ready(offers["anna"], "carl"))
    desk.call("xaver", ready(offers["anna"], "xaver"))
    desk.call("anna", ready(msgspec.structs.replace(offers["anna"], round=-1), "anna"))
    desk.call("bert", ready(offers["bert"], "bert"))
    assert [each.card and each.card.token for each in desk.reception.hired] == [None, "bert"]
    assert not desk.reception.are_ready


def test_who_does_not_answer_is_not_hired_again(desk: Desk) -> None:
    """The others get a new offer, of another round: their links are for another crew."""
    for who in ("anna", "bert", "carl"):
        desk.apply(who)
    first = desk.hire()
    desk.call("bert", ready(first["bert"], "bert"))
    for _ in range(2):
        desk.now += SILENCE_S - 1
        desk.apply("bert")
        desk.apply("carl")
    desk.reception.release()
    assert desk.apply("bert") == Wait(0)
    second = desk.hire()
    assert list(second) == ["bert", "carl"]
    assert second["bert"].round != first["bert"].round
    desk.call("bert", ready(first["bert"], "bert"))  # it comes late
    assert not desk.reception.are_ready
    assert [card.token for card in desk.settle("bert", "carl").cards] == ["boss", "bert", "carl"]


@pytest.mark.parametrize("when", ["before", "hired", "ready", "told"])
def test_a_worker_that_calls_by_another_connection_is_the_same(desk: Desk, when: str) -> None:
    """It counted as two, so that there seemed to be enough; both were hired, and one of them never
    answered: round after round, for ever."""
    desk.apply("anna")
    desk.call("anna again", application("anna"))
    desk.apply("anna")  # which was on the way
    assert desk.call("anna again", application("anna")) == Wait(1)
    assert len(desk.reception.present) == 1
    desk.apply("bert")
    if when == "before":
        assert [card.token for card in desk.settle("anna again", "bert").cards[1:]] == [
            "anna again", "bert",
        ]  # fmt: skip
        return
    offers = desk.hire()
    if when == "hired":
        assert desk.call("anna", application("anna")) == offers["anna again"]
        desk.call("anna again", ready(offers["anna again"], "anna"))  # from before
        assert len(desk.reception.unready) == 2
        assert desk.call("anna", application("anna")) == offers["anna again"]
        desk.call("anna", ready(offers["anna again"], "anna"))
    else:
        desk.call("anna again", ready(offers["anna again"], "anna"))
    assert [each.application.host for each in desk.reception.unready] == ["bert"]
    assert desk.call("anna", application("anna")) == Wait(1)  # its card is known
    desk.call("bert", ready(offers["bert"], "bert"))
    assert desk.reception.are_ready
    roster, told = desk.reception.roster(OWN, "the boss")
    assert [caller for caller, _ in told] == [b"anna", b"bert"]
    assert [card.token for card in roster.cards] == ["boss", "anna", "bert"]
    if when == "told":
        assert desk.call("anna again", application("anna")) == roster  # it was not heard
        desk.reception.dismiss()
        assert isinstance(desk.apply("anna"), Full)  # it has left, and comes back


def test_every_application_is_answered(desk: Desk) -> None:
    """Who had given its card was told nothing, and took the boss for gone."""
    desk.apply("anna")
    desk.apply("bert")
    desk.call("anna", ready(desk.hire()["anna"], "anna"))
    assert desk.apply("anna") == Wait(1)
    desk.reception.release()
    assert desk.apply("anna") == Wait(0)


def test_those_who_were_hired_have_time_and_those_who_took_too_long_are_the_last(
    desk: Desk,
) -> None:
    for who in ("anna", "bert", "carl"):
        desk.apply(who)
    desk.call("bert", ready(desk.hire()["bert"], "bert"))
    desk.now += SILENCE_S + 1
    desk.apply("carl")
    desk.apply("bert")
    assert [each.application.host for each in desk.reception.unready] == ["anna"]
    desk.apply("anna")
    desk.reception.release()
    assert [each.application.host for each in desk.reception.present] == ["bert", "carl", "anna"]


def test_two_bosses_number_their_rounds_differently() -> None:
    """A worker that had an offer of a boss that died took that of the next one for the same, and
    came with a link for a crew of another size."""
    offers = []
    for wanted in (2, 1):
        desk = Desk(wanted)
        desk.apply("anna")
        desk.apply("bert")
        offers.append(desk.hire()["anna"])
    assert offers[0].round != offers[1].round


# -- when there are enough -------------------------------------------------------------------------


@pytest.mark.parametrize("came_before", [True, False])
def test_more_than_are_wanted_are_told_who_has_the_others(desk: Desk, came_before: bool) -> None:
    """Who had come before was told to wait for more, since the others did not call any longer."""
    desk.apply("anna")
    desk.apply("bert")
    if came_before:
        desk.apply("carl")
    desk.settle("anna", "bert")
    for _ in range(3):
        answer = desk.apply("carl")
        assert isinstance(answer, Full)
        assert "train.py (pid 7 of ann on laptop) has all the workers it wants (2)" in answer.reason
        desk.now += SILENCE_S - 1


@pytest.mark.parametrize("is_settled", [True, False])
def test_anybody_may_ask_how_it_is_going(desk: Desk, is_settled: bool) -> None:
    if is_settled:
        desk.apply("anna")
        desk.apply("bert")
        desk.settle("anna", "bert")
        desk.reception.dismiss()  # from now on the boss itself knows of them
    assert desk.call("somebody", Question()) == STATUS
    assert not any(each.caller == b"somebody" for each in desk.reception.present)


# -- what is no call -------------------------------------------------------------------------------

NO_CALLS = {
    "nothing": b"",
    "text": b"hello",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(100),
    "not utf-8": b'{"type":"apply","host":"\xff\xfe"}',
    "null": b"null",
    "a list": b"[]",
    "no type": b"{}",
    "another type": b'{"type":"order"}',
    "an answer": encode(Wait(1)),
    "too little": b'{"type":"apply","host":"a"}',
    "too much": b'{"type":"status","more":1}',
    "text for a number": encode(application("anna")).replace(b"97", b'"97"'),
    "a float for a number": encode(application("anna")).replace(b"97", b"9.5"),
    "a number beyond all": encode(application("anna")).replace(b"97", b"1" + b"0" * 400),
    "a number below all": encode(application("anna")).replace(b"97", b"-97"),
    "a name that steers a terminal": encode(application("anna")).replace(b"anna", b"\\u001b[2J"),
    "a name without end": encode(application("anna" * 100)),
    "a card that is none": b'{"type":"ready","round":1,"card":[]}',
    "deep": b"[" * 60_000,
    "deeper inside": b'{"type":"ready","round":1,"card":' + b'{"a":' * 10_000,
}


@pytest.mark.parametrize("content", NO_CALLS.values(), ids=NO_CALLS)
def test_what_is_no_call_is_refused_and_changes_nothing(desk: Desk, content: bytes) -> None:
    desk.apply("anna")
    with pytest.raises(WireError, match="no call"):
        desk.reception.on_call(b"x", content, "")
    assert [each.caller for each in desk.reception.present] == [b"anna"]
    assert desk.apply("bert") == Wait(0)


@pytest.mark.parametrize(
    "read", [read_call, read_answer], ids=lambda read: str(read.__name__).removeprefix("read_")
)
def test_bytes_that_are_slightly_wrong(read: Callable[[bytes], object]) -> None:
    """Read, or refused; nothing else."""
    calls = [application("anna"), ready(Hired(1, 1, 2, 1.0, 1.0), "anna"), Question()]
    answers = [Wait(1), Hired(1, 1, 3, 30.0, 5.0), Roster(1, [OWN], ["boss"]), Full("why"), STATUS]
    draw = random.Random(5)
    refusals = []
    for sample in [encode(each) for each in (*calls, *answers)]:
        for _ in range(200):
            try:
                read(mutate(sample, draw))
            except WireError as error:
                refusals.append(str(error))
    assert len(refusals) > 1000
    assert all("is no" in each for each in refusals)  # call, or boss
