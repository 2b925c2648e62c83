"""A rank driven by hand: bare zmq sockets that say whatever a test has them say.

It listens as a rank does, so that real links can connect to it, and answers nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import zmq

from shoal.closing import Closing
from shoal.wire.apart import take_apart
from shoal.wire.front import pack
from shoal.wire.header import DEFAULT_LIMIT_BYTES
from shoal.wire.keys import KeyPair
from shoal.wire.lending import Seals
from shoal.wire.zmq_pieces import PIECE_BYTES, STAMP, WHOLE_BYTES
from shoal.wire.zmq_signs import HELLO
from shoal.wire.zmq_sockets import PULSE, Card

Frames = Sequence[Any]


class RawRank(Closing):
    """keys: those that it uses. listens_with: where it listens with others. seals: if it lends."""

    def __init__(
        self,
        rank: int,
        keys: KeyPair | None = None,
        listens_with: KeyPair | None = None,
        seals: Seals | None = None,
    ) -> None:
        self.rank = rank
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._calls: list[RawCall] = []
        self._router = self._context.socket(zmq.ROUTER)
        if served := listens_with or keys:
            self._router.curve_server = True
            self._router.curve_secretkey = served.secret.encode()
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.card = Card(
            f"tcp://127.0.0.1:{port}",
            secrets.token_hex(16),
            keys.public if keys else "",
            seals.lender if seals else None,
        )

    def call(
        self,
        card: Card,
        *,
        rank: int | None = None,
        identity: bytes = b"",
        with_pulse: bool = False,
    ) -> RawCall:
        """Connect to the rank that has this card, as this rank or as another.

        with_pulse: by a second connection too, as ranks do: links wait a moment for it.
        """
        number = self.rank if rank is None else rank
        names = [identity or f"{number}:{card.token}".encode()]
        if with_pulse:
            names.append(f"{number}{PULSE}:{card.token}".encode())
        dealers = {name: self._context.socket(zmq.DEALER) for name in names}
        self._calls.append(RawCall(dealers, card, self._keys))
        return self._calls[-1]

    def stop_listening(self) -> None:
        self._router.close()

    def close(self) -> None:
        for call in self._calls:
            call.close()
        self._router.close(linger=0)
        self._context.term()


class RawCall(Closing):
    """A connection to a real rank. It is made again if the other side ends it: once is enough."""

    def __init__(
        self, dealers: dict[bytes, zmq.Socket[bytes]], card: Card, keys: KeyPair | None
    ) -> None:
        self._dealers = list(dealers.values())
        for identity, dealer in dealers.items():
            dealer.identity = identity
            dealer.reconnect_ivl = -1
            dealer.sndhwm = 0  # so that only one thing keeps it from sending: see _send
            if keys:
                dealer.curve_publickey = keys.public.encode()
                dealer.curve_secretkey = keys.secret.encode()
                dealer.curve_serverkey = card.public_key.encode()
            dealer.connect(card.endpoint)

    def hello(self) -> Self:
        for dealer in self._dealers:
            self._send(dealer, [HELLO])
        return self

    def say(self, *messages: Frames) -> Self:
        for frames in messages:
            self._send(self._dealers[0], frames)
        return self

    def _send(self, dealer: zmq.Socket[bytes], frames: Frames) -> None:
        """If the other side has hung up, nobody hears it: a plain send would wait for ever."""
        with suppress(zmq.Again):
            dealer.send_multipart(frames, zmq.DONTWAIT)

    def close(self) -> None:
        for dealer in self._dealers:
            dealer.close(linger=0)


def frames_of(tree: Any, number: int = 0, tag: str = "") -> list[list[bytes]]:
    """The zmq messages by which a link sends `tree` as its message `number`."""
    head, buffers = pack(take_apart(tree), tag, number, DEFAULT_LIMIT_BYTES)
    contents = [buffer.tobytes() for buffer in buffers]
    if len(contents) == 1 and len(contents[0]) <= WHOLE_BYTES:
        return [[head, contents[0]]]
    pieces = [
        content[at : at + PIECE_BYTES]
        for content in contents
        for at in range(0, len(content), PIECE_BYTES)
    ]
    return [[head], *([STAMP.pack(number, n), piece] for n, piece in enumerate(pieces))]
