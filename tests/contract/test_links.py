"""The contract of links: one suite over every transport."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from trees import same, trees

from shoal.errors import PeerLost, ShoalError, WireError
from shoal.wire.dist_link import DistLink
from shoal.wire.link import Link
from shoal.wire.memory import MemoryLink
from shoal.wire.slots import DTYPES, bytes_of
from shoal.wire.zmq_link import ZmqLink

TRANSPORTS = ("memory", "zmq", "dist", "dist, sent")
SOON_S = 30.0


def joined_by_zmq(size: int) -> list[ZmqLink]:
    made = [ZmqLink(rank, size, timeout_s=SOON_S) for rank in range(size)]
    for link in made:
        link.connect([each.card for each in made])
    for link in made:
        link.settle()
    return made


def joined_by_dist(size: int, *, lends: bool = True) -> list[DistLink]:
    made = [DistLink(rank, size, timeout_s=SOON_S, lends=lends) for rank in range(size)]
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda link: link.join(store, "127.0.0.1"), made))
    return made


@pytest.fixture(params=TRANSPORTS)
def links(request: pytest.FixtureRequest) -> Iterator[list[Link]]:
    """Three ranks, joined."""
    made: list[Link] = []
    if request.param == "memory":
        made += MemoryLink.crew(3, timeout_s=SOON_S)
    if request.param == "zmq":
        made += joined_by_zmq(3)
    if request.param.startswith("dist"):
        made += joined_by_dist(3, lends=request.param == "dist")
    yield made
    for link in made:
        link.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees)
def test_any_tree_arrives_as_it_was_sent(links: list[Link], tree: Any) -> None:
    links[0].send(tree, to=1)
    assert same(links[1].recv(source=0), tree)


def test_order_is_kept_per_peer_and_tag(links: list[Link]) -> None:
    for number in range(20):
        links[0].send(("even", number), to=2, tag="a" if number % 2 else "b")
        links[1].send(("other", number), to=2, tag="a")
    assert [links[2].recv(0, tag="a")[1] for _ in range(10)] == list(range(1, 20, 2))
    assert [links[2].recv(1, tag="a")[1] for _ in range(20)] == list(range(20))
    assert [links[2].recv(0, tag="b")[1] for _ in range(10)] == list(range(0, 20, 2))


def test_a_receive_may_come_before_its_message(links: list[Link]) -> None:
    first, second = links[1].irecv(0, tag="x"), links[1].irecv(0, tag="x")
    assert not first.done()
    links[0].send(1, to=1, tag="x")
    assert first.wait() == 1
    assert first.done()
    assert not second.done()
    links[0].send(2, to=1, tag="x")
    assert second.wait() == 2


def test_sending_at_once_and_waiting_later(links: list[Link]) -> None:
    x = torch.randn(100)
    job = links[0].isend({"x": x}, to=1)
    job.wait(timeout_s=SOON_S)
    assert job.done()
    x.zero_()  # the sender may do as it likes with it now
    assert links[1].recv(0)["x"].abs().sum() > 0


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees)
def test_any_tree_can_be_lent(links: list[Link], tree: Any) -> None:
    large = torch.arange(100_000, dtype=torch.float32)
    whole = [tree, large, large.to(torch.bfloat16).view(100, -1).t(), large[::2]]
    job = links[0].isend(whole, to=1, lend=True)
    assert same(links[1].recv(0), whole)
    assert job.wait(SOON_S) is None
    assert job.done()


def test_what_was_lent_is_the_lenders_again_when_its_job_is_done(links: list[Link]) -> None:
    lent = torch.arange(300_000.0)
    place = torch.zeros(300_000)
    jobs = [links[0].isend(lent, to=1, lend=True) for _ in range(2)]
    got, same_place = links[1].recv(0), links[1].recv(0, into=place)
    for job in jobs:
        job.wait(SOON_S)
    lent.zero_()
    got[0] = 7  # writable, and its own
    assert same_place is place
    assert got[1:].equal(torch.arange(1.0, 300_000))
    assert place.equal(torch.arange(300_000.0))


def test_order_is_kept_between_what_is_lent_and_what_is_sent(links: list[Link]) -> None:
    jobs = [
        links[0].isend(torch.full((100_000,), number), to=1, lend=number % 3 > 0)
        for number in range(12)
    ]
    assert [int(links[1].recv(0)[-1]) for _ in jobs] == list(range(12))
    for job in jobs:
        job.wait(SOON_S)


def test_two_ranks_lend_much_to_each_other_and_wait(links: list[Link]) -> None:
    large = torch.arange(25 * 2**20, dtype=torch.int32)  # 100 MiB

    def exchange(rank: int) -> bool:
        jobs = [links[rank].isend(large, to=1 - rank, lend=True) for _ in range(2)]
        for job in jobs:
            job.wait(SOON_S)
        return all(torch.equal(links[rank].recv(1 - rank), large) for _ in jobs)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(exchange, (0, 1)))


def test_two_ranks_send_much_to_each_other_at_once(links: list[Link]) -> None:
    """More than a receiver takes that nobody has asked for: the second waits for the first."""
    large = torch.arange(25 * 2**20, dtype=torch.int32)  # 100 MiB

    def exchange(rank: int) -> bool:
        for _ in range(2):
            links[rank].send(large, to=1 - rank)
        return all(torch.equal(links[rank].recv(1 - rank), large) for _ in range(2))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(exchange, (0, 1)))


@pytest.mark.parametrize("asks", [False, True], ids=["waits", "asks"])
def test_who_waits_for_another_takes_what_comes_meanwhile(links: list[Link], asks: bool) -> None:
    """Rank 0 waits for rank 2, which waits for rank 1, which has much for rank 0 first."""
    large = torch.zeros(40 * 2**20, dtype=torch.uint8)

    def begin() -> None:
        for _ in range(3):
            links[1].send(large, to=0)
        links[1].send("now you", to=2)

    with ThreadPoolExecutor(2) as pool:
        others = [
            pool.submit(begin),
            pool.submit(lambda: links[2].send(links[2].recv(1), to=0)),
        ]
        job = links[0].irecv(2)
        deadline = time.monotonic() + SOON_S
        while asks and not job.done():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert job.wait() == "now you"
        for other in others:
            other.result(SOON_S)
    assert all(len(links[0].recv(1)) == len(large) for _ in range(3))


def test_autograd_knows_when_a_place_was_filled_that_it_needs(links: list[Link]) -> None:
    """Else the gradients would be those of the next message."""
    place, weight = torch.zeros(30_000), torch.ones(30_000, requires_grad=True)
    job = links[1].irecv(0, into=place)
    links[0].send(torch.ones(30_000), to=1)
    loss = (weight * job.wait()).sum()
    job = links[1].irecv(0, into=place)
    links[0].send(torch.zeros(30_000), to=1)
    job.wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_places_made_in_inference_mode(links: list[Link]) -> None:
    with torch.inference_mode():
        place = torch.zeros(2, 30_000).T  # torch will not fill it elsewhere
    x = torch.randn(30_000, 2)
    for _ in range(2):
        job = links[1].irecv(0, into={"x": place})
        links[0].send({"x": x}, to=1)
        assert torch.equal(job.wait()["x"], x)


def test_who_leaves_because_it_lost_a_rank_says_what_that_one_ended_with(links: list[Link]) -> None:
    with pytest.raises(ZeroDivisionError), links[0]:
        print(1 / 0)
    with pytest.raises(PeerLost), links[1]:
        links[1].recv(0)
    with pytest.raises(PeerLost, match=r"rank 1 has left: .* rank 0 has left: .*ZeroDivision"):
        links[2].recv(1)


@pytest.fixture(scope="module")
def several_gib() -> torch.Tensor:
    return torch.arange((2**31 + 2**26) // 8)


def test_several_gib_in_one_message(links: list[Link], several_gib: torch.Tensor) -> None:
    large = several_gib
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(links[0].send, {"large": large, "note": "all of it"}, 1)
        got = links[1].recv(0)
        sending.result(SOON_S)
    assert got["note"] == "all of it"
    assert torch.equal(got["large"], large)


def test_asking_whether_it_is_done_moves_things_along(links: list[Link]) -> None:
    large = torch.arange(3_000_000)
    coming = links[1].irecv(0)
    going = links[0].isend(large, to=1)
    deadline = time.monotonic() + SOON_S
    while not (coming.done() and going.done()):
        assert time.monotonic() < deadline
    assert torch.equal(coming.wait(0), large)


def test_several_threads_wait_at_once(links: list[Link]) -> None:
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(links[1].recv, 0, f"t{n}", None, SOON_S) for n in range(8)]
        for n in reversed(range(8)):
            links[0].send(n, to=1, tag=f"t{n}")
        assert [each.result(SOON_S) for each in waiting] == list(range(8))


def test_as_many_tags_as_messages(links: list[Link]) -> None:
    kept = links[1].irecv(0, tag="kept")
    for number in range(3000):
        links[0].send(number, to=1, tag=f"step {number}")
    assert [links[1].recv(0, tag=f"step {n}") for n in range(3000)] == list(range(3000))
    links[0].send("here", to=1, tag="kept")
    assert kept.wait() == "here"


def test_received_tensors_are_their_receivers_own(links: list[Link]) -> None:
    x = torch.ones(3)
    links[0].send(x, to=1)
    links[0].send(x, to=2)
    mine = links[1].recv(0)
    mine.add_(1)
    assert x.tolist() == [1, 1, 1]
    assert links[2].recv(0).tolist() == [1, 1, 1]


def test_a_stream_of_large_tensors_leaves_those_alone_that_are_still_held(
    links: list[Link],
) -> None:
    """What nobody holds is used again for the next."""
    size = 9 * 2**20  # 36 MiB
    held = []
    with ThreadPoolExecutor(1) as pool:
        for number in range(6):
            sending = pool.submit(links[0].send, torch.full((size,), number, dtype=torch.int32), 1)
            got = links[1].recv(0)
            sending.result(SOON_S)
            held.append(got[number::9] if number % 2 else got.clone())
    for number, each in enumerate(held):
        assert (each == number).all()


@pytest.mark.parametrize("posted_first", [True, False])
def test_buffers_given_are_filled(links: list[Link], posted_first: bool) -> None:
    room = {"x": torch.zeros(4), "n": torch.zeros(2, dtype=torch.int64)}
    where = room["x"].data_ptr()
    tree = {"x": torch.arange(4.0), "n": torch.tensor([7, 8])}
    if posted_first:
        job = links[1].irecv(0, into=room)
        links[0].send(tree, to=1)
    else:
        links[0].send(tree, to=1)
        job = links[1].irecv(0, into=room)
    got = job.wait()
    assert got["x"].data_ptr() == where
    assert same(room, tree)


@pytest.mark.parametrize("size", [0, 1, 4_000, 144 * 1024, 600_000, 1_500_000])
def test_places_of_every_size_are_filled_without_allocating(
    links: list[Link], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = {"x": torch.zeros(size), "odd": torch.zeros((3, 5), dtype=torch.bfloat16)}
    where = room["x"].data_ptr()
    for number in range(5):
        job = links[1].irecv(0, into=room)
        with monkeypatch.context() as patch:
            patch.setattr("shoal.wire.arrival.allocate", forbidden)
            patch.setattr("shoal.wire.front.shaper", lambda slot: forbidden)
            tree = {"x": torch.full((size,), float(number)), "odd": room["odd"]}
            sent = links[0].isend(tree, to=1)
            assert job.wait()["x"] is room["x"]
            sent.wait()
        assert room["x"].data_ptr() == where
        assert (room["x"] == number).all()


def forbidden(*args: object) -> None:
    raise AssertionError("something was allocated")


@pytest.mark.parametrize("posted_first", [True, False])
@pytest.mark.parametrize("size", [4, 50_000, 2_000_000])
def test_buffers_that_do_not_fit_are_named_and_nothing_is_lost(
    links: list[Link], posted_first: bool, size: int
) -> None:
    """What came is for the next who asks."""
    sent = None if posted_first else links[0].isend(torch.ones(size), to=1)
    job = links[1].irecv(0, into=torch.zeros(3))
    sent = sent or links[0].isend(torch.ones(size), to=1)
    wrong = rf"into= has tensors .*\(3,\); what came has .*\({size},\). .* from rank 0 waits"
    with pytest.raises(WireError, match=wrong):
        job.wait()
    links[0].isend("after", to=1)
    assert torch.equal(links[1].recv(0), torch.ones(size))
    assert links[1].recv(0) == "after"
    sent.wait()


def test_whoever_waits_behind_it_gets_what_did_not_fit(links: list[Link]) -> None:
    first, second = links[1].irecv(0, into=torch.zeros(3)), links[1].irecv(0)
    links[0].send(torch.ones(4), to=1)
    assert torch.equal(second.wait(), torch.ones(4))
    with pytest.raises(WireError, match="into= has"):
        first.wait()


def test_every_error_is_raised_anew(links: list[Link]) -> None:
    """Raised again and again, one would grow by all who were told, and keep what they held."""
    links[1].close()
    caught = []
    for _ in range(2):
        with pytest.raises(PeerLost) as error:
            links[0].recv(1)
        caught.append(error.value)
    assert str(caught[0]) == str(caught[1])
    assert caught[0] is not caught[1]


def test_tensors_lie_where_torch_puts_its_own_if_that_is_wanted(links: list[Link]) -> None:
    """Else a matrix product of them may round otherwise than that of one process."""
    links[1].align()
    sizes = (1, 1000, 50_000, 600_000, 1_500_000)
    for size, dtype in itertools.product(sizes, (torch.float64, torch.float32, torch.bfloat16)):
        tree = [torch.full((size,), n, dtype=dtype) for n in range(3)]
        for message in (tree, tree[0]):
            job = links[0].isend(message, to=1)
            got = links[1].recv(0)
            job.wait()
            for tensor in got if isinstance(got, list) else [got]:
                assert tensor.data_ptr() % 64 == 0
            assert same(got, message)


def test_tensors_begin_where_their_dtype_may(links: list[Link]) -> None:
    """Elsewhere torch may crash: it computes with complex128 by instructions that want it so."""
    for size_bytes in (64, 80_000, 4_500_000):
        bits = torch.ones(size_bytes, dtype=torch.uint8)
        for dtype in DTYPES.values():
            job = links[0].isend([bits.view(dtype)], to=1)
            (got,) = links[1].recv(0)
            job.wait()
            assert got.data_ptr() % dtype.itemsize == 0
            assert torch.equal(bytes_of(got), bits)


@pytest.mark.parametrize("size", [3, 50_000, 2_000_000])
def test_places_whose_memory_holds_other_values(links: list[Link], size: int) -> None:
    """Conjugated, or negative, as views of torch's may be."""
    conjugated = torch.zeros(size, dtype=torch.complex64).conj()
    for room, values in (
        (conjugated, torch.full((size,), 1 + 2j)),
        (torch._neg_view(torch.zeros(size)), torch.full((size,), 3.0)),
    ):
        job = links[1].irecv(0, into=room)
        sent = links[0].isend(values, to=1)
        assert job.wait() is room
        sent.wait()
        assert torch.equal(room.resolve_conj().resolve_neg(), values)


def test_a_receive_that_is_given_up_gives_its_places_back(links: list[Link]) -> None:
    """In the midst of a message, too: whoever brought them uses them for something else then."""
    room, message = torch.zeros(16 * 2**20), torch.arange(1, 16 * 2**20 + 1, dtype=torch.float32)
    job = links[1].irecv(0, into=room)
    sent = links[0].isend(message, to=1)
    deadline = time.monotonic() + SOON_S
    while not room[0] and not job.done():
        assert time.monotonic() < deadline
    links[1].give_up(job)
    room.fill_(7)
    got = links[1].recv(0)
    sent.wait()
    assert torch.equal(got, message)
    assert room.eq(7).all()


# -- what nobody should say ------------------------------------------------------------------------

PLACE = torch.zeros(4)
TERMS: dict[str, tuple[Callable[[Link], object], str]] = {
    "a rank as text": (lambda link: link.send(1, to="1"), "'1': a rank is an int; .* links to: 1"),
    "no rank": (lambda link: link.recv(None), "None: a rank is an int"),
    "a rank as a float": (lambda link: link.recv(1.0), "1.0: a rank is an int"),
    "true": (lambda link: link.send(1, to=True), "True: a rank is an int"),
    "a tag as bytes": (lambda link: link.send(1, to=1, tag=b"x"), "a tag is a str, not bytes"),
    "a number as a tag": (lambda link: link.recv(1, tag=3), "a tag is a str, not int"),
    "no tag": (lambda link: link.isend(1, to=1, tag=None), "a tag is a str, not NoneType"),
    "too long a tag": (lambda link: link.recv(1, tag="t" * 201), "at most 200 letters"),
    "half a letter": (lambda link: link.send(1, to=1, tag="\ud800"), "no text that can be sent"),
    "no number of seconds": (lambda link: link.recv(1, timeout_s="5"), "timeout_s is a number"),
    "less than no time": (lambda link: link.recv(1, timeout_s=-1), "not -1. Every wait has an end"),
    "for ever": (lambda link: link.recv(1, timeout_s=float("inf")), "not inf"),
    "nobody knows how long": (lambda link: link.send(1, to=1, timeout_s=float("nan")), "not nan"),
    "a job for ever": (lambda link: link.irecv(1, "x").wait(float("inf")), "not inf"),
    "places on top of each other": (
        lambda link: link.recv(1, into={"x": torch.ones(1).expand(4)}),
        r"into=\['x'\]: this tensor cannot be filled",
    ),
    "one place for two": (
        lambda link: link.recv(1, into=[PLACE, {"x": PLACE}]),
        r"into=\[1\]\['x'\] and into=\[0\] share memory",
    ),
    "places that are none": (
        lambda link: link.irecv(1, into=[torch.ones(4, device="meta")]),
        r"into=\[0\]: a tensor on the meta device",
    ),
}


def test_a_slip_is_told_at_once_and_costs_nothing(links: list[Link]) -> None:
    for say, answer in TERMS.values():
        with pytest.raises(WireError, match=answer):
            say(links[0])
        links[1].send("well?", to=0)
        assert links[0].recv(1) == "well?"
        links[0].send("well", to=1)
        assert links[1].recv(0) == "well"


@pytest.mark.parametrize("posted_first", [True, False])
def test_places_are_found_by_their_names(links: list[Link], posted_first: bool) -> None:
    room = {"b": torch.zeros(2), "a": torch.zeros(2), "step": None}
    tree = {"a": torch.ones(2), "b": torch.full((2,), 2.0), "step": 3}
    if posted_first:
        job = links[1].irecv(0, into=room)
        links[0].send(tree, to=1)
    else:
        links[0].send(tree, to=1)
        job = links[1].irecv(0, into=room)
    got = job.wait()
    assert got["a"] is room["a"]
    assert room["a"].tolist() == [1, 1]
    assert room["b"].tolist() == [2, 2]
    assert got["step"] == 3
    assert list(got) == ["a", "b", "step"]


def test_a_job_can_be_waited_for_again(links: list[Link]) -> None:
    job = links[1].irecv(0)
    with pytest.raises(WireError, match="none came"):
        job.wait(timeout_s=0.05)
    links[0].send("late", to=1)
    assert job.wait() == "late"


def test_a_rank_that_ends_with_an_error_says_so(links: list[Link]) -> None:
    with pytest.raises(ZeroDivisionError), links[0]:
        print(1 / 0)
    with pytest.raises(PeerLost, match=r"rank 0 has left: it ended with ZeroDivisionError: div"):
        links[1].recv(0)


def send_for_ever(link: Link) -> None:
    while True:
        link.send(torch.zeros(100_000), to=0)


def test_whoever_only_sends_hears_the_reason_too(links: list[Link]) -> None:
    with pytest.raises(ZeroDivisionError), links[0]:
        print(1 / 0)
    with pytest.raises(PeerLost, match=r"rank 0 has left: it ended with ZeroDivisionError: div"):
        send_for_ever(links[1])


def test_a_wait_has_a_deadline_and_takes_nothing_with_it(links: list[Link]) -> None:
    with pytest.raises(WireError, match=r"waited 0.05 s .* tag 'x' from rank 0"):
        links[1].recv(0, tag="x", timeout_s=0.05)
    links[0].send("late", to=1, tag="x")
    assert links[1].recv(0, tag="x") == "late"


@pytest.mark.parametrize("peer", [-1, 0, 3])
def test_ranks_that_are_not_there(links: list[Link], peer: int) -> None:
    with pytest.raises(WireError, match="links to: 1, 2"):
        links[0].send(1, to=peer)
    with pytest.raises(WireError, match="links to: 1, 2"):
        links[0].recv(peer)


def test_what_cannot_be_sent_does_no_harm(links: list[Link]) -> None:
    with pytest.raises(WireError, match="cannot be sent"):
        links[0].send({"f": print}, to=1)
    links[0].send("fine", to=1)
    assert links[1].recv(0) == "fine"


def test_a_peer_that_leaves_is_named_and_what_it_sent_is_kept(links: list[Link]) -> None:
    links[0].send("last words", to=1)
    waiting = links[1].irecv(0, tag="never")
    links[0].close()
    with pytest.raises(PeerLost, match="rank 0"):
        waiting.wait()
    assert links[1].recv(0) == "last words"
    with pytest.raises(PeerLost, match="rank 0"):
        links[1].recv(0)
    links[2].send("we go on", to=1)
    assert links[1].recv(2) == "we go on"


def test_closing_ends_ones_own_waits(links: list[Link]) -> None:
    job = links[0].irecv(1)
    links[0].close()
    with pytest.raises(ShoalError, match="closed"):
        job.wait()
    with pytest.raises(ShoalError, match="closed"):
        links[0].recv(1)
