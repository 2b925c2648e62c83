"""Calling the roll: every rank a thread, over a real store of each kind."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

from shoal.errors import MeetingError
from shoal.network import reserve_port
from shoal.rendezvous import roll
from shoal.rendezvous.roll import (
    Fingerprint,
    Hello,
    call_roll,
    differences,
    make_hello,
    unreachable,
)
from shoal.rendezvous.store import open_store
from shoal.rendezvous.ways import Way

LONG_S = 20.0
"""Never reached by a crew that meets, or finds its fault at once."""
BRIEF_S = 1.7
"""Long enough for ranks to say whom they wait for."""
LINGER_S = 1.0
"""Of a leader, in these tests: where ranks are threads, the others have read of a fault by then."""

MakeWay = Callable[..., Way]


def quiet(text: str) -> None:
    pass


def hello(way: Way, pid: int | None = None, **brought: object) -> Hello:
    """As if every thread were a process: with a pid of its own."""
    mine = Fingerprint(
        shoal=str(brought.get("shoal", "1.0")),
        torch=str(brought.get("torch", "2.13")),
        settings=dict(brought.get("settings", {})),  # type: ignore[call-overload]
    )
    made = make_hello(way, "127.0.0.1", "cpu", mine)
    return msgspec.structs.replace(made, pid=1000 + way.rank if pid is None else pid)


# -- two hellos ------------------------------------------------------------------------------------


def one(**changes: object) -> Hello:
    way = Way(kind="tcp", rank=0, size=2, host="127.0.0.1", port=1)
    mine = hello(way, settings={"lr": "0.1"})
    return msgspec.structs.replace(mine, **{"host": "laptop", **changes})


def test_equal_hellos_have_no_differences() -> None:
    # Where a rank runs, and on what, is its own business.
    other = one(rank=1, host="desktop", pid=7, machine="other", address="10.0.0.2", device="cuda:0")
    assert differences(one(), other) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"size": 3}, "has --world-size 2, rank 1 (desktop, pid 7) has 3. Every rank needs the"),
        ({"shoal": "2.0"}, "runs shoal 1.0, rank 1 (desktop, pid 7) runs 2.0. Install the same"),
        ({"torch": "2.10"}, "runs torch 2.13, rank 1 (desktop, pid 7) runs 2.10. Install the same"),
        ({"settings": {"lr": "0.2"}}, "has --lr 0.1, rank 1 (desktop, pid 7) has --lr 0.2."),
        ({"settings": {}}, "has --lr 0.1, rank 1 (desktop, pid 7) has --lr unset."),
        (
            {"settings": {"lr": "0.1", "batch_size": "8"}},
            "has --batch-size unset, rank 1 (desktop, pid 7) has --batch-size 8.",
        ),
    ],
)
def test_a_difference_names_both_ranks_and_both_values(
    change: dict[str, object], expected: str
) -> None:
    (found,) = differences(one(), one(rank=1, host="desktop", pid=7, **change))
    assert found.startswith(f"rank 0 (laptop, pid 1000) {expected}")


def test_all_differences_come_together() -> None:
    theirs = one(rank=1, size=3, shoal="2", torch="3", settings={"lr": "1", "seed": "2"})
    found = differences(one(), theirs)
    assert len(found) == 5
    mirrored = differences(theirs, one())
    assert len(mirrored) == len(found), "whoever looks first finds the same"


def test_loopback_is_enough_on_one_machine_only() -> None:
    here, there = one(address="127.0.0.1"), one(rank=1, host="desktop", address="127.0.1.1")
    assert unreachable([here, there]) is None
    far = msgspec.structs.replace(there, machine="other")
    text = unreachable([far, here])
    assert text is not None
    assert text.startswith("The crew spans several machines, but rank 0 (laptop")
    assert "/etc/hosts" in text
    home = msgspec.structs.replace(here, address="10.0.0.1")
    assert "rank 1 (desktop, pid 1000) would use 127.0.1.1" in str(unreachable([home, far]))
    assert unreachable([home, msgspec.structs.replace(far, address="10.0.0.2")]) is None


# -- a crew of threads -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def brief_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll, "LINGER_S", LINGER_S)


@pytest.fixture(params=["tcp", "file"])
def make_way(request: pytest.FixtureRequest, tmp_path: Path) -> MakeWay:
    port = reserve_port()

    def make(rank: int, size: int) -> Way:
        if request.param == "file":
            return Way(kind="file", rank=rank, size=size, path=str(tmp_path / "meeting"))
        return Way(kind="tcp", rank=rank, size=size, host="127.0.0.1", port=port)

    return make


@pytest.fixture
def start() -> Iterator[Callable[..., Future[list[Hello]]]]:
    """Start a rank: it opens the store and calls the roll."""
    with ThreadPoolExecutor(8) as pool:
        stores = []

        def rank(
            way: Way, mine: Hello, timeout_s: float, notify: Callable[[str], None]
        ) -> list[Hello]:
            store = open_store(way, None, timeout_s, quiet)
            stores.append(store)  # a leader's store outlives its roll, as its process does
            return call_roll(store, way, mine, timeout_s, notify)

        def begin(
            way: Way,
            mine: Hello,
            timeout_s: float = LONG_S,
            notify: Callable[[str], None] = quiet,
        ) -> Future[list[Hello]]:
            return pool.submit(rank, way, mine, timeout_s, notify)

        yield begin


Start = Callable[..., Future[list[Hello]]]


def told(*ranks: Future[list[Hello]]) -> list[str]:
    """What each was told; none may have met."""
    messages = []
    for rank in ranks:
        with pytest.raises(MeetingError) as caught:
            rank.result(LONG_S)
        messages.append(str(caught.value))
    return messages


def test_everyone_gets_the_same_roster(make_way: MakeWay, start: Start) -> None:
    ways = [make_way(rank, 4) for rank in range(4)]
    ranks = [start(way, hello(way)) for way in ways]
    rosters = [rank.result(LONG_S) for rank in ranks]
    assert all(roster == rosters[0] for roster in rosters)
    assert [h.rank for h in rosters[0]] == [0, 1, 2, 3]
    assert [h.pid for h in rosters[0]] == [1000, 1001, 1002, 1003]
    assert {h.host for h in rosters[0]} == {socket.gethostname()}


def test_two_processes_with_one_rank(make_way: MakeWay, start: Start) -> None:
    """Rank 2 of 3 does not come, so that nobody can be past the meeting."""
    ways = [make_way(0, 3), make_way(1, 3), make_way(1, 3)]
    ranks = [start(way, hello(way, pid=i)) for i, way in enumerate(ways)]
    messages = told(*ranks)
    assert len(set(messages)) == 1, "the same sentence on every rank"
    assert "Two processes want to be rank 1" in messages[0]
    assert "pid 1)" in messages[0]
    assert "pid 2)" in messages[0]
    assert "own --rank, from 0 to 2" in messages[0]


def test_two_leaders(make_way: MakeWay, start: Start) -> None:
    """The second used to see only a port in use, and the first waited on."""
    ways = [make_way(0, 3), make_way(1, 3), make_way(0, 3)]
    ranks = [start(way, hello(way, pid=i)) for i, way in enumerate(ways)]
    messages = told(*ranks)
    assert len(set(messages)) == 1
    assert "Two processes want to be rank 0" in messages[0]


def test_one_too_many_after_the_crew_has_met(make_way: MakeWay, start: Start) -> None:
    ways = [make_way(rank, 2) for rank in range(2)]
    for rank in [start(way, hello(way)) for way in ways]:
        rank.result(LONG_S)
    (message,) = told(start(ways[1], hello(ways[1], pid=7)))
    expected = "left over" if ways[1].kind == "file" else "whose crew has already met"
    assert expected in message


@pytest.mark.parametrize(
    ("brought", "expected"),
    [
        ({"shoal": "2.0"}, "runs shoal"),
        ({"torch": "2.10"}, "runs torch"),
        ({"settings": {"lr": "0.2"}}, "has --lr"),
    ],
)
def test_a_rank_that_differs(
    make_way: MakeWay, start: Start, brought: dict[str, object], expected: str
) -> None:
    ways = [make_way(rank, 3) for rank in range(3)]
    last = {"settings": {"lr": "0.1"}, **brought}
    ranks = [start(way, hello(way, settings={"lr": "0.1"})) for way in ways[:2]]
    ranks.append(start(ways[2], hello(ways[2], **last)))
    messages = told(*ranks)
    assert all(expected in message for message in messages)
    assert all("rank 2" in message for message in messages)
    assert len(set(messages)) == 1, "whoever finds it first, the same sentence on every rank"


def test_different_world_sizes(make_way: MakeWay, start: Start) -> None:
    ways = [make_way(0, 3), make_way(1, 4)]
    messages = told(*[start(way, hello(way)) for way in ways])
    assert messages[0] == messages[1]
    assert "--world-size" in messages[0]
    assert hello(ways[0]).who in messages[0]
    assert hello(ways[1]).who in messages[0]


def test_a_hello_of_another_version(make_way: MakeWay, start: Start) -> None:
    """A later shoal may say more of itself, and must still be told by name."""
    ways = [make_way(0, 3), make_way(1, 3)]
    leader = start(ways[0], hello(ways[0]))
    wait_until_there(ways[0])
    store = open_store(ways[1], None, LONG_S, quiet)
    store.set("shoal/0/told/2", "1")
    later = msgspec.json.decode(msgspec.json.encode(hello(ways[1], shoal="9.0")))
    later["colour"] = "red"
    store.set("shoal/0/told/1", "1")  # the leader waits for its listeners
    store.set("shoal/0/hello/1", msgspec.json.encode(later).decode())
    (message,) = told(leader)
    assert "runs shoal 1.0" in message
    assert "runs 9.0" in message


def test_a_hello_that_is_none(make_way: MakeWay, start: Start) -> None:
    ways = [make_way(0, 3), make_way(1, 3)]
    leader = start(ways[0], hello(ways[0]))
    wait_until_there(ways[0])
    store = open_store(ways[1], None, LONG_S, quiet)
    store.set("shoal/0/told/1", "1")
    store.set("shoal/0/told/2", "1")
    store.set("shoal/0/hello/1", "good day")
    (message,) = told(leader)
    assert "Rank 1" in message
    assert "another version" in message
    assert "good day" in message


def wait_until_there(leader: Way) -> None:
    """Until `leader` has opened its store."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if leader.kind == "file":
            if Path(leader.path).exists():
                return
        else:
            with socket.socket() as probe:
                if probe.connect_ex((leader.host, leader.port)) == 0:
                    return
        time.sleep(0.01)
    raise AssertionError(f"no store at {leader.place}")


def test_the_missing_are_named_to_everyone(make_way: MakeWay, start: Start) -> None:
    lines: list[str] = []
    others_lines: list[str] = []
    ways = [make_way(0, 5), make_way(2, 5)]
    leader = start(ways[0], hello(ways[0]), BRIEF_S, lines.append)
    other = start(ways[1], hello(ways[1]), BRIEF_S, others_lines.append)
    messages = told(leader, other)
    assert messages[0] == messages[1]
    assert f"After {BRIEF_S:g} s" in messages[0]
    assert "still waits for ranks 1, 3, 4 of 5." in messages[0]
    assert f"Here: {hello(ways[0]).who}, {hello(ways[1]).who}." in messages[0]
    assert "Check that" in messages[0]
    for each in (lines, others_lines):
        assert any(line.startswith("waiting for ranks 1, 3, 4 of 5, ") for line in each)
        assert each[-1] == "", "the line is taken away"


def test_a_meeting_that_failed_does_not_spoil_the_next(tmp_path: Path, start: Start) -> None:
    """Without a leader to remove it, a file kept the fault, and told it to the next crew."""
    path = str(tmp_path / "meeting")
    ways = [Way(kind="file", rank=rank, size=3, path=path) for rank in range(3)]
    messages = told(*[start(way, hello(way), BRIEF_S) for way in ways[1:]])
    assert messages[0] == messages[1]
    assert "still waits for rank 0 of 3." in messages[0]
    for rank in [start(way, hello(way)) for way in ways]:
        assert len(rank.result(LONG_S)) == 3


def test_a_leader_that_leaves(start: Start) -> None:
    """The store goes with its process; what is left is a connection that was cut."""
    port = reserve_port()
    way = Way(kind="tcp", rank=1, size=2, host="127.0.0.1", port=port)
    leader_way = Way(kind="tcp", rank=0, size=2, host="127.0.0.1", port=port)
    leader = open_store(leader_way, None, LONG_S, quiet)
    waiting = threading.Event()
    other = start(way, hello(way), LONG_S, lambda text: waiting.set())
    assert waiting.wait(10)
    del leader
    (message,) = told(other)
    assert f"The leader at tcp://127.0.0.1:{port} left" in message


def test_a_rank_that_withdrew_may_come_again(make_way: MakeWay, start: Start) -> None:
    """Ctrl-C on a waiting rank, and the same command once more: a second rank 1, it used to say."""
    ways = [make_way(rank, 3) for rank in range(3)]
    leader = start(ways[0], hello(ways[0]))
    wait_until_there(ways[0])
    seen = threading.Event()

    def press_ctrl_c(text: str) -> None:
        if text and not seen.is_set():
            seen.set()
            raise KeyboardInterrupt

    first = start(ways[1], hello(ways[1], pid=1), LONG_S, press_ctrl_c)
    wait([first], LONG_S)
    assert isinstance(first.exception(), KeyboardInterrupt)
    again = start(ways[1], hello(ways[1], pid=2))
    last = start(ways[2], hello(ways[2]))
    rosters = [rank.result(LONG_S) for rank in (leader, again, last)]
    assert all([h.pid for h in roster] == [1000, 2, 1002] for roster in rosters)


def test_one_loopback_among_several_machines(make_way: MakeWay, start: Start) -> None:
    """The leader used to leave with the answer; the others then waited for a file that was gone."""
    ways = [make_way(rank, 3) for rank in range(3)]
    hellos = [hello(way) for way in ways]
    hellos[1] = msgspec.structs.replace(hellos[1], machine="other", address="10.0.0.2")
    messages = told(*[start(way, mine) for way, mine in zip(ways, hellos, strict=True)])
    assert len(set(messages)) == 1
    assert f"{hellos[0].who} would use 127.0.0.1" in messages[0]


def test_a_shared_file_that_goes_away(tmp_path: Path, start: Start) -> None:
    way = Way(kind="file", rank=1, size=2, path=str(tmp_path / "meeting"))
    waiting = threading.Event()
    rank = start(way, hello(way), LONG_S, lambda text: waiting.set())
    assert waiting.wait(10)
    Path(way.path).unlink()
    (message,) = told(rank)
    assert f"The leader at {way.place} left" in message


def test_attempts_in_one_store_do_not_mix(start: Start) -> None:
    """torchrun's store outlives a crew; the next attempt must not find the hellos of the last."""
    store = dist.TCPStore(
        "127.0.0.1", 0, None, True, timeout=timedelta(seconds=10), wait_for_workers=False
    )
    for attempt in ("0", "1"):
        ways = [
            Way(
                kind="tcp", rank=rank, size=2, host="127.0.0.1", port=store.port,
                store_is_hosted=True, attempt=attempt,
            )
            for rank in range(2)
        ]  # fmt: skip
        ranks = [start(way, hello(way, pid=int(attempt))) for way in ways]
        rosters = [rank.result(LONG_S) for rank in ranks]
        assert all(h.pid == int(attempt) for h in rosters[0])


def test_ranks_of_one_machine_know_it() -> None:
    ways = [Way(kind="tcp", rank=rank, size=2, host="127.0.0.1", port=1) for rank in range(2)]
    assert hello(ways[0]).machine == hello(ways[1]).machine
