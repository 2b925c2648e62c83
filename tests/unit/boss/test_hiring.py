"""What a boss says while it waits for its workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shoal
from shoal.boss.calls import Application, Status, encode
from shoal.boss.hiring import MAX_NAMED, _waiting
from shoal.boss.reception import Reception
from shoal.version import VERSION
from shoal.wire.keys import new_pair, write_pair
from shoal.wire.zmq_sockets import Card

STATUS = Status("laptop", 7, "ann", "train.py", 0, 32, [])


def test_of_many_that_have_come_it_says_how_many() -> None:
    link: Any = SimpleNamespace(card=Card("tcp://127.0.0.1:1024", "boss"))
    reception = Reception(32, "2.13", timeout_s=1.0, hung_s=1.0, status=lambda: STATUS)
    for number in range(MAX_NAMED + 1):
        said = _waiting(link, reception, 1.0)
        assert said.count("pid") == number
        who = f"host{number}"
        applies = Application(who, number, "cpu", 2**30, VERSION, "2.13", who)
        reception.on_call(who.encode(), encode(applies), "")
    said = "waiting for 27 of 32 workers at tcp://127.0.0.1:1024, 1 s; 5 are here."
    assert _waiting(link, reception, 1.0) == said


def test_where_no_worker_is_authorized_it_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It waited, and nothing said that nobody could come."""
    write_pair(tmp_path / "key", new_pair(), "ann@laptop")
    authorized = tmp_path / "authorized_keys"
    keys = {"key": str(tmp_path / "key"), "authorized_keys": str(authorized)}
    with pytest.raises(shoal.MeetingError, match="long enough"):
        shoal.Boss("tcp://0.0.0.0:0", 1, wait_s=0.1, notify=lambda text: None, **keys)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{authorized} has no key: append the public line of every worker")
