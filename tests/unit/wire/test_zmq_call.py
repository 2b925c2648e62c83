"""Calls at a port: they come through also where somebody else was there before."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

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
