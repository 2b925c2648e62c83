"""Lenders that die, leave or lie: nothing is received that was not lent.

Where rank 2 is driven by hand, ranks 0 and 1 are real links that talk with each other meanwhile.
"""

from __future__ import annotations

import random
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from chat import Chat
from mutations import mutate
from processes import Ranks, until
from raw_rank import Frames, RawRank, frames_of
from warm import Nursery
from wire_log import Log

from shoal.errors import PeerLost, WireError
from shoal.wire.apart import take_apart
from shoal.wire.dist_link import DistLink
from shoal.wire.front import pack
from shoal.wire.header import DEFAULT_LIMIT_BYTES
from shoal.wire.lending import Seals, is_readable
from shoal.wire.zmq_link import ZmqLink
from shoal.wire.zmq_signs import GOODBYE, LENT, TAKEN

SOON_S = 30.0
AT_ONCE_S = 10.0
VALUES = numpy.arange(100_000, dtype=numpy.float32)


class Party:
    """Links of ranks 0 and 1, and rank 2, which can lend."""

    def __init__(self, stack: ExitStack, seals: Seals | None) -> None:
        self.links = [stack.enter_context(ZmqLink(rank, 3, timeout_s=SOON_S)) for rank in (0, 1)]
        raw = stack.enter_context(RawRank(2, seals=seals))
        for link in self.links:
            link.connect([*(each.card for each in self.links), raw.card])
        calls = [raw.call(link.card, with_pulse=True).hello() for link in self.links]
        for link in self.links:
            link.settle()
        self.call = calls[0]
        self.chat = stack.enter_context(Chat(*self.links))


@pytest.fixture
def seals() -> Iterator[Seals]:
    made = Seals(3)
    yield made
    made.close()


@pytest.fixture
def party(stack: ExitStack, seals: Seals) -> Party:
    return Party(stack, seals)


def offer(*addresses: int, number: int = 0) -> Frames:
    tree = torch.from_numpy(VALUES)
    head, _ = pack(take_apart(tree), "", number, DEFAULT_LIMIT_BYTES)
    return [LENT, head, struct.pack(f"<{len(addresses)}Q", *addresses)]


def test_a_lender_that_does_everything_right(party: Party, log: Log) -> None:
    """So that what is refused below is refused for what is wrong with it."""
    party.call.say(offer(VALUES.ctypes.data))
    assert party.links[0].recv(2).equal(torch.from_numpy(VALUES))
    party.call.say([TAKEN, struct.pack("<Q", 77)])  # of which nothing is known: no harm
    party.call.say(offer(VALUES.ctypes.data, number=1))
    assert party.links[0].recv(2).equal(torch.from_numpy(VALUES))
    party.chat.goes_on()
    assert log.lines == []


@pytest.mark.parametrize(
    ("frames", "fault"),
    [
        (offer(8), "it lent memory that it does not have"),
        (offer(2**64 - 1), "it lent memory that it does not have"),
        (offer(), "0 bytes came where 8 were announced"),
        (offer(1, 2), "16 bytes came where 8 were announced"),
        (offer(number=3), "message 3 came, 0 was due"),
        (offer(1)[:2], "a part of the message is missing"),
        ([LENT], "a part of the message is missing"),
        ([TAKEN], "a part of the message is missing"),
        ([TAKEN, b"1"], "1 bytes came where 8 were announced"),
    ],
)
def test_a_lender_that_lies_is_dropped(party: Party, log: Log, frames: Frames, fault: str) -> None:
    party.call.say(frames)
    begun = time.monotonic()
    with pytest.raises(PeerLost, match="rank 2"):
        party.links[0].recv(2)
    assert time.monotonic() - begun < AT_ONCE_S
    log.one("rank 0 dropped rank 2", fault)
    party.chat.goes_on()


def test_whoever_said_that_it_does_not_lend(stack: ExitStack, log: Log) -> None:
    party = Party(stack, None)
    party.call.say(offer(VALUES.ctypes.data))
    with pytest.raises(PeerLost, match="rank 2"):
        party.links[0].recv(2)
    log.one("rank 0 dropped rank 2", "it lends what nobody can borrow")


def test_what_was_taken_back_is_not_received(party: Party, seals: Seals, log: Log) -> None:
    seals.close()
    party.call.say(offer(VALUES.ctypes.data))
    with pytest.raises(PeerLost, match="rank 2"):
        party.links[0].recv(2)
    party.chat.goes_on()
    assert log.lines == []  # it may have had its reasons, and did nothing wrong


def test_mutated_offers_do_no_harm() -> None:
    """What comes of one is a message of rank 2's own memory, a rank that is dropped, or nothing."""
    chance = random.Random(4)
    good = [bytes(frame) for frame in offer(VALUES.ctypes.data)]
    for _ in range(15):
        with ExitStack() as stack:
            seals = Seals(3)
            party = Party(stack, seals)
            at = chance.randrange(1, 3)
            party.call.say([*good[:at], mutate(good[at], chance), *good[at + 1 :]])
            with suppress(PeerLost, WireError):
                party.links[0].recv(2, timeout_s=0.1)
            party.chat.goes_on()
            seals.close()


def test_nothing_is_received_behind_what_was_taken_back(party: Party, seals: Seals) -> None:
    """It would have come with a gap before it: first, second and third, of which first is lost."""
    seals.close()
    party.call.say(offer(VALUES.ctypes.data), *frames_of("second", 1, tag="other"))
    party.call.say(offer(VALUES.ctypes.data, number=2), [GOODBYE, b"ValueError: a slip"])
    for tag in ("", "other"):
        with pytest.raises(PeerLost, match="rank 2 has left: it ended with ValueError: a slip"):
            party.links[0].recv(2, tag=tag)


def test_a_borrower_that_was_given_up_reads_nothing_more(party: Party, seals: Seals) -> None:
    """It was frozen, say. What it was lent is its lender's again, and may hold something else."""
    seals.break_for(0)
    party.call.say(offer(VALUES.ctypes.data))
    with pytest.raises(PeerLost, match="rank 2"):
        party.links[0].recv(2)


# -- lenders that go -------------------------------------------------------------------------------


Join = Callable[[int], Sequence[ZmqLink | DistLink]]


@pytest.fixture(params=["zmq", "dist"])
def joined(stack: ExitStack, request: pytest.FixtureRequest) -> Join:
    """Links of so many ranks."""

    def join(size: int) -> Sequence[ZmqLink | DistLink]:
        kind = ZmqLink if request.param == "zmq" else DistLink
        links = [stack.enter_context(kind(rank, size, timeout_s=SOON_S)) for rank in range(size)]
        store = dist.HashStore()

        def connect(link: ZmqLink | DistLink) -> None:
            if isinstance(link, DistLink):
                link.join(store, "127.0.0.1")
            else:
                link.connect([each.card for each in links if isinstance(each, ZmqLink)])
                link.settle()

        with ThreadPoolExecutor(size) as pool:
            list(pool.map(connect, links))
        return links

    return join


@pytest.mark.parametrize("joined", ["zmq"], indirect=True)
def test_who_is_given_up_loses_its_seal_and_the_lender_its_memory(joined: Join) -> None:
    links = joined(3)
    lent = torch.ones(300_000)
    job, other = (links[0].isend(lent, to=rank, lend=True) for rank in (1, 2))
    memory = weakref.ref(lent.untyped_storage())
    links[1].close_after(ValueError("a slip"))
    with pytest.raises(PeerLost, match="rank 1 has left"):
        job.wait(SOON_S)
    seals = links[0]._seals
    assert seals is not None
    assert [is_readable(seals.lender, rank) for rank in (1, 2)] == [False, True]
    assert links[2].recv(0).equal(lent)
    other.wait(SOON_S)
    del lent
    assert memory() is None


def test_ranks_of_one_host_lend(joined: Join) -> None:
    links = joined(2)
    assert links[0].lends_to(1)
    assert links[1].lends_to(0)


@pytest.mark.parametrize("joined", ["zmq"], indirect=True)
def test_whoever_waits_until_much_has_gone_lends_it_and_who_does_not_wait_sends_it(
    joined: Join,
) -> None:
    """Lent memory would be kept for as long as its lender neither waits nor asks."""
    sender, receiver = joined(2)
    much = torch.arange(3 * 2**20, dtype=torch.int32)  # 12 MiB
    sending = threading.Thread(target=sender.send, args=(much, 1))
    sending.start()
    until(lambda: bool(sender._peers[1].loans.lent), "it is lent")
    assert receiver.recv(0).equal(much)
    sending.join(AT_ONCE_S)
    assert not sending.is_alive()
    memory = weakref.ref(much.untyped_storage())
    sender.isend(much, 1)
    assert not sender._peers[1].loans.lent
    del much
    assert receiver.recv(0)[-1] == 3 * 2**20 - 1
    until(lambda: memory() is None, "it was let go")


@pytest.mark.parametrize("joined", ["zmq"], indirect=True)
def test_a_lender_that_ends_with_an_error_does_not_wait_and_takes_it_back(joined: Join) -> None:
    lender, borrower = joined(2)
    lent = torch.ones(300_000)
    job = lender.isend(lent, to=1, lend=True)
    begun = time.monotonic()
    lender.close_after(ValueError("a slip"))
    assert time.monotonic() - begun < 0.4
    lent.zero_()
    with pytest.raises(PeerLost, match="rank 0 has left: it ended with ValueError: a slip"):
        borrower.recv(0)
    assert job.done()
    with pytest.raises(WireError, match="the link was closed"):
        job.wait()


def test_a_lender_that_leaves_in_peace_waits_until_it_was_taken(joined: Join) -> None:
    lender, borrower = joined(2)
    lender.isend(torch.ones(300_000), to=1, lend=True)
    leaving = threading.Thread(target=lender.close)
    leaving.start()
    assert borrower.recv(0).sum() == 300_000
    leaving.join(AT_ONCE_S)
    assert not leaving.is_alive()


def test_a_borrower_that_leaves_is_named(joined: Join) -> None:
    lender, borrower = joined(2)
    job = lender.isend(torch.ones(300_000), to=1, lend=True)
    borrower.close_after(ValueError("a slip"))
    with pytest.raises(PeerLost, match="rank 1 has left: it ended with ValueError: a slip"):
        job.wait(SOON_S)


@pytest.mark.parametrize("joined", ["zmq"], indirect=True)
def test_a_wait_for_a_borrower_has_a_deadline(joined: Join) -> None:
    lender, borrower = joined(2)
    lent = torch.ones(300_000)
    job = lender.isend(lent, to=1, lend=True)
    with pytest.raises(WireError, match="to take a message; it did not"):
        job.wait(timeout_s=0.2)
    assert not job.done()
    assert borrower.recv(0).equal(lent)
    job.wait(SOON_S)


UNTIL_GONE = """
import contextlib, psutil
def until_gone(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            continue
"""
KILLED = (
    UNTIL_GONE
    + """
import os, signal, torch, shoal
with shoal.join() as crew:
    link = crew.link("zmq")
    if crew.rank == 1:
        link.isend(torch.ones(300_000), to=0, lend=True)
        link.send("lent", to=0, tag="other")
        os.kill(os.getpid(), signal.SIGKILL)
    until_gone(crew.roster[1].pid)
    try:
        link.recv(1)
    except shoal.PeerLost as error:
        print(error, flush=True)
        os._exit(0)
"""
)


def test_a_lender_that_is_killed_before_it_was_taken(nursery: Nursery, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    crew = Ranks(nursery, tmp_path, 2, str(script))
    assert crew.end()[0] == 0, crew.said
    assert "lost rank 1" in crew.ranks[0].out


FROZEN = (
    UNTIL_GONE
    + """
import os, signal, torch, shoal
with shoal.join() as crew:
    link = crew.link("zmq", hung_s=1)
    pids = crew.exchange("pids", os.getpid())
    if crew.rank == 0:
        lent = torch.ones(300_000)
        job = link.isend(lent, to=1, lend=True)
        crew.barrier()
        try:
            job.wait()
        except shoal.PeerLost:
            lent.fill_(666)  # the job is over
        os.kill(pids[1], signal.SIGCONT)
        until_gone(pids[1])
    else:
        crew.barrier()
        assert link._router.poll(30_000)  # it has come, and nobody has looked at it
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            print(link.recv(0).unique().tolist(), flush=True)
        except shoal.PeerLost as error:
            print(error, flush=True)
    os._exit(0)
"""
)


def test_a_borrower_that_comes_back_from_the_cold(nursery: Nursery, tmp_path: Path) -> None:
    script = tmp_path / "frozen.py"
    script.write_text(FROZEN)
    crew = Ranks(nursery, tmp_path, 2, str(script))
    assert crew.end() == [0, 0], crew.said
    assert "rank 0" in crew.ranks[1].out
    assert "666" not in crew.ranks[1].out
