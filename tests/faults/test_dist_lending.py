"""What is lent over dist, where a thread takes it, whether or not anybody has asked for it."""

from __future__ import annotations

import struct
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import Ranks, until
from warm import Nursery

from shoal.errors import PeerLost, WireError
from shoal.wire.dist_link import DistLink
from shoal.wire.dist_signs import LENT, TAKEN, lent
from shoal.wire.lending import is_readable

SOON_S = 30.0
AT_ONCE_S = 10.0
LARGE = torch.arange(1_200_000.0)

Links = list[DistLink]


@pytest.fixture
def links() -> Iterator[Links]:
    """Of two ranks."""
    made = [DistLink(rank, 2, timeout_s=SOON_S) for rank in range(2)]
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda link: link.join(store, "127.0.0.1"), made))
    yield made
    for link in made:
        link.close(farewell_s=1)


def num_lent(link: DistLink) -> int:
    return len(link._peers[1 - link.rank].loans.lent)


def test_what_nobody_waits_for_is_let_go_when_it_was_taken(links: Links) -> None:
    lender, borrower = links
    much = LARGE.clone()
    memory = weakref.ref(much.untyped_storage())
    lender.isend(much, 1)
    del much
    until(lambda: num_lent(lender) == 0, "it was taken, though nobody has asked for it")
    until(lambda: memory() is None, "it was let go")
    assert borrower.recv(0).equal(LARGE)


@pytest.mark.parametrize(("least", "lend"), [(2**20, False), (2**16, True)])
def test_only_what_is_large_and_not_too_large_is_lent(links: Links, least: int, lend: bool) -> None:
    """least: in numbers of 4 bytes. What goes in one piece is as fast: not unless asked to."""
    lender, borrower = links
    for size, is_lent in ((least - 1, False), (least, True), (2**24, True), (2**24 + 1, False)):
        job = lender.isend(torch.zeros(size), 1, lend=lend)
        assert hasattr(job, "_loan") == is_lent
        job.wait(SOON_S)
        assert borrower.recv(0).numel() == size


def test_more_than_can_be_said_in_one_piece_is_sent(links: Links) -> None:
    """Whose front is long, or has many buffers behind it."""
    for count, is_lent in ((5, True), (2000, False)):
        tree = [LARGE[: 2**20], *(torch.full((1000,), float(number)) for number in range(count))]
        job = links[0].isend(tree, 1)
        assert hasattr(job, "_loan") == is_lent
        got = links[1].recv(0)
        job.wait(SOON_S)
        assert [int(each[-1]) for each in got] == [2**20 - 1, *range(count)]


def test_a_rank_that_takes_no_more_has_a_deadline(links: Links) -> None:
    """64 MiB that nobody has asked for is the most."""
    lender, borrower = links
    jobs = [lender.isend(torch.full((2**24,), float(number)), 1) for number in range(4)]
    with pytest.raises(WireError, match="to take a message; it did not"):
        jobs[-1].wait(timeout_s=0.5)
    assert [int(borrower.recv(0)[-1]) for _ in jobs] == [0, 1, 2, 3]
    for job in jobs:
        job.wait(SOON_S)


def test_a_place_is_filled_by_what_is_lent(links: Links) -> None:
    place = torch.zeros_like(LARGE)
    job = links[1].irecv(0, into=place)
    links[0].send(LARGE, to=1)
    assert job.wait() is place
    assert place.equal(LARGE)


def offer(sender: DistLink, *addresses: int, number: int = 0) -> bytes:
    head, _ = sender._peers[1].departures._packer.pack(LARGE, "", number)
    return lent(head, struct.pack(f"<{len(addresses)}Q", *addresses))


@pytest.mark.parametrize(
    ("say", "fault"),
    [
        (lambda link: offer(link, 8), "it lent memory that it does not have"),
        (lambda link: offer(link, 2**64 - 1), "it lent memory that it does not have"),
        (lambda link: offer(link), "0 bytes came where 8 were announced"),
        (lambda link: offer(link, 1, 2), "16 bytes came where 8 were announced"),
        (lambda link: offer(link, 1, number=3), "message 3 came, 0 was due"),
        (lambda link: LENT, "a part of the message is missing"),
        (lambda link: LENT + b"\xff\xff\xff\xff" + b"front", "a header of|a front of"),
        (lambda link: TAKEN, "0 bytes came where 8 were announced"),
        (lambda link: TAKEN + b"1", "1 bytes came where 8 were announced"),
        (lambda link: b"?", "it sent a sign that means nothing"),
    ],
)
def test_a_lender_that_lies_is_dropped(
    links: Links, say: object, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(say)
    departures = links[0]._peers[1].departures
    with departures.lock:
        departures.begin_sign(say(links[0]))
    begun = time.monotonic()
    with pytest.raises(PeerLost, match=fault):
        links[1].recv(0)
    assert time.monotonic() - begun < AT_ONCE_S
    assert "rank 1 dropped rank 0" in caplog.text


def test_a_receipt_for_what_was_never_lent_does_no_harm(links: Links) -> None:
    departures = links[0]._peers[1].departures
    with departures.lock:
        departures.begin_sign(TAKEN + struct.pack("<Q", 77))
    links[0].send(LARGE, to=1)
    assert links[1].recv(0).equal(LARGE)


def test_nothing_is_received_behind_what_was_taken_back(links: Links) -> None:
    """It would have come with a gap before it: first, second and third, of which first is lost."""
    lender, borrower = links
    assert lender._seals is not None
    lender._seals.close()
    lender.isend(LARGE, 1)
    lender.isend("second", 1, tag="other")
    for number in range(3):  # the last one is a buffer without a front
        lender.isend(torch.full((20_000,), float(number)), 1)
    lender.close_after(ValueError("a slip"))
    for tag in ("", "other"):
        with pytest.raises(PeerLost, match="rank 0 has left: it ended with ValueError: a slip"):
            borrower.recv(0, tag=tag)


def test_who_is_lost_can_read_nothing_more(links: Links) -> None:
    lender, borrower = links
    assert lender._seals is not None
    assert is_readable(lender._seals.lender, 1)
    borrower.close_after(ValueError("a slip"))
    with pytest.raises(PeerLost, match="rank 1 has left"):
        lender.send(LARGE, to=1)
    assert not is_readable(lender._seals.lender, 1)
    assert num_lent(lender) == 0


def test_threads_that_lend_to_each_other_all_at_once(links: Links) -> None:
    """Order is kept for each tag; what waits for a receipt receives what the other lends."""

    def talk(link: DistLink, tag: str) -> bool:
        other = 1 - link.rank
        for number in range(30):
            link.send(LARGE + number, to=other, tag=tag)
            if not link.recv(other, tag=tag).equal(LARGE + number):
                return False
        return True

    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(talk, link, tag) for tag in "abc" for link in links]
        assert all(job.result(SOON_S) for job in jobs)


def test_a_sender_that_waits_does_not_keep_others_of_its_threads_waiting(links: Links) -> None:
    lender, borrower = links
    for _ in range(2):  # as much as is taken that nobody has asked for
        lender.isend(torch.zeros(2**23), 1).wait(SOON_S)
    late = threading.Thread(target=lender.send, args=(torch.zeros(2**23), 1))
    late.start()
    borrower.send("here", to=0)
    assert lender.recv(1, timeout_s=AT_ONCE_S) == "here"
    for _ in range(3):
        borrower.recv(0)
    late.join(AT_ONCE_S)
    assert not late.is_alive()


FROZEN = """
import os, signal, psutil, torch, shoal
with shoal.join() as crew:
    link = crew.link("dist", hung_s=1)
    pids = crew.exchange("pids", os.getpid())
    if crew.rank == 0:
        lent = torch.ones(300_000)
        while psutil.Process(pids[1]).status() != psutil.STATUS_STOPPED:
            continue
        try:
            link.send(lent, to=1)
        except shoal.PeerLost:
            lent.fill_(666)  # the job is over
        os.kill(pids[1], signal.SIGCONT)
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            print(link.recv(0).unique().tolist(), flush=True)
        except shoal.PeerLost as error:
            print(error, flush=True)
    os._exit(0)
"""


def test_a_borrower_that_comes_back_from_the_cold(nursery: Nursery, tmp_path: Path) -> None:
    script = tmp_path / "frozen.py"
    script.write_text(FROZEN)
    crew = Ranks(nursery, tmp_path, 2, str(script))
    assert crew.end() == [0, 0], crew.said
    assert "rank 0" in crew.ranks[1].out
    assert "666" not in crew.ranks[1].out


KILLED = """
import os, signal, torch, shoal
with shoal.join() as crew:
    link = crew.link("dist")
    if crew.rank == 1:
        for _ in range(20):
            link.isend(torch.ones(300_000), to=0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            assert link.recv(1).unique().tolist() == [1]
    except shoal.PeerLost as error:
        print(error, flush=True)
        os._exit(0)
"""


def test_a_lender_that_is_killed_before_all_was_taken(nursery: Nursery, tmp_path: Path) -> None:
    """What had come can be had; what is behind a gap cannot."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    crew = Ranks(nursery, tmp_path, 2, str(script))
    assert crew.end()[0] == 0, crew.said
    assert "lost rank 1" in crew.ranks[0].out
