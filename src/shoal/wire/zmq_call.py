"""A call at the port of a zmq link that takes calls: short messages there and back.

The connection is made again whenever it breaks; what is said while there is none is not kept.
ZeroMQ gives up for good where it was refused, or met a stranger: after a while without a word we
begin again.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from shoal.wire.zmq_gate import Keys

RENEW_S = 5.0
"""Of silence, before a new socket calls."""
REFUSED = "it refused this host's key, or has another key than the one given for it"
NO_KEY = (
    "it has keys, and this call came without: give the address that other hosts know it by, not "
    "a loopback one, and leave --insecure out"
)


class ZmqCall:
    """To be used as a context manager."""

    def __init__(self, endpoint: str, keys: Keys | None, server_key: str) -> None:
        """server_key: whoever has another one is not called."""
        self._endpoint = endpoint
        self._keys = keys
        self._server_key = server_key
        self.fault = ""
        """Why nobody can be reached, as far as it is known."""
        self._num_broken_off = 0
        """Handshakes, one after the other, that ended without a word."""

    def __enter__(self) -> Self:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._open()
        self._heard_at = self._opened_at
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(linger_ms=200)
        self._context.term()

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = "[" in self._endpoint
        self._socket.reconnect_ivl = 200
        self._socket.reconnect_ivl_max = 1000
        self._socket.immediate = 1  # what nobody hears is not kept for later
        self._socket.sndtimeo = 0
        if self._keys is not None:
            self._socket.curve_publickey = self._keys.pair.public.encode()
            self._socket.curve_secretkey = self._keys.pair.secret.encode()
            self._socket.curve_serverkey = self._server_key.encode()
        self._news = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_CLOSED
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._news, zmq.POLLIN)
        self._socket.connect(self._endpoint)
        self._opened_at = time.monotonic()

    def _close(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._news.close(linger=0)
        self._socket.close(linger=linger_ms)

    @property
    def silent_s(self) -> float:
        """Since when nothing was heard."""
        return time.monotonic() - self._heard_at

    def say(self, content: bytes) -> None:
        try:
            self._socket.send(content)
        except zmq.Again:
            return  # nobody is there

    def hear(self, limit_s: float) -> bytes | None:
        """What is answered within so many seconds.

        None sooner than that: a connection was made just now, and nothing said before was heard.
        """
        deadline = time.monotonic() + limit_s
        if time.monotonic() > self._opened_at + RENEW_S and self.silent_s > RENEW_S:
            self._close(linger_ms=0)
            self._open()
        while (left := deadline - time.monotonic()) > 0:
            ready = [each for each, _ in self._poller.poll(int(1000 * left) + 1)]
            if self._socket in ready:
                self.fault = ""
                self._heard_at = time.monotonic()
                return self._socket.recv()
            if self._news in ready:
                event = int(recv_monitor_message(self._news)["event"])
                self._take_news(event)
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return None
        return None

    def _take_news(self, event: int) -> None:
        if event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_CLOSED):
            # We are in; or nobody listens there, whoever did before.
            self.fault = ""
            self._num_broken_off = 0
            return
        # Another key ends a handshake without a word, each time. So does whoever leaves, but once.
        self._num_broken_off += event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or self._num_broken_off > 1:
            self.fault = NO_KEY if self._keys is None else REFUSED
