"""How a worker tells that it has no link, and which keys a boss may be asked with."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import torch

import shoal
from shoal.boss import applying, worker
from shoal.boss.applying import Employer
from shoal.boss.calls import LINK_S, Roster, Status, Unable, encode, read_call
from shoal.boss.hiring import _why_not
from shoal.boss.reception import Reception
from shoal.errors import MeetingError, WireError
from shoal.network import reserve_port
from shoal.pipeline.known import Allowed
from shoal.wire.keys import KeyPair, new_pair, write_pair
from shoal.wire.open_link import LinkSettings, read_keys
from shoal.wire.zmq_link import ZmqLink
from shoal.wire.zmq_sockets import Card

BOSS = Card("tcp://0.0.0.0:1024", "boss")
ROSTER = Roster(7, [BOSS, Card("tcp://10.0.0.2:1", "b")], ["the boss", "worker 1"])
STATUS = Status("laptop", 7, "ann", "train.py", 12, 2, [])


class FakeLink:
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.cards: list[Card] = []

    def connect(self, cards: list[Card], names: list[str]) -> None:
        self.cards = cards
        if self._where == "connect":
            raise WireError("rank 1 does not know the key of worker 2" + "." * 5000)

    def settle(self, timeout_s: float) -> None:
        if self._where == "settle":
            raise WireError("nothing listens there")


class FakeLine:
    def __init__(self) -> None:
        self.said: list[object] = []

    def say(self, content: bytes) -> None:
        self.said.append(read_call(content))


def test_a_worker_for_one_boss_that_has_no_link_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who started it shows the error."""

    def apply(*args: object) -> NoReturn:
        raise WireError("nothing listens there")

    told: list[str] = []
    monkeypatch.setattr(worker, "apply", apply)
    employer = Employer("tcp://192.168.0.1:1024", "192.168.0.1", LinkSettings())
    with pytest.raises(WireError, match="nothing listens there"):
        worker.serve(
            employer, allowed=Allowed(), device=torch.device("cpu"), once=True,
            notify=told.append, tell=told.append,
        )  # fmt: skip
    assert told == []


def test_a_boss_that_leaves_while_all_link_up_is_not_behind_a_firewall() -> None:
    """It was, for a worker whose own connection to it did not stand yet."""
    names = ["the boss", "worker 1"]
    with socket.create_server(("127.0.0.1", 0)) as silent, ZmqLink(1, 2) as link:
        boss = ZmqLink(0, 2)
        boss.connect([boss.card, link.card], names)
        nowhere = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        link.connect([msgspec.structs.replace(boss.card, endpoint=nowhere), link.card], names)
        boss.tend(lambda: boss._peers[1].guest.is_connected, LINK_S)
        boss.close_after(MeetingError("worker 2 has no key"))
        with pytest.raises(WireError) as caught:
            link.settle(LINK_S)
    told = str(caught.value)
    assert told.startswith(f"worker 1, listening at {link.card.endpoint}, has no link with ")
    assert told.endswith("the boss has left: it ended with MeetingError: worker 2 has no key")


@pytest.mark.parametrize("where", ["connect", "settle", ""])
def test_a_worker_without_a_link_tells_the_boss_why(where: str) -> None:
    """Who does not know a key is the cause; who then finds nobody there is not."""
    link, line = FakeLink(where), FakeLine()
    employer = Employer("tcp://192.168.0.1:1024", "192.168.0.1", LinkSettings())

    def link_up() -> None:
        applying._link_up(link, ROSTER, employer, line)  # type: ignore[arg-type]

    if not where:
        link_up()
        assert line.said == []
        assert link.cards[0].endpoint == "tcp://192.168.0.1:1024"  # as we reach it
        return
    with pytest.raises(WireError):
        link_up()
    (told,) = line.said
    assert isinstance(told, Unable)
    assert (told.round, told.is_consequence) == (7, where == "settle")


def test_the_boss_names_the_cause() -> None:
    names = ["the boss", "worker 1 (a)", "worker 2 (b)"]
    reception = Reception(2, "2.13", timeout_s=1, hung_s=1, status=lambda: STATUS)
    assert _why_not(reception, names, WireError("nobody told")).endswith("nobody told")
    reception.troubles[1] = Unable(1, "nothing listens there", True)
    assert _why_not(reception, names, WireError("x")).endswith(
        "worker 1 (a): nothing listens there"
    )
    reception.troubles[2] = Unable(1, "rank 2 does not know the key of worker 1 (a)", False)
    told = _why_not(reception, names, WireError("x"))
    assert told.endswith("worker 2 (b): rank 2 does not know the key of worker 1 (a)")
    assert "listens" not in told


def test_words_that_would_steer_a_terminal_are_no_reason() -> None:
    assert read_call(encode(Unable(1, "two\nlines", False))) == Unable(1, "two\nlines", False)
    for reason in ("\x1b[2J", "x" * 5000):
        with pytest.raises(WireError, match="no call"):
            read_call(encode(Unable(1, reason, False)))


# -- keys ------------------------------------------------------------------------------------------


@pytest.fixture
def others() -> list[KeyPair]:
    return [new_pair() for _ in range(2)]


@pytest.fixture
def settings(tmp_path: Path, others: list[KeyPair]) -> LinkSettings:
    """Those of a host that knows two others."""
    write_pair(tmp_path / "key", new_pair(), "me")
    authorized = tmp_path / "authorized_keys"
    authorized.write_text("".join(f"{p.public} host{n}\n" for n, p in enumerate(others)))
    authorized.chmod(0o600)
    return LinkSettings(key=str(tmp_path / "key"), authorized_keys=str(authorized))


def test_which_keys_a_boss_may_have(
    settings: LinkSettings, others: list[KeyPair], tmp_path: Path
) -> None:
    own = read_keys(settings).pair.public
    far = [pair.public for pair in others]

    def ways(host: str, with_settings: LinkSettings = settings, key: str = "") -> list[str]:
        return [each for _, each in applying._ways(Employer("", host, with_settings, key))]

    assert ways("127.0.0.1") == ["", own, *far]
    assert ways("198.51.100.7") == [*far, own]
    assert ways("198.51.100.7", key="host1") == [far[1]]
    assert ways("198.51.100.7", LinkSettings(insecure=True)) == [""]
    without = LinkSettings(key=str(tmp_path / "none"))
    assert ways("127.0.0.1", without) == [""]
    with pytest.raises(shoal.KeyFileError, match="shoal keygen"):
        ways("198.51.100.7", without)


@pytest.mark.parametrize("key", ["nobody", "?" * 39, "\N{BULLET}" * 40])
def test_a_key_that_is_none_is_named(settings: LinkSettings, key: str) -> None:
    """It came as an error of ZeroMQ's."""
    employer = Employer("", "198.51.100.7", settings, key)
    with pytest.raises(MeetingError, match=r"is no public key .* which has: host0, host1"):
        applying._pinned(employer, read_keys(settings))


@pytest.fixture
def other_boss(settings: LinkSettings) -> Iterator[int]:
    """Listens on a port, to all of the network, with this host's key."""
    port = reserve_port()
    reception = Reception(2, "2.13", timeout_s=1, hung_s=1, status=lambda: STATUS)
    is_over = threading.Event()
    link = ZmqLink(0, 3, "0.0.0.0", keys=read_keys(settings), port=port, on_call=reception.on_call)

    def tend() -> None:
        while not is_over.is_set():
            link.tend(is_over.is_set, 0.1)

    tender = threading.Thread(target=tend)
    tender.start()
    yield port
    is_over.set()
    tender.join()
    link.close(farewell_s=0)


def test_a_second_boss_with_keys_is_told_who_has_the_port(
    other_boss: int, settings: LinkSettings
) -> None:
    """It said "some other program", where several keys are authorized: it did not know which of
    them the other has, nor that it may be its own."""
    with pytest.raises(MeetingError, match=r"by another boss: train.py \(pid 7 of ann on laptop"):
        shoal.Boss(
            f"tcp://0.0.0.0:{other_boss}",
            1,
            key=settings.key,
            authorized_keys=settings.authorized_keys,
            notify=lambda text: None,
        )
    assert applying.ask(f"tcp://127.0.0.1:{other_boss}", settings) == STATUS
