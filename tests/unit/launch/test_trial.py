"""One connection of the doctor's, over loopback."""

from __future__ import annotations

import socket

import pytest

from shoal.launch import trial
from shoal.launch.messages import Listen, Measure

HERE = "127.0.0.1"
TOKEN = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test of the way takes no second."""
    monkeypatch.setattr(trial, "SKIP_S", 0.01)
    monkeypatch.setattr(trial, "COUNT_S", 0.05)


def visit(port: int, token: str = TOKEN, fixed_port: int | None = None) -> trial.Measured:
    return trial.measure(Measure(address=HERE, port=port, token=token, fixed_port=fixed_port))


def test_a_way_is_measured() -> None:
    listening = trial.listen(Listen(address=HERE, token=TOKEN))
    found = visit(listening.port)
    assert (found.error, found.large_bytes) == ("", trial.LARGE_BYTES)
    assert found.latency_s is not None
    assert 0 < found.latency_s < 1
    assert found.bytes_per_s is not None
    assert found.bytes_per_s > 1e6
    assert found.fixed_error is None


def test_strangers_are_turned_away() -> None:
    """And whoever is expected may still come."""
    port = trial.listen(Listen(address=HERE, token=TOKEN)).port
    found = visit(port, token="f" * 32)
    assert (found.error, found.latency_s) == ("broken", None)
    with socket.create_connection((HERE, port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n".ljust(len(TOKEN)))
        assert stranger.recv(100) == b""
    assert visit(port).error == ""


def test_nobody_listens() -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
    found = visit(port)
    assert (found.error, found.latency_s) == ("refused", None)


def test_an_address_of_someone_else() -> None:
    found = trial.listen(Listen(address="192.0.2.77", token=TOKEN))
    assert found.port == 0
    assert "annot assign requested address" in found.fault


def test_a_fixed_port() -> None:
    """Free, or in use by whoever it is meant for: both can be reached."""
    with socket.create_server((HERE, 0)) as server:
        fixed = server.getsockname()[1]
        listening = trial.listen(Listen(address=HERE, token=TOKEN, fixed_port=fixed))
        found = visit(listening.port, fixed_port=fixed)
        assert (found.error, found.fixed_error) == ("", "")
    listening = trial.listen(Listen(address=HERE, token=TOKEN, fixed_port=fixed))
    found = visit(listening.port, fixed_port=fixed)
    assert (found.error, found.fixed_error) == ("", "")
