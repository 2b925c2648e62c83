"""Callers that are no ranks, and a rank that talks nonsense: named once, sent away, survived.

Ranks 0 and 1 are real links that talk with each other all the while; rank 2 is driven by hand.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from contextlib import ExitStack, suppress

import msgspec
import pytest
import torch
from chat import Chat
from mutations import mutate
from processes import until
from raw_rank import Frames, RawCall, RawRank, frames_of
from waiting import within
from wire_log import Log

from shoal.errors import PeerLost, WireError
from shoal.wire import zmq_gate
from shoal.wire.front import MAX_FRONT_BYTES
from shoal.wire.zmq_link import ZmqLink
from shoal.wire.zmq_pieces import PIECE_BYTES, WHOLE_BYTES
from shoal.wire.zmq_signs import GOODBYE
from shoal.wire.zmq_sockets import Card

SOON_S = 30.0
AT_ONCE_S = 10.0
"""For what must not take as long as a deadline of a wait."""
LIMIT_BYTES = 2**24

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Of ZMTP 3.1: whoever says this speaks zmq."""
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
LARGE_PART = bytes(2**20)

MEDIUM = torch.arange(10_000)  # goes whole, with its front
LARGE = torch.arange((WHOLE_BYTES + PIECE_BYTES) // 8)  # five pieces


class Party:
    """Links of ranks 0 and 1, and rank 2 with its calls to both."""

    def __init__(self, stack: ExitStack, limit_bytes: int = LIMIT_BYTES) -> None:
        made = [
            stack.enter_context(ZmqLink(rank, 3, timeout_s=SOON_S, limit_bytes=limit_bytes))
            for rank in (0, 1)
        ]
        self.raw = stack.enter_context(RawRank(2))
        self.links = made
        self.cards = [*(link.card for link in made), self.raw.card]
        for link in made:
            link.connect(self.cards)
        self.calls = [self.raw.call(link.card, with_pulse=True).hello() for link in made]
        for link in made:
            link.settle()
        self.chat = stack.enter_context(Chat(*made))

    @property
    def call(self) -> RawCall:
        """Rank 2's to rank 0."""
        return self.calls[0]

    def rank_2_is_well(self) -> None:
        for link, call in zip(self.links, self.calls, strict=True):
            call.say(*frames_of("well", tag="well"))
            assert link.recv(2, tag="well") == "well"


@pytest.fixture
def party(stack: ExitStack) -> Party:
    return Party(stack)


# -- callers that are no ranks ---------------------------------------------------------------------


def caller(link: ZmqLink) -> socket.socket:
    host, _, port = link.card.endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SOON_S)


def send_often(connection: socket.socket, content: bytes) -> None:
    for _ in range(2000):
        connection.sendall(content)


def is_hung_up_on(connection: socket.socket) -> None:
    try:
        while connection.recv(4096):
            continue
    except ConnectionResetError:
        return


def test_a_port_scanner_is_told_of(party: Party, log: Log) -> None:
    caller(party.links[0]).close()
    log.one("rank 0 refused a caller", "before it had said who it is")
    party.chat.goes_on()
    party.rank_2_is_well()
    assert len(log.lines) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        random.Random(1).randbytes(1000),
        bytes(1000),
        b"\xff" * 1000,
        b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x03abc",
        GREETING + random.Random(2).randbytes(1000),
        GREETING + b"\x04\xff" + b"\x05READY" * 50,
        GREETING.replace(b"NULL\0", b"CURVE") + random.Random(3).randbytes(1000),
        GREETING.replace(b"NULL\0", b"PLAIN") + b"\x04\x0a\x05HELLO\x01a\x01b",
    ],
    ids=[
        "http", "random", "zeros", "ones", "zmtp 2", "zmtp 3 and garbage", "half a command",
        "curve", "plain",
    ],
)  # fmt: skip
def test_who_does_not_speak_as_ranks_do_is_refused(party: Party, log: Log, data: bytes) -> None:
    with caller(party.links[0]) as connection:
        connection.sendall(data)
        with suppress(OSError):  # it has hung up already
            connection.shutdown(socket.SHUT_WR)
        is_hung_up_on(connection)
    log.one("rank 0 refused a caller ")
    party.chat.goes_on()
    party.rank_2_is_well()
    assert len(log.lines) == 1


@pytest.mark.parametrize("words", [b"", GREETING], ids=["nothing", "a greeting"])
def test_who_says_nothing_more_is_sent_away(
    stack: ExitStack, log: Log, monkeypatch: pytest.MonkeyPatch, words: bytes
) -> None:
    monkeypatch.setattr(zmq_gate, "HANDSHAKE_S", 0.5)
    party = Party(stack)
    with caller(party.links[0]) as connection:
        connection.sendall(words)
        is_hung_up_on(connection)
    log.one("rank 0 refused a caller from 127.0.0.1:", "before it had said who it is")
    party.chat.goes_on()
    party.rank_2_is_well()


def test_many_bad_callers_at_once(party: Party, log: Log) -> None:
    """They do not keep the good ones from talking, nor fill the log."""
    chance = random.Random(4)
    for _ in range(100):
        with ExitStack() as several:
            for connection in [several.enter_context(caller(party.links[0])) for _ in range(5)]:
                begin = chance.choice([b"", GREETING, GREETING[: chance.randrange(64)]])
                connection.sendall(begin + chance.randbytes(chance.randrange(200)))
    party.chat.goes_on()
    party.rank_2_is_well()
    reasons = {line.rpartition(": ")[2] for line in log.lines}
    assert len(reasons) == len(log.lines) <= 2, log.lines
    assert 1 <= len(log.lines) <= 4, log.lines  # where known with the address, else without


def test_a_message_of_endless_parts_is_cut_off(party: Party, log: Log) -> None:
    """ZeroMQ keeps all parts until the last has come, and limits only the size of each."""
    part = b"\x03" + len(LARGE_PART).to_bytes(8, "big") + LARGE_PART  # long, and more to come
    with caller(party.links[0]) as connection:
        connection.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
        answer = b""
        while b"READY" not in answer:
            answer += connection.recv(1000)
        with pytest.raises(OSError):
            send_often(connection, part)
    log.one("rank 0 refused a caller from 127.0.0.1:", "more than 64 MiB")
    party.chat.goes_on()
    party.rank_2_is_well()
    assert len(log.lines) == 1


def test_many_strangers_of_one_host_cost_one_line(party: Party, log: Log) -> None:
    for number in range(20):
        with party.raw.call(party.links[0].card, identity=b"nobody %d" % number) as stranger:
            stranger.hello()
            party.chat.goes_on()
    log.one("rank 0 ignores a stranger at 127.0.0.1:", "no rank of this crew")
    party.rank_2_is_well()


@pytest.mark.parametrize("identity", [b"nobody", b"2:", b"9:token", b"\xff" * 255])
def test_a_stranger_is_ignored(party: Party, log: Log, identity: bytes) -> None:
    with party.raw.call(party.links[0].card, identity=identity) as stranger:
        stranger.hello().say(*frames_of("believe me"), [b"a", b"b", b"c"], *frames_of(LARGE))
        log.one("rank 0 ignores a stranger at 127.0.0.1:", "no rank of this crew")
        party.chat.goes_on()
        stranger.say(*frames_of("once more"))  # which is read when it has gone
    party.chat.goes_on()
    party.rank_2_is_well()
    with caller(party.links[0]) as other:  # when this has been told of, nothing more is to come
        other.sendall(b"\xff" * 1000)
        is_hung_up_on(other)
    until(lambda: "does not speak as a rank does" in log.lines[-1], "the line of the other")
    assert len(log.lines) == 2, "the stranger was told of twice"


@pytest.mark.parametrize("rank", [1, 2])
def test_who_claims_to_be_a_rank_that_is_here_is_ignored(party: Party, log: Log, rank: int) -> None:
    """It knows the token. Without keys that is all there is, but the first to come stays."""
    with party.raw.call(party.links[0].card, rank=rank) as impostor:
        impostor.hello().say(*frames_of("believe me", tag="lie"), [b"g"])
        party.chat.goes_on()
        party.rank_2_is_well()
    log.one("rank 0")
    with pytest.raises(WireError, match="none came"):
        party.links[0].recv(rank, tag="lie", timeout_s=0)
    party.chat.goes_on()


def test_who_takes_the_place_of_a_rank_before_it_comes_takes_no_other(
    stack: ExitStack, log: Log
) -> None:
    """Without keys the token is all there is: rank 0 is deceived, and no more than that."""
    links = [stack.enter_context(ZmqLink(rank, 3, timeout_s=SOON_S)) for rank in range(3)]
    raw = stack.enter_context(RawRank(2))
    cards = [link.card for link in links]
    links[0].connect(cards)
    raw.call(cards[0]).hello().say(*frames_of("a lie"))
    assert links[0].recv(2) == "a lie"
    for link in links[1:]:
        link.connect(cards)
    for link in links:
        link.settle()
    links[2].send("the truth", to=0)
    links[2].send("the truth", to=1)
    assert links[1].recv(2) == "the truth"
    chat = stack.enter_context(Chat(links[0], links[1]))
    chat.goes_on()
    with pytest.raises(WireError, match="none came"):
        links[0].recv(2, timeout_s=0)
    assert log.lines == []


# -- a rank that talks nonsense --------------------------------------------------------------------

SMALL = frames_of({"x": torch.arange(9.0)})[0][0]
WHOLE = frames_of(MEDIUM)[0]
FRONT, *PIECES = frames_of(LARGE)


def by_hand(plan: object, slots: list[object], total: int, number: int = 0) -> bytes:
    header = msgspec.msgpack.encode([1, "", total, 0, [plan, slots]])
    return struct.pack("<QI", number, len(header)) + header


def with_piece(number: int, piece: bytes, at: int) -> list[Frames]:
    """LARGE, with another piece in one place."""
    return [FRONT, *PIECES[:at], [PIECES[at][0], piece], *PIECES[at + 1 :]]


NONSENSE: dict[str, list[Frames]] = {
    "an empty frame": [[b""]],
    "half a front": [[SMALL[: len(SMALL) // 2]]],
    "a front cut by a byte": [[SMALL[:-1]]],
    "a front longer by a byte": [[SMALL + b"\0"]],
    "the same again": [[SMALL], [SMALL]],
    "a later number first": frames_of("x", number=1),
    "a number left out": [*frames_of("x", number=0), *frames_of("x", number=2)],
    "a far number": frames_of("x", number=2**64 - 1),
    "something behind a front": [[SMALL, b"more"]],
    "much behind a front": [[SMALL, *[b"more"] * 100]],
    "an unknown sign": [[b"?"]],
    "hello again": [[b"h"]],
    "no plan that makes sense": [[by_hand(["z", 0], [], 0)]],
    "a shape that no tensor has": [[by_hand(["b", 0], [["uint8", [0, 2**62, 2**62]]], 0)]],
    "a message over the limit": [[by_hand(["b", 0], [["uint8", [LIMIT_BYTES + 1]]], 0), b"x"]],
    "other totals than shapes": [[by_hand(["b", 0], [["uint8", [70_000]]], 70_001), bytes(70_000)]],
    "a buffer too short": [[WHOLE[0], WHOLE[1][:-1]]],
    "a buffer too long": [[WHOLE[0], WHOLE[1] + b"\0"]],
    "a buffer that did not come with its front": [WHOLE[:1], WHOLE[1:]],
    "something behind a buffer": [[*WHOLE, b"more"]],
    "the same buffer again": [WHOLE, WHOLE],
    "no first piece": [FRONT, PIECES[0][:1]],
    "the first piece with its front": [[*FRONT, PIECES[0][1]]],
    "a first piece too long": with_piece(0, bytes(PIECE_BYTES + 1), at=0),
    "a first piece too short": with_piece(0, bytes(PIECE_BYTES - 1), at=0),
    "an empty piece": with_piece(0, b"", at=1),
    "a piece too long": with_piece(0, bytes(PIECE_BYTES + 1), at=1),
    "a piece again": [FRONT, *PIECES[:2], PIECES[1]],
    "pieces in another order": [FRONT, PIECES[0], PIECES[2], PIECES[1]],
    "a piece left out": [FRONT, PIECES[0], PIECES[2]],
    "a piece too many": [FRONT, *PIECES, PIECES[2]],
    "a piece of nothing": [PIECES[1]],
    "a stamp without its piece": [FRONT, PIECES[0], PIECES[1][:1]],
    "something behind a piece": [FRONT, PIECES[0], [*PIECES[1], b"more"]],
    "a message between pieces": [FRONT, PIECES[0], *frames_of("x", number=1)],
    "a piece of another message": [FRONT, PIECES[0], frames_of(LARGE, number=1)[2]],
}


@pytest.mark.parametrize("messages", NONSENSE.values(), ids=NONSENSE)
def test_a_rank_that_talks_nonsense_is_dropped(
    party: Party, log: Log, messages: list[Frames]
) -> None:
    links = party.links
    party.call.say(*messages)
    with pytest.raises(PeerLost, match="rank 0 dropped rank 2: "):
        links[0].recv(2, tag="never", timeout_s=AT_ONCE_S)
    line = log.one("rank 0 dropped rank 2: ")
    party.call.say(*frames_of("listen", tag="later"), [b"g"], *messages)
    party.chat.goes_on()
    with pytest.raises(PeerLost, match="rank 0 dropped rank 2: "):
        links[0].recv(2, tag="later")
    with pytest.raises(PeerLost, match="rank 0 dropped rank 2: "):
        links[0].send("are you there?", to=2)
    party.calls[1].say(*frames_of("well", tag="well"))
    assert links[1].recv(2, tag="well") == "well"  # rank 1 has nothing against it
    party.call.close()
    party.chat.goes_on()
    assert log.lines == [line]


def test_the_pieces_that_nonsense_is_made_of_are_good(party: Party, log: Log) -> None:
    trees = [LARGE, "text", LARGE, MEDIUM, MEDIUM]
    party.call.say(
        [SMALL], *(frames for n, tree in enumerate(trees, 1) for frames in frames_of(tree, n))
    )
    assert torch.equal(party.links[0].recv(2)["x"], torch.arange(9.0))
    assert torch.equal(party.links[0].recv(2), LARGE)
    assert party.links[0].recv(2) == "text"
    assert torch.equal(party.links[0].recv(2, into=torch.zeros_like(LARGE)), LARGE)
    assert torch.equal(party.links[0].recv(2), MEDIUM)
    assert torch.equal(party.links[0].recv(2, into=torch.zeros_like(MEDIUM)), MEDIUM)
    party.call.say([b"g"])
    with pytest.raises(PeerLost, match="rank 2 has left"):
        party.links[0].recv(2)
    assert log.lines == []


def test_what_came_before_the_nonsense_can_still_be_had(party: Party) -> None:
    party.call.say(*frames_of("first"), *frames_of(LARGE, 1), [b"?"])
    with pytest.raises(PeerLost, match="rank 0 dropped rank 2"):
        party.links[0].recv(2, tag="never", timeout_s=AT_ONCE_S)
    assert party.links[0].recv(2) == "first"
    assert torch.equal(party.links[0].recv(2), LARGE)
    with pytest.raises(PeerLost, match="rank 0 dropped rank 2"):
        party.links[0].recv(2)


def test_whoever_waits_for_the_rest_of_a_message_is_told(party: Party) -> None:
    """Its buffer is half full when the nonsense comes."""
    waiting = party.links[0].irecv(2, into=torch.zeros_like(LARGE))
    party.call.say(FRONT, PIECES[0], PIECES[2])
    with pytest.raises(PeerLost, match="rank 0 dropped rank 2: something else came where piece 1"):
        waiting.wait(AT_ONCE_S)
    party.chat.goes_on()


def test_a_message_that_no_memory_holds_is_refused(stack: ExitStack, log: Log) -> None:
    """It is within the limit, which is generous here; but there is not so much on any machine."""
    party = Party(stack, limit_bytes=2**60)
    size = 2**47
    party.call.say([by_hand(["b", 0], [["uint8", [size]]], size), bytes(PIECE_BYTES)])
    with pytest.raises(PeerLost, match="rank 0 dropped rank 2: "):
        party.links[0].recv(2, timeout_s=AT_ONCE_S)
    log.one("rank 0 dropped rank 2: ", str(size))
    party.chat.goes_on()


def test_a_frame_too_large_to_be_received_ends_its_sender(party: Party, log: Log) -> None:
    """Zmq ends the connection before the frame has come; so no memory is taken for it."""
    party.call.say([bytes(max(MAX_FRONT_BYTES, WHOLE_BYTES) + 1)])
    with pytest.raises(PeerLost, match="rank 2"):
        party.links[0].recv(2, timeout_s=AT_ONCE_S)
    party.chat.goes_on()
    assert len(log.lines) <= 1
    with pytest.raises(PeerLost, match="rank 2"):
        party.links[0].send("are you there?", to=2)


@pytest.mark.parametrize("way", ["its ear", "its mouth", "both"])
def test_a_rank_whose_connections_break_is_lost(party: Party, log: Log, way: str) -> None:
    """Either one is enough: without the other it is of no use. Rank 1 talks all the while."""
    if way == "its ear":
        party.raw.stop_listening()
    elif way == "its mouth":
        party.call.close()
    else:
        party.raw.close()
    begun = time.monotonic()
    with pytest.raises(PeerLost, match="rank 0 lost rank 2"):
        party.links[0].recv(2, timeout_s=SOON_S)
    assert time.monotonic() < begun + AT_ONCE_S
    party.chat.goes_on()
    assert log.lines == []


# -- ranks that are not there ----------------------------------------------------------------------


def test_ranks_at_whose_address_nobody_listens(stack: ExitStack) -> None:
    """A connection may fail while it is being made, or a moment later: both happen here.

    A hello to whom the connection had failed already was waited for, without a deadline.
    """
    link = stack.enter_context(ZmqLink(0, 100, timeout_s=SOON_S))
    with RawRank(1) as raw:
        card = raw.card
    within(SOON_S, lambda: link.connect([link.card, *[card] * 99]))
    begun = time.monotonic()
    with pytest.raises(WireError, match="rank 1: nothing listens there"):
        link.settle()
    within(SOON_S, link.close)
    assert time.monotonic() < begun + AT_ONCE_S


def test_who_had_no_time_to_answer_is_not_blamed(stack: ExitStack) -> None:
    """Where one rank cannot be reached, which is known at once, the others were said to be behind
    a firewall."""
    link = stack.enter_context(ZmqLink(0, 3, timeout_s=SOON_S))
    with RawRank(1) as raw:
        nobody = raw.card
    slow = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    silent = Card(f"tcp://127.0.0.1:{slow.getsockname()[1]}", "token")
    link.connect([link.card, nobody, silent])
    with pytest.raises(WireError, match="rank 1: nothing listens there") as caught:
        link.settle()
    assert "rank 2" not in str(caught.value)


# -- a rank that talks nonsense, thousands of times ------------------------------------------------

FUZZ_RANKS = 80
FUZZ_ROUNDS = 25
FUZZ_LIMIT_S = 60.0

SENSE = [
    frames_of({"x": torch.arange(9.0), "s": "text"}),
    frames_of([torch.zeros(20_000), 3]),
    frames_of([torch.zeros(40, 1000), torch.ones(50, 1000), "n"]),
    [*frames_of("x"), *frames_of(torch.zeros(30_000), 1)],
]


def nonsense(chance: random.Random) -> list[Frames]:
    """The messages of a good rank, with frames changed, lost, repeated or swapped."""
    messages = [list(frames) for frames in chance.choice(SENSE)]
    for _ in range(chance.randint(1, 3)):
        frames = chance.choice(messages)
        at = chance.randrange(len(frames))
        match chance.randrange(8):
            case 0:
                frames.insert(at, frames[at])
            case 1 if len(frames) > 1:
                del frames[at]
            case 2:
                messages.insert(0, messages[-1])
            case 3 if len(messages) > 1:
                messages.pop(chance.randrange(len(messages)))
            case 4:
                frames.insert(at, chance.randbytes(chance.randrange(20)))
            case _:
                frames[at] = mutate(frames[at], chance)
    return [frames for frames in messages if frames]


@pytest.mark.timeout(FUZZ_LIMIT_S + 60)
def test_thousands_of_mutated_messages_are_survived(stack: ExitStack, log: Log) -> None:
    """Each of many raw ranks says one thing, and then `end` if it is still listened to."""
    chance = random.Random(20261115)
    begun = time.monotonic()
    dropped = 0
    for _ in range(FUZZ_ROUNDS):
        with ExitStack() as party:
            dropped += one_round(party, chance)
        assert time.monotonic() < begun + FUZZ_LIMIT_S, "took too long: some message is slow"
    assert dropped > FUZZ_RANKS * FUZZ_ROUNDS // 2
    assert len(log.lines) <= dropped


def one_round(party: ExitStack, chance: random.Random) -> int:
    """How many of the ranks were dropped (or left: some say goodbye by chance)."""
    size = 2 + FUZZ_RANKS
    good = [
        party.enter_context(ZmqLink(r, size if r == 0 else 2, timeout_s=SOON_S, limit_bytes=2**24))
        for r in (0, 1)
    ]
    raw = party.enter_context(RawRank(2))
    good[0].connect([good[0].card, good[1].card, *[raw.card] * FUZZ_RANKS])
    good[1].connect([good[0].card, good[1].card])
    calls = {rank: raw.call(good[0].card, rank=rank).hello() for rank in range(2, size)}
    for link in good:
        link.settle()
    for call in calls.values():
        said = nonsense(chance)
        call.say(*said, *frames_of("end", len({id(each) for each in said}), tag="end"))
    dropped = 0
    for rank in calls:
        good[1].send(rank, to=0)
        try:
            assert good[0].recv(rank, tag="end") == "end"
        except PeerLost:
            dropped += 1
        assert good[0].recv(1) == rank
        good[0].send(rank, to=1)
        assert good[1].recv(0) == rank
    return dropped


def test_a_rank_that_was_interrupted_in_the_midst_of_a_message_has_left(party: Party) -> None:
    """Ctrl-C ends a send between two pieces: it says goodbye there, and no nonsense."""
    party.call.say(*frames_of(LARGE)[:3], [GOODBYE, b"KeyboardInterrupt"])
    with pytest.raises(PeerLost, match="rank 2 has left: it ended with KeyboardInterrupt"):
        party.links[0].recv(2)
