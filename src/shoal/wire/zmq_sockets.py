"""The sockets of a zmq link: one that listens, and two to every other rank.

ROUTER           all that comes, from everyone, by one port
DEALER           messages to one rank
DEALER, pulse    signs of life to the same: the other may be full, and then passes none
"""

from __future__ import annotations

import msgspec
import zmq

from shoal.network import is_loopback
from shoal.wire import front
from shoal.wire.keys import KeyPair
from shoal.wire.lending import Lender
from shoal.wire.zmq_pieces import WHOLE_BYTES

RECEIVE_QUEUE = 4
"""Zmq messages of each peer that wait in this process for someone to receive them: pieces that are
copied out soon are still in the cache."""
LOOPBACK_BYTES = 400 * 1024
"""Under way within one host: what is copied out while it is still in the cache costs a fifth less
time. On a network the system knows best how much it needs."""
LOOPBACK_ROOM_BYTES = 2**20
"""For what is under way within one host. What the system would give grows only with what has come:
some connections never have room for a message of half a megabyte, and take half as long again."""
TURN_S = 0.1
"""How long to wait for a message before looking after other things."""
BEAT_S = 1.0
"""Between two signs of life, at most."""
PULSE = "p"

Socket = zmq.Socket[bytes]


class Card(msgspec.Struct, frozen=True):
    """What a rank tells the others, so that they can connect."""

    endpoint: str
    token: str
    """Whoever connects must know it."""
    public_key: str = ""
    lender: Lender | None = None
    """Where it lends memory to those of its own host."""


def identity(rank: int, token: str, what: str = "") -> bytes:
    """By which a listening rank knows a connection of another."""
    return f"{rank}{what}:{token}".encode()


def router(context: zmq.Context[Socket]) -> Socket:
    """For all that comes; it does not listen yet."""
    made = context.socket(zmq.ROUTER)
    made.rcvhwm = RECEIVE_QUEUE
    made.rcvtimeo = int(1000 * TURN_S)
    made.maxmsgsize = max(front.MAX_FRONT_BYTES, WHOLE_BYTES)
    return made


def listen(socket: Socket, address: str, port: int) -> str:
    """On a port of an address, or on a free one (0). Returns where."""
    host = f"[{address}]" if ":" in address else address
    socket.ipv6 = ":" in address
    if is_loopback(address):
        socket.rcvbuf = LOOPBACK_ROOM_BYTES
    if port:
        socket.bind(f"tcp://{host}:{port}")
    else:
        port = socket.bind_to_random_port(f"tcp://{host}")
    return f"tcp://{host}:{port}"


def dealer(
    context: zmq.Context[Socket], card: Card, own_name: bytes, keys: KeyPair | None
) -> Socket:
    """For what goes to a rank; it is not connected yet."""
    made = context.socket(zmq.DEALER)
    made.linger = 0  # else, where a handshake failed, the context would never end
    made.sndhwm = 0
    made.reconnect_ivl = -1  # what a broken connection swallowed cannot be made good
    made.ipv6 = "[" in card.endpoint
    if is_loopback(card.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")):
        made.sndbuf = LOOPBACK_BYTES
    made.identity = own_name
    if keys:
        made.curve_publickey = keys.public.encode()
        made.curve_secretkey = keys.secret.encode()
        made.curve_serverkey = card.public_key.encode()
    return made


def give_pulse(socket: Socket, hung_s: float, last_words_s: float) -> None:
    """It shows that this rank lives, and breaks when the other has not for so long."""
    beat_s = min(BEAT_S, hung_s / 4)
    socket.heartbeat_ivl = int(1000 * beat_s)
    socket.heartbeat_timeout = int(1000 * max(hung_s - beat_s - last_words_s, hung_s / 2))
