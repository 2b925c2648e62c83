"""The gate of a zmq link: who may connect, who is connected, and whose connection broke.

A thread of its own answers ZeroMQ's questions (ZAP: "this address comes with this key, let it
in?") and reads its news (socket monitors), also while the rest of the process computes. It sleeps
unless connections come or go, or someone is here who has not said who it is.

    no keys   loopback only (or any address where the user said so); ranks know each other by token
    keys      CURVE: the key must be authorized on this host, and be the key of a rank of this crew
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from shoal.errors import KeyFileError
from shoal.network import is_loopback
from shoal.wire.connections import address_of, end_if_beyond
from shoal.wire.keys import AuthorizedKeys, KeyPair

HANDSHAKE_S = 5.0
DOMAIN = b"shoal"
ZAP = "inproc://zeromq.zap.01"
STOP = "inproc://gate.stop"
END, LOOK = b"end", b"look"
NO_RANK = "it said nothing that a rank says, or left before it had said who it is"
NO_KEY = "it comes without a key, or left before it had said who it is"
"""Where keys are wanted. Without one, ZeroMQ leaves when it sees that: whether what it says is read
before is a matter of chance."""
AGAIN_S = 2.0
"""Whoever was refused and wants in has come again by then."""
WATCH_S = 0.05
MAX_NAMELESS_BYTES = 64 * 2**20
"""By a connection that is not known to be a rank's. A rank may send before it is read, but no more
than the short queues hold; ZeroMQ itself sets no limit to the parts of a message."""
TALKS_TOO_MUCH = f"it sent more than {MAX_NAMELESS_BYTES >> 20} MiB and has not said who it is"
MAX_TOLD = 1000
"""Different refusals that are logged, each once: whoever knocks for ever fills no disk."""

log = logging.getLogger("shoal.wire")


@dataclass(frozen=True)
class Keys:
    """This rank's key, and whom it trusts."""

    pair: KeyPair
    authorized: AuthorizedKeys

    def name_of(self, public: str) -> str | None:
        """Ranks with this very key are ours too."""
        return "own key" if public == self.pair.public else self.authorized.name_of(public)


@dataclass(eq=False)
class Guest:
    """One peer, as its connections show it."""

    public_key: str
    is_connected: bool = False
    """Our connection to it stands."""
    refusal: str = ""
    broken_at: float = 0.0
    """When our connection to it broke; 0 while it has not."""
    has_ended: bool = False
    """The connection that its messages come by has been read to its end: all of them are here."""

    def is_author_of(self, frame: zmq.Frame) -> bool:
        return not self.public_key or frame.get("User-Id") == self.public_key


class Gate:
    """Made with the listening socket, before it listens."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        rank: int,
        keys: Keys | None,
        *,
        any_address: bool,
        takes_calls: bool = False,
    ) -> None:
        """takes_calls: whoever has an authorized key may come in, not only ranks of this crew."""
        self._rank = rank
        self._keys = keys
        self._no_rank = NO_KEY if keys else NO_RANK
        self._any_address = any_address
        self._takes_calls = takes_calls
        self._router = router
        self._zap = context.socket(zmq.REP)
        self._zap.bind(ZAP)
        router.zap_domain = DOMAIN  # and ask even where there is no key
        router.handshake_ivl = int(1000 * HANDSHAKE_S)
        if keys:
            router.curve_server = True
            router.curve_secretkey = keys.pair.secret.encode()
        self._news = router.get_monitor_socket()
        self._guests: dict[zmq.Socket[bytes], Guest] = {}
        self._dealers: list[zmq.Socket[bytes]] = []
        self._callers: dict[int, str] = {}
        """Connections to the listening socket, by file descriptor, with their addresses."""
        self._known: dict[int, Guest | None] = {}
        """Those of them that have said who they are."""
        self._bringing: set[int] = set()
        """Those of them that messages come by."""
        self._faults: list[tuple[str, str]] = []
        """Why those that are about to be closed were refused, with their hosts where known."""
        self._told: set[tuple[str, str]] = set()
        """Hosts and faults; addresses whose fault has been told, whichever it was."""
        self._nameless: dict[str, float] = {}
        """Faults of callers whose address is not known, and when they are told of."""
        self.has_broken = False
        """Whether any guest's connection did."""
        self._stop = context.socket(zmq.PAIR)
        self._stop.bind(STOP)
        self._stopped = context.socket(zmq.PAIR)
        self._stopped.connect(STOP)
        self._thread = threading.Thread(target=self._watch, name="shoal-gate", daemon=True)

    def expect(self, dealer: zmq.Socket[bytes], guest: Guest) -> None:
        """A peer that `dealer` is about to connect to."""
        monitor = dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
        )
        self._guests[monitor] = guest
        self._dealers.append(dealer)
        if self._thread.is_alive():
            self._stop.send(LOOK)

    def open(self) -> None:
        """From now on callers are answered. Again: nothing."""
        if not self._thread.is_alive():
            self._thread.start()

    def greet(self, frame: zmq.Frame, guest: Guest | None, brings_all: bool = False) -> None:
        """The connection that `frame` came by is that of a peer, or of a caller.

        brings_all: the peer's messages come by it, not its signs of life.
        """
        descriptor = int(frame.get(zmq.SRCFD))
        self._known[descriptor] = guest
        if brings_all:
            self._bringing.add(descriptor)

    def turn_away(self, sender: bytes, frame: zmq.Frame, fault: str) -> None:
        """A stranger said what means nothing: one line for it, whatever else it says.

        sender: what it calls itself. What it said may be read when its connection is no more.
        """
        descriptor = int(frame.get(zmq.SRCFD))
        self._known.setdefault(descriptor, None)  # no line more when it goes
        address = address_of(descriptor) or "an address that is not known"
        # One line each, not one for each message; nor for each connection of the same host.
        keys = {(address, ""), (address.rpartition(":")[0], fault), (sender.hex(), "")}
        if keys & self._told or len(self._told) >= MAX_TOLD:
            return
        self._told |= keys
        log.warning("rank %d ignores a stranger at %s: %s", self._rank, address, fault)

    def close(self) -> None:
        if self._thread.is_alive():
            self._stop.send(END)
            self._thread.join()
        for watched in (self._router, *self._dealers):
            watched.disable_monitor()
        for own in (self._zap, self._news, *self._guests, self._stop, self._stopped):
            own.close(linger=0)

    # -- in the thread -----------------------------------------------------------------------------

    def _watch(self) -> None:
        poller = zmq.Poller()
        for each in (self._zap, self._news, self._stopped, *self._guests):
            poller.register(each, zmq.POLLIN)
        while True:
            for ready, _ in poller.poll(self._patience_ms()):
                if ready is self._stopped:
                    if ready.recv() == END:
                        self._tell_of_nameless(math.inf)
                        return
                    for monitor in list(self._guests):
                        poller.register(monitor, zmq.POLLIN)
                elif ready is self._zap:
                    self._answer()
                elif ready is self._news:
                    self._note_caller(*_news(ready))
                else:
                    self._note_guest(self._guests[ready], _news(ready)[0])
            self._tell_of_nameless(time.monotonic())
            self._end_talkers()

    def _patience_ms(self) -> int | None:
        if self._unknown():
            return int(1000 * WATCH_S)
        return int(1000 * AGAIN_S) if self._nameless else None

    def _unknown(self) -> list[tuple[int, str]]:
        """Connections that are not known to be those of ranks."""
        return [each for each in self._callers.items() if self._known.get(each[0]) is None]

    def _end_talkers(self) -> None:
        for descriptor, address in self._unknown():
            if end_if_beyond(MAX_NAMELESS_BYTES, descriptor, address):
                self._known[descriptor] = None  # and is told of now, not when it has gone
                self._tell(address, TALKS_TOO_MUCH)

    def _answer(self) -> None:
        """ZAP, RFC 27."""
        version, request, _, address, _, mechanism, *credentials = self._zap.recv_multipart()
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else ""
        fault = self._fault_of(address.decode(), key)
        if fault:
            self._faults.append((address.decode(), fault))
        status = (b"400", fault.encode()) if fault else (b"200", b"OK")
        self._zap.send_multipart([version, request, *status, key.encode(), b""])

    def _fault_of(self, address: str, key: str) -> str:
        if self._keys is None:
            strange = not (self._any_address or is_loopback(address))
            return "this rank takes connections of its own host only" if strange else ""
        try:
            name = self._keys.name_of(key)
        except KeyFileError as error:  # loosened while we run: nobody new comes in
            return str(error)
        if not name:
            return f"its key {key} is not in {self._keys.authorized.path}"
        known = {guest.public_key for guest in list(self._guests.values())}
        if not self._takes_calls and key not in known:
            return f"its key ({name}) is not that of any rank of this crew"
        return ""

    def _note_caller(self, event: int, value: int) -> None:
        """News of the listening socket: those who came and went without being let in."""
        if event == zmq.EVENT_ACCEPTED:
            self._callers[value] = address_of(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._faults.append(("", "it does not speak as a rank does, or comes without a key"))
        elif event == zmq.EVENT_DISCONNECTED:
            address = self._callers.pop(value, "")
            if value in self._known:
                guest = self._known.pop(value)
                brought_all = value in self._bringing
                self._bringing.discard(value)
                if guest:
                    guest.has_ended |= brought_all
                    self.note_broken(guest)
                return
            host, fault = self._faults.pop(0) if self._faults else ("", self._no_rank)
            self._tell(address or host, fault)

    def _tell(self, address: str, fault: str) -> None:
        """Once of a host and a fault. Who left at once may come again, and is told of then."""
        host = address.partition(":")[0]
        before = {told for known, told in self._told if known == host or not host}
        if fault in before or (fault == self._no_rank and before) or len(self._told) >= MAX_TOLD:
            return
        if not host:
            self._nameless.setdefault(fault, time.monotonic() + AGAIN_S)
            return
        self._nameless.pop(fault, None)
        self._told.add((host, fault))
        log.warning("rank %d refused a caller from %s: %s", self._rank, address, fault)

    def _tell_of_nameless(self, now: float) -> None:
        """Those that did not come again."""
        for fault in [fault for fault, until in self._nameless.items() if until <= now]:
            del self._nameless[fault]
            self._told.add(("", fault))
            log.warning("rank %d refused a caller that left at once: %s", self._rank, fault)

    def _note_guest(self, guest: Guest, event: int) -> None:
        """News of our own connections."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            guest.is_connected = True
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            guest.refusal = "it refused this rank's key; its own log says why"
        elif event == zmq.EVENT_DISCONNECTED and guest.is_connected:
            self.note_broken(guest)
        elif event == zmq.EVENT_DISCONNECTED:
            guest.refusal = guest.refusal or "what answers there is no rank, or has another key"
        elif event == zmq.EVENT_CLOSED:
            guest.refusal = guest.refusal or "nothing listens there, or no way leads there"

    def note_broken(self, guest: Guest) -> None:
        """Our connection to it, or its to us."""
        guest.broken_at = guest.broken_at or time.monotonic()
        self.has_broken = True


def _news(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    message = recv_monitor_message(monitor)
    return int(message["event"]), int(message["value"])
