"""How a worker comes to a boss: knock until it is hired; and how anybody asks how it is going."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import psutil
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from shoal import network
from shoal.boss.calls import (
    Answer,
    Application,
    Full,
    Hired,
    Question,
    Ready,
    Roster,
    Status,
    Wait,
    encode,
    read_answer,
)
from shoal.errors import MeetingError, WireError
from shoal.version import VERSION
from shoal.wire.open_link import LinkSettings, read_keys
from shoal.wire.zmq_gate import Keys
from shoal.wire.zmq_link import ZmqLink

CALL_S = 1.0
"""Between two calls."""
REFUSED = "it refused this host's key, or has another key than the one given for it"


@dataclass(frozen=True)
class Employer:
    """Where the boss is, and how it is known."""

    endpoint: str
    host: str
    settings: LinkSettings
    key: str = ""
    """The boss's public key: whoever has another one is not it."""


@dataclass(frozen=True)
class Contract:
    """A worker that was hired: its link, on which the boss is rank 0."""

    link: ZmqLink
    names: list[str]


def apply(employer: Employer, device: str, notify: Callable[[str], None]) -> Contract:
    """Wait for a boss, and for its other workers. Never gives up by itself."""
    application = Application(
        host=socket.gethostname(),
        pid=os.getpid(),
        device=device,
        memory_bytes=psutil.virtual_memory().available,
        shoal=VERSION,
        torch=str(torch.__version__),
    )
    keys = _keys(employer)
    address = network.resolve(employer.host)
    own = "127.0.0.1" if network.is_loopback(address) else network.address_towards(address)
    link: ZmqLink | None = None
    round_ = 0
    begun = time.monotonic()
    try:
        with _Line(employer, keys) as line:
            while True:
                line.say(encode(application))  # again and again: it says that we are here, too
                answer = line.hear(CALL_S)
                notify(_waiting(employer, answer, line.fault, time.monotonic() - begun))
                if isinstance(answer, Hired) and answer.round != round_:
                    if link is not None:  # some other worker did not answer: all begin again
                        link.close(farewell_s=0)
                    link, round_ = _listen(answer, own, keys, employer.settings), answer.round
                if isinstance(answer, Hired) and link is not None:
                    line.say(encode(Ready(answer.round, link.card)))
                if isinstance(answer, Roster) and link is not None and answer.round == round_:
                    break
        cards = [
            msgspec.structs.replace(answer.cards[0], endpoint=employer.endpoint),
            *answer.cards[1:],
        ]
        link.connect(cards, answer.names)
        link.settle()
        return Contract(link, answer.names)
    except BaseException:
        if link is not None:
            link.close(farewell_s=0)
        raise
    finally:
        notify("")


def ask(endpoint: str, settings: LinkSettings, key: str = "", limit_s: float = 5.0) -> Status:
    """How a boss is doing. Raises MeetingError if none answers."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    employer = Employer(endpoint, host, settings, key)
    deadline = time.monotonic() + limit_s
    with _Line(employer, _keys(employer)) as line:
        while time.monotonic() < deadline:
            line.say(encode(Question()))
            answer = line.hear(min(CALL_S, max(deadline - time.monotonic(), 0)))
            if isinstance(answer, Status):
                return answer
        fault = line.fault or "no boss answers there"
    raise MeetingError(f"{endpoint}: {fault}.")


def _keys(employer: Employer) -> Keys | None:
    if employer.settings.insecure or network.is_loopback(network.resolve(employer.host)):
        return None
    return read_keys(employer.settings)


def _listen(hired: Hired, address: str, keys: Keys | None, settings: LinkSettings) -> ZmqLink:
    return ZmqLink(
        hired.rank,
        hired.size,
        address,
        keys=keys,
        insecure=settings.insecure,
        timeout_s=hired.timeout_s,
        limit_bytes=settings.limit_bytes,
        hung_s=hired.hung_s,
    )


def _waiting(employer: Employer, answer: Answer | None, fault: str, waited_s: float) -> str:
    where = f"at {employer.endpoint}, {waited_s:.0f} s"
    match answer:
        case Wait(missing=missing) if missing:
            return f"waiting for {missing} more worker{'s' * (missing > 1)} of the boss {where}."
        case Full(reason=reason):
            return f"waiting for a boss {where}: {reason}."
    return f"waiting for a boss {where}" + (f": {fault}." if fault else ".")


class _Line:
    """A connection to the port of a boss, made again whenever it breaks."""

    def __init__(self, employer: Employer, keys: Keys | None) -> None:
        self._employer = employer
        self._keys = keys
        self.fault = ""
        """Why nobody can be reached, as far as it is known."""

    def __enter__(self) -> _Line:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = "[" in self._employer.endpoint
        self._socket.reconnect_ivl = 200
        self._socket.reconnect_ivl_max = 1000
        self._socket.immediate = 1  # a call that nobody hears is not kept for later
        self._socket.sndtimeo = 0
        if self._keys is not None:
            self._socket.curve_publickey = self._keys.pair.public.encode()
            self._socket.curve_secretkey = self._keys.pair.secret.encode()
            self._socket.curve_serverkey = self._pinned().encode()
        self._news = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )  # fmt: skip
        self._socket.connect(self._employer.endpoint)
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.disable_monitor()
        self._news.close(linger=0)
        self._socket.close(linger=200)
        self._context.term()

    def _pinned(self) -> str:
        """The one key that the boss must have."""
        assert self._keys is not None
        known = self._keys.authorized.all_names()
        if self._employer.key:
            named = [key for key, name in known.items() if name == self._employer.key]
            return named[0] if named else self._employer.key
        if len(known) == 1:
            return next(iter(known))
        raise MeetingError(
            f"{self._keys.authorized.path} has {len(known)} keys: which one is the boss's? Say "
            "--boss-key, with its public key or the name behind it."
        )

    def say(self, content: bytes) -> None:
        try:
            self._socket.send(content)
        except zmq.Again:
            return  # nobody is there; it is said again

    def hear(self, limit_s: float) -> Answer | None:
        """The next answer, if one comes within so many seconds."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._news, zmq.POLLIN)
        deadline = time.monotonic() + limit_s
        while (left := deadline - time.monotonic()) > 0:
            for ready, _ in poller.poll(int(1000 * left) + 1):
                if ready is self._news:
                    event = int(recv_monitor_message(self._news)["event"])
                    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        self.fault = ""
                        return None  # say it again: what was said before was not kept
                    self.fault = REFUSED
                else:
                    try:
                        answer = read_answer(self._socket.recv())
                    except WireError as error:
                        self.fault = str(error)
                        continue
                    self.fault = ""
                    return answer
        return None
