"""Calls at a port: they come through also where somebody else was there before."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq
from processes import until
from zmq.utils.monitor import recv_monitor_message

from shoal.network import reserve_port
from shoal.wire import zmq_call
from shoal.wire.keys import AuthorizedKeys, new_pair
from shoal.wire.zmq_call import ZmqCall
from shoal.wire.zmq_gate import Keys
from shoal.wire.zmq_link import ZmqLink

LIMIT_S = 20.0
STRANGE = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NOPE".ljust(20, b"\0") + bytes(32)
"""A greeting as ZeroMQ has it, with a mechanism that there is not."""


def listening(port: int, keys: Keys | None = None) -> ZmqLink:
    """Answers whoever calls."""

    def answer(caller: bytes, content: bytes, key: str) -> bytes:
        return content + b", too"

    return ZmqLink(0, 2, port=port, keys=keys, on_call=answer)


def is_answered(line: ZmqCall, link: ZmqLink) -> bool:
    heard: list[bytes] = []

    def call() -> bool:
        line.say(b"hello")
        answer = line.hear(0.05)
        heard.extend([] if answer is None else [answer])
        return bool(heard)

    assert link.tend(call, LIMIT_S)
    return heard == [b"hello, too"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_call, "RENEW_S", 0.5)


def test_some_other_program_had_the_port_before() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def reply() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(STRANGE)
                while connection.recv(1024):
                    continue

        thread = threading.Thread(target=reply, daemon=True)
        thread.start()
        line = ZmqCall(f"tcp://127.0.0.1:{port}", None, "")
        line.__enter__()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    try:
        with listening(port) as link:
            assert is_answered(line, link)
    finally:
        line.__exit__(None, None, None)


def test_whoever_leaves_in_the_midst_of_a_greeting_has_refused_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A boss that ended was said to have keys, for as long as no other came."""
    news: list[int] = []

    def noted(monitor: zmq.Socket[bytes]) -> Any:
        message = recv_monitor_message(monitor)
        news.append(int(message["event"]))
        return message

    monkeypatch.setattr(zmq_call, "recv_monitor_message", noted)
    other = socket.create_server(("127.0.0.1", 0))
    with ZmqCall(f"tcp://127.0.0.1:{other.getsockname()[1]}", None, "") as line:
        connection, _ = other.accept()
        other.close()
        connection.close()
        until(lambda: line.hear(0.05) or zmq.EVENT_CLOSED in news, "nobody is there any more")
        assert news[0] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        assert line.fault == ""


@pytest.mark.parametrize("has_key", [True, False])
def test_another_key_or_none(tmp_path: Path, has_key: bool) -> None:
    here, there = new_pair(), new_pair()
    known = tmp_path / "known"
    known.write_text(f"{here.public} here\n")
    keys = Keys(here, AuthorizedKeys(known)) if has_key else None
    port = reserve_port()
    with (
        listening(port, Keys(there, AuthorizedKeys(known))),
        ZmqCall(f"tcp://127.0.0.1:{port}", keys, here.public) as line,
    ):
        until(lambda: line.hear(0.05) or line.fault, "it is known why")
        assert line.fault == (zmq_call.REFUSED if has_key else zmq_call.NO_KEY)


def test_the_key_is_authorized_after_the_first_refusal(tmp_path: Path) -> None:
    here, there = new_pair(), new_pair()
    known = tmp_path / "known"
    known.write_text("")
    keys = Keys(there, AuthorizedKeys(known))
    port = reserve_port()
    own = Keys(here, AuthorizedKeys(tmp_path / "none"))
    with (
        listening(port, keys) as link,
        ZmqCall(f"tcp://127.0.0.1:{port}", own, there.public) as line,
    ):

        def is_refused() -> bool:
            line.hear(0.05)
            return bool(line.fault)

        assert link.tend(is_refused, LIMIT_S)
        assert line.fault == zmq_call.REFUSED
        known.write_text(f"{here.public} here\n")
        assert is_answered(line, link)
