"""Links with keys: whoever has the wrong one, or none, is named once and kept out.

Ranks 0 and 1 are real links that talk with each other all the while; rank 2 is driven by hand.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from chat import Chat
from raw_rank import RawRank, frames_of
from waiting import within
from wire_log import Log

from shoal.errors import PeerLost, WireError
from shoal.wire.keys import AuthorizedKeys, KeyPair, new_pair
from shoal.wire.zmq_gate import Keys
from shoal.wire.zmq_link import ZmqLink

SOON_S = 30.0
AT_ONCE_S = 8.0
"""For what must not take as long as a farewell."""


class Ring:
    """The keys of a crew, and the file that says whose are welcome."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pairs = [new_pair() for _ in range(4)]
        """Of ranks 0, 1 and 2; and of someone who is welcome, but no rank."""
        self.authorize(*self.pairs)

    def authorize(self, *pairs: KeyPair) -> None:
        lines = [f"{pair.public} key-{number}\n" for number, pair in enumerate(pairs)]
        self.path.write_text("".join(lines))
        self.path.chmod(0o600)

    def link(self, rank: int, size: int = 3, pair: KeyPair | None = None) -> ZmqLink:
        keys = Keys(pair or self.pairs[rank], AuthorizedKeys(self.path))
        return ZmqLink(rank, size, keys=keys, timeout_s=SOON_S)


class Party:
    """Links of ranks 0 and 1, and rank 2 that has not called yet."""

    def __init__(self, stack: ExitStack, ring: Ring, third: RawRank) -> None:
        self.links = [stack.enter_context(ring.link(rank)) for rank in (0, 1)]
        self.raw = stack.enter_context(third)
        self.cards = [*(link.card for link in self.links), third.card]
        for link in self.links:
            link.connect(self.cards)
        self._stack = stack

    def settle(self) -> None:
        """With a rank 2 that does everything right."""
        self.calls = [self.raw.call(link.card, with_pulse=True).hello() for link in self.links]
        for link in self.links:
            link.settle()
        self.chat = self._stack.enter_context(Chat(*self.links))

    def rank_2_is_well(self) -> None:
        for link, call in zip(self.links, self.calls, strict=True):
            call.say(*frames_of("well", tag="well"))
            assert link.recv(2, tag="well") == "well"


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path / "authorized_keys")


@pytest.fixture
def party(stack: ExitStack, ring: Ring) -> Party:
    made = Party(stack, ring, RawRank(2, ring.pairs[2]))
    made.settle()
    return made


def other(stack: ExitStack, keys: KeyPair | None) -> RawRank:
    """Someone else, with other keys or none."""
    return stack.enter_context(RawRank(2, keys))


def test_a_rank_with_its_own_key_is_let_in(party: Party, log: Log) -> None:
    """So that what is refused below is refused for what is wrong with it."""
    party.rank_2_is_well()
    party.chat.goes_on()
    assert log.lines == []


def test_a_key_that_is_not_authorized(stack: ExitStack, ring: Ring, party: Party, log: Log) -> None:
    pair = new_pair()
    other(stack, pair).call(party.cards[0]).hello().say(*frames_of("a lie"))
    log.one("rank 0 refused a caller from ", f"its key {pair.public} is not in {ring.path}")
    party.chat.goes_on()
    party.rank_2_is_well()
    assert len(log.lines) == 1


def test_a_key_of_no_rank_of_this_crew(
    stack: ExitStack, ring: Ring, party: Party, log: Log
) -> None:
    other(stack, ring.pairs[3]).call(party.cards[0]).hello().say(*frames_of("a lie"))
    log.one("rank 0 refused a caller from ", "its key (key-3) is not that of any rank")
    party.chat.goes_on()
    party.rank_2_is_well()
    assert len(log.lines) == 1


def test_no_key_at_all(stack: ExitStack, party: Party, log: Log) -> None:
    other(stack, None).call(party.cards[0]).hello().say(*frames_of("a lie"))
    log.one("rank 0 refused a caller ", "comes without a key")
    party.chat.goes_on()
    party.rank_2_is_well()
    assert len(log.lines) == 1


def test_a_key_that_is_known_by_its_public_half_only(
    stack: ExitStack, ring: Ring, party: Party, log: Log
) -> None:
    half = KeyPair(ring.pairs[2].public, new_pair().secret)
    other(stack, half).call(party.cards[0]).hello().say(*frames_of("a lie"))
    log.one("rank 0 refused a caller ")
    party.chat.goes_on()
    party.rank_2_is_well()
    assert len(log.lines) == 1


def test_the_key_of_another_rank_before_the_rank_itself_comes(
    stack: ExitStack, ring: Ring, log: Log
) -> None:
    """Rank 1's key opens the gate; rank 2's place is not rank 1's to take."""
    party = Party(stack, ring, RawRank(2, ring.pairs[2]))
    impostor = other(stack, ring.pairs[1])
    impostor.call(party.cards[0]).hello().say(*frames_of("a lie"))
    with pytest.raises(PeerLost, match="rank 0 dropped rank 2: it has the key of another"):
        party.links[0].recv(2)
    log.one("rank 0 dropped rank 2: it has the key of another")
    with pytest.raises(WireError, match="rank 2: rank 0 dropped rank 2: it has the key"):
        party.links[0].settle(timeout_s=0.2)
    stack.enter_context(Chat(*party.links)).goes_on()
    assert len(log.lines) == 1


def test_the_key_of_another_rank_after_the_rank_itself_came(
    stack: ExitStack, ring: Ring, party: Party, log: Log
) -> None:
    impostor = other(stack, ring.pairs[1]).call(party.cards[0])
    impostor.hello().say(*frames_of("a lie", tag="lie"), [b"g"])
    party.chat.goes_on()
    impostor.close()
    party.rank_2_is_well()
    log.one("rank 0")
    with pytest.raises(WireError, match="none came"):
        party.links[0].recv(2, tag="lie", timeout_s=0)


def test_a_rank_that_listens_with_another_key_than_its_card_says(
    stack: ExitStack, ring: Ring
) -> None:
    """Someone else has taken its address."""
    party = Party(stack, ring, RawRank(2, ring.pairs[2], listens_with=ring.pairs[3]))
    party.raw.call(party.cards[0]).hello()
    with pytest.raises(WireError, match="rank 2: what answers there is no rank, or has another"):
        party.links[0].settle()
    begun = time.monotonic()
    within(SOON_S, stack.close)  # it was for ever: ZeroMQ kept what could not be sent
    assert time.monotonic() < begun + AT_ONCE_S


def test_a_rank_whose_address_speaks_without_keys(stack: ExitStack, ring: Ring) -> None:
    without = stack.enter_context(RawRank(2))
    without.card = type(without.card)(
        without.card.endpoint, without.card.token, ring.pairs[2].public
    )
    party = Party(stack, ring, without)
    with pytest.raises(WireError, match="rank 2: what answers there is no rank, or has another"):
        party.links[0].settle()


def test_ranks_with_and_without_keys_do_not_mix(stack: ExitStack, ring: Ring) -> None:
    keyed = stack.enter_context(ring.link(0, size=2))
    bare = stack.enter_context(ZmqLink(1, 2))
    cards = [keyed.card, bare.card]
    with pytest.raises(WireError, match="rank 0 came with keys, rank 1 without"):
        keyed.connect(cards)
    with pytest.raises(WireError, match="rank 1 came without keys, rank 0 with"):
        bare.connect(cards)
    for link in (keyed, bare):
        link.close(farewell_s=0)


# -- authorized_keys that change while links are open ----------------------------------------------


def meet(stack: ExitStack, ring: Ring) -> list[ZmqLink]:
    links = [stack.enter_context(ring.link(rank, size=2)) for rank in (0, 1)]
    for link in links:
        link.connect([each.card for each in links])
    for link in links:
        link.settle()
    return links


def test_a_key_that_is_added_counts_for_the_next_link(stack: ExitStack, ring: Ring) -> None:
    ring.authorize(ring.pairs[0])
    refused = [stack.enter_context(ring.link(rank, size=2)) for rank in (0, 1)]
    with pytest.raises(WireError) as caught:
        refused[0].connect([each.card for each in refused])
    assert "rank 0 does not know the key of rank 1" in str(caught.value)
    assert f"append this line to {ring.path} on rank 0's host" in str(caught.value)
    line = str(caught.value).splitlines()[-1]
    assert line == f"{ring.pairs[1].public} rank-1"
    with ring.path.open("a") as file:
        file.write(f"{line}\n")
    links = meet(stack, ring)
    stack.enter_context(Chat(*links)).goes_on()


def test_a_key_that_is_removed_opens_no_further_link(
    stack: ExitStack, ring: Ring, party: Party, log: Log
) -> None:
    ring.authorize(ring.pairs[0], ring.pairs[1])
    party.rank_2_is_well()  # it is in already, and stays
    again = other(stack, ring.pairs[2])
    again.call(party.cards[0]).hello()
    log.one("rank 0 refused a caller", f"its key {ring.pairs[2].public} is not in {ring.path}")
    links = [stack.enter_context(ring.link(n, 2, pair=ring.pairs[2 * n])) for n in (0, 1)]
    with pytest.raises(WireError, match="rank 0 does not know the key of rank 1"):
        links[0].connect([link.card for link in links])
    party.chat.goes_on()


def test_a_file_that_others_may_write_opens_no_further_link(
    stack: ExitStack, ring: Ring, party: Party, log: Log
) -> None:
    ring.path.chmod(0o666)
    other(stack, ring.pairs[2]).call(party.cards[0]).hello()
    log.one("rank 0 refused a caller", f"{ring.path} has mode 0666", "chmod go-w")
    party.chat.goes_on()
    party.rank_2_is_well()
    assert len(log.lines) == 1
