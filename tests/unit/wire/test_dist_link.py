"""Links over gloo: receives that wait for what may never come, and signs of life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.errors import PeerLost, PeerSilent, WireError
from shoal.wire.dist_link import DistLink
from shoal.wire.dist_parts import FIRST, PIECE, PIECE_BYTES
from shoal.wire.first_piece import MAX_PIECE_BYTES, MOST_ROOM_BYTES, with_length
from shoal.wire.tree import Tree, tensors_of, with_tensors

SOON_S = 20.0
HUNG_S = 0.6
AT_ONCE_S = 8.0
"""For what must not take as long as a farewell."""

Join = Callable[..., list[DistLink]]


@pytest.fixture
def join() -> Iterator[Join]:
    """The links of two ranks, joined at `store`, that send whatever its size."""
    made: list[DistLink] = []

    def begin(store: dist.Store | None = None, **settings: Any) -> list[DistLink]:
        store = store or dist.HashStore()
        settings = {"timeout_s": SOON_S, "lends": False, **settings}
        links = [DistLink(rank, 2, **settings) for rank in range(2)]
        made.extend(links)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda link: link.join(store, "127.0.0.1"), links))
        return links

    yield begin
    for link in made:
        link.close(farewell_s=1)


def filled(size_bytes: int, number: int) -> torch.Tensor:
    return torch.full((size_bytes,), number % 256, dtype=torch.uint8)


@pytest.mark.parametrize(
    "sizes_mib",
    [[1, 5, 1], [1, 5, 5, 1, 1], [4, 8, 4], [2, 6, 10, 2], [1, 2, 3, 4, 5, 6, 7]],
    ids=str,
)
def test_messages_of_any_sizes_in_any_order(join: Join, sizes_mib: list[int]) -> None:
    """A receive that is held ready for a piece like the last one must not swallow another's.

    The last piece of a buffer that is cut may be as long as the whole buffer before.
    """
    assert (MOST_ROOM_BYTES, PIECE_BYTES) == (4 * 2**20, 2**20), "sizes were chosen for them"
    links = join(hung_s=3)
    for number, size in enumerate(sizes_mib):
        message = filled(size * 2**20, number)
        job = links[0].isend(message, to=1)
        assert torch.equal(links[1].recv(0), message)
        job.wait()


def test_several_buffers_of_which_one_is_as_long_as_the_last(join: Join) -> None:
    links = join()
    mib = 2**20
    for number in range(4):
        messages = [filled(size, number) for size in (mib, 5 * mib, mib, mib, 4 * mib)]
        job = links[0].isend(messages, to=1)
        for got, sent in zip(links[1].recv(0), messages, strict=True):
            assert torch.equal(got, sent)
        job.wait()


def test_memory_held_ready_does_not_grow_with_the_number_of_sizes(join: Join) -> None:
    """A receive of gloo's that was begun cannot be taken back: each size once left one behind."""
    links = join()
    for number in range(200):
        links[0].send(filled(2**20 + 8 * number, number), to=1)
        assert links[1].recv(0)[0] == number % 256
    held = sum(place.nbytes for _, place in links[1]._peers[0].arrivals.spare.values())
    assert held <= 64 * 2**20


def test_a_peer_with_nothing_to_say_is_alive(join: Join) -> None:
    """Its signs of life come as often as is needed, also where little patience is asked for."""
    links = join(hung_s=0.5)
    with pytest.raises(WireError, match="none came"):
        links[0].recv(1, timeout_s=1.5)
    links[1].send("I was here", to=0)
    assert links[0].recv(1) == "I was here"


def test_a_peer_that_takes_long_to_receive_is_alive(join: Join) -> None:
    """Its signs of life do not come through: gloo sends nothing while there is more to be read."""
    links = join(hung_s=HUNG_S)
    job = links[0].isend(filled(2**30, 7), to=1)
    coming = links[1].irecv(0)
    job.wait()
    assert coming.wait()[-1] == 7


@pytest.fixture
def mute(join: Join) -> Iterator[DistLink]:
    """The link of rank 0 to a rank that connects and then says nothing, as if it were frozen."""
    store = dist.HashStore()
    link = DistLink(0, 2, timeout_s=SOON_S, hung_s=HUNG_S)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=SOON_S)
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(link.join, store, "127.0.0.1")
        meeting = dist.PrefixStore("0-1", store)
        group = gloo(meeting, 1, 2, options)
        meeting.set("lender-1", "null")
        meeting.set("borrows-1", "no")
        joining.result(SOON_S)
    yield link
    link.close(farewell_s=0)
    del group


def test_a_frozen_peer_is_named(mute: DistLink) -> None:
    with pytest.raises(PeerLost, match="rank 0 lost rank 1: no sign of life"):
        mute.recv(1)


def test_a_frozen_peer_is_named_while_sending(mute: DistLink) -> None:
    with pytest.raises(PeerLost, match="rank 0 lost rank 1: no sign of life"):
        mute.send(filled(64 * 2**20, 1), to=1)


def test_a_message_to_a_frozen_peer_does_not_stay_under_way_for_ever(mute: DistLink) -> None:
    """Also where its sender never waits, and only asks."""
    job = mute.isend(filled(64 * 2**20, 1), to=1)
    deadline = time.monotonic() + SOON_S
    while not job.done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(PeerLost, match="rank 0 lost rank 1: no sign of life"):
        job.wait()


@pytest.mark.parametrize("known", [True, False], ids=["known", "not known yet"])
def test_closing_does_not_wait_for_a_peer_that_is_frozen(mute: DistLink, known: bool) -> None:
    """No longer, that is, than it takes to find that it is."""
    if known:
        with pytest.raises(PeerLost):
            mute.recv(1)
    begun = time.monotonic()
    mute.close()
    assert time.monotonic() < begun + AT_ONCE_S


def test_two_ranks_that_leave_at_the_same_moment_both_say_goodbye(join: Join) -> None:
    for _ in range(20):
        links = join(hung_s=3)
        together = threading.Barrier(2)

        def leave(link: DistLink, together: threading.Barrier = together) -> None:
            together.wait(SOON_S)
            link.close()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(leave, links))
        check_parted(links)


def test_a_link_that_was_closed_holds_no_connections(join: Join) -> None:
    """Crews keep their links until they end, and a script may open one for every epoch."""

    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    for used in (False, True):
        before = num_open()
        links = join(hung_s=3)
        if used:  # receives wait for more of the same
            links[0].send(filled(2**20, 1), to=1)
            links[1].recv(0)
        assert num_open() > before
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(DistLink.close, links))
        assert num_open() <= before


def test_a_goodbye_that_comes_before_we_have_said_ours(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once kept ours from being sent, and the other waited for as long as for a frozen one."""
    links = join(hung_s=3)
    is_leaving = threading.Event()
    close = links[0]._inbox.close

    def close_slowly() -> None:
        """In the middle of closing: it is not open any more, and has not said goodbye."""
        close()
        is_leaving.set()
        deadline = time.monotonic() + SOON_S
        while not links[0]._peers[1].lost and time.monotonic() < deadline:
            time.sleep(0.001)

    monkeypatch.setattr(links[0]._inbox, "close", close_slowly)
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(links[0].close)
        assert is_leaving.wait(SOON_S)
        links[1].close()
        leaving.result(SOON_S)
    check_parted(links)


def check_parted(links: list[DistLink]) -> None:
    """Each knows that the other has left, and nothing of theirs still runs."""
    for link in links:
        other = 1 - link.rank
        assert str(link._inbox.lost(other)) == f"rank {other} has left"
        assert not any(thread.is_alive() for thread in link._peers[other].threads)


def test_a_peer_that_comes_back_writes_no_more_into_places_that_were_given_back(
    join: Join,
) -> None:
    """It froze in the midst of a message: gloo's receives still waited, for the user's memory."""
    sender, receiver = join(hung_s=HUNG_S)
    receiver._peers[0].arrivals._connections.clear()  # here the sender lives, and shows it
    way = sender._peers[1].departures
    message = filled(3 * MOST_ROOM_BYTES, 1)
    place = torch.zeros_like(message)
    job = receiver.irecv(0, into=place)
    head, _ = way._packer.pack(message, "", 0)
    front = torch.frombuffer(bytearray(with_length(head)), dtype=torch.uint8)
    assert len(front) <= MAX_PIECE_BYTES
    for tag, piece in ((FIRST, front), (PIECE, message[:PIECE_BYTES])):
        way._group.send([piece], way._other, tag).wait(timedelta(seconds=SOON_S))
    with pytest.raises(PeerSilent, match="no sign of life"):
        job.wait()
    place.zero_()

    def come_back() -> None:
        rest = way._group.send([message[PIECE_BYTES : 2 * PIECE_BYTES]], way._other, PIECE)
        rest.wait(timedelta(seconds=SOON_S))

    with pytest.raises(RuntimeError):
        come_back()
    assert not place.any()


def test_room_that_was_copied_out_is_held_ready_only_for_its_own_length(join: Join) -> None:
    """Of two buffers into places, the first came into room held ready, the last did not."""
    links = join(hung_s=3)
    first, last = filled(200_000, 1), filled(100_000, 2)
    places = [torch.empty_like(first), torch.empty_like(last)]
    jobs = [links[1].irecv(0), links[1].irecv(0, into=places), links[1].irecv(0)]
    for message in ([first], [first, last], [last]):
        links[0].send(message, to=1)
    assert torch.equal(jobs[2].wait()[0], last)


def streams(number: int) -> list[Tree]:
    """Of messages, each with the number in it."""
    large, larger = filled(100_000, number), filled(2 * PIECE_BYTES, number)
    return [
        large,
        {"x": large, "mask": filled(7, 1)},
        {"x": large, "again": filled(100_000, number + 1), "larger": larger},
        {"x": large, "step": number},  # no two fronts are the same
        filled(100, number),
        [filled(60_000, number) for _ in range(30)],  # too many to go along with their front
        larger,
        "no tensor at all",
    ]


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "into="])
@pytest.mark.parametrize("kind", range(len(streams(0))))
def test_a_steady_stream_that_ends_in_something_else(join: Join, kind: int, in_place: bool) -> None:
    """From the third on equal fronts are left out, until there is another, or a sign of life."""
    links = join(hung_s=HUNG_S)
    for other in range(len(streams(0))):
        for number in range(5):
            check_trip(links, streams(number)[kind], in_place)
        if other == 3:  # and a sign comes where a buffer may come
            with pytest.raises(WireError, match="none came"):
                links[1].recv(0, timeout_s=HUNG_S)
        check_trip(links, streams(9)[other], in_place)
    check_trip(links, streams(10)[kind], in_place)


def check_trip(links: list[DistLink], message: Tree, in_place: bool) -> None:
    """It arrives, and what is done to it afterwards does not reach the next one."""
    places = with_tensors(
        message, {path: torch.zeros_like(t) for path, t in tensors_of(message).items()}
    )
    into = places if in_place and tensors_of(message) else None
    links[0].send(message, to=1)
    got = links[1].recv(0, into=into)
    sent, came = tensors_of(message), tensors_of(got)
    assert with_tensors(got, dict.fromkeys(came)) == with_tensors(message, dict.fromkeys(sent))
    for path, tensor in came.items():
        assert torch.equal(tensor, sent[path])
        assert into is None or tensor is tensors_of(into)[path]
        tensor.fill_(255)


def test_messages_of_a_steady_stream_have_memory_of_their_own(join: Join) -> None:
    links = join()
    jobs = [links[0].isend(filled(100_000, number), to=1) for number in range(20)]
    got = [links[1].recv(0) for _ in range(20)]
    for job in jobs:
        job.wait()
    assert [tensor.unique().tolist() for tensor in got] == [[number] for number in range(20)]
    assert len({tensor.data_ptr() for tensor in got}) == 20


def test_a_buffer_where_a_front_is_due(join: Join, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is held ready for one: it is read as a front, and is none."""
    links = join()
    way = links[0]._peers[1].departures
    way._group.send([filled(32 * 1024, 255)], way._other, FIRST).wait(timedelta(seconds=SOON_S))
    with pytest.raises(PeerLost, match="a buffer came where a front was due"):
        links[1].recv(0)
    assert "rank 1 dropped rank 0" in caplog.text


def test_a_message_that_came_twice_is_refused(join: Join) -> None:
    links = join()
    way = links[0]._peers[1].departures
    head, _ = way._packer.pack("once", "", 0)
    front = torch.frombuffer(bytearray(with_length(head)), dtype=torch.uint8)
    for _ in range(2):
        way._group.send([front], way._other, FIRST).wait(timedelta(seconds=SOON_S))
    assert links[1].recv(0) == "once"
    with pytest.raises(PeerLost, match="message 0 came, 1 was due"):
        links[1].recv(0)
