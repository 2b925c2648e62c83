"""What the boss makes of workers' troubles."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from shoal.boss import desk as desk_module
from shoal.boss.answers import Trouble
from shoal.boss.desk import Desk
from shoal.boss.hiring import Staff
from shoal.errors import PeerLost
from shoal.wire.zmq_link import ZmqLink

NAMES = ["the boss (a)", "worker 1 (b)", "worker 2 (c)", "worker 3 (d)"]


@pytest.fixture
def links() -> Iterator[list[ZmqLink]]:
    with ExitStack() as stack:
        made = [stack.enter_context(ZmqLink(rank, 4, timeout_s=5.0)) for rank in range(4)]
        for link in made:
            link.connect([each.card for each in made], NAMES)
        for link in made:
            link.settle()
        yield made


def lost(link: ZmqLink, whom: int) -> None:
    """This worker tells the boss, as it does when a connection to another breaks."""
    text = f"{NAMES[link.rank]} lost {NAMES[whom]}: its connection broke"
    trouble = Trouble("PeerSilent", text, "", is_consequence=True)
    link.send(msgspec.to_builtins(trouble), 0, "trouble")


def test_two_workers_that_lost_each_other_are_both_named(
    links: list[ZmqLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had to recover, which they cannot without each other: one was said to have left."""
    monkeypatch.setattr(desk_module, "FIND_S", 0.3)
    desk = Desk(Staff(links[0], NAMES, []))
    lost(links[1], 2)
    lost(links[2], 1)
    begun = time.monotonic()
    with pytest.raises(PeerLost, match=r"worker 1 \(b\) lost worker 2 \(c\).*between these two"):
        desk.recv(3, "output", lambda tree: tree)
    assert time.monotonic() < begun + 3.0
    desk.close()


def test_who_is_gone_for_the_boss_too_is_named_and_not_who_misses_it(links: list[ZmqLink]) -> None:
    desk = Desk(Staff(links[0], NAMES, []))
    lost(links[1], 2)
    lost(links[3], 2)
    links[2].close()
    with pytest.raises(PeerLost, match=r"^worker 2 \(c\) has left"):
        desk.recv(3, "output", lambda tree: tree)
    desk.close()
