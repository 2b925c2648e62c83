"""What one zmq message says, frame by frame: a message's front, a piece of it, or a sign.

Nothing is believed: whatever a rank would not have sent is a WireError, and its sender is dropped
by whoever asked (zmq_link.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq

from shoal.errors import WireError
from shoal.interrupts import Held
from shoal.wire import front
from shoal.wire.inbox import Inbox
from shoal.wire.loans import receipt
from shoal.wire.zmq_gate import Gate
from shoal.wire.zmq_peer import Peer
from shoal.wire.zmq_pieces import LAST, MORE, Due, check_size, is_whole, send
from shoal.wire.zmq_signs import (
    BORROWER,
    DEAF,
    DROPPED,
    GOODBYE,
    HELLO,
    LENT,
    MAX_REASON_LETTERS,
    TAKEN,
)

_NO_FRAME = zmq.Frame()
OnFarewell = Callable[[Peer, bytes, str], None]
"""Told that a peer has left, or dropped us: the sign, and the reason."""


class Receiving:
    """The zmq message that is being received. Used by one thread at a time."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        rank: int,
        inbox: Inbox,
        gate: Gate,
        on_farewell: OnFarewell,
        *,
        has_keys: bool,
        lends: bool,
    ) -> None:
        self.frame = _NO_FRAME
        """What was received last."""
        self.has_more = False
        """Whether more of the same zmq message is to be received."""
        self._router = router
        self._rank = rank
        self._inbox = inbox
        self._gate = gate
        self._on_farewell = on_farewell
        self._has_keys = has_keys
        self._lends = lends

    def begin(self) -> None:
        """Behind its sender."""
        self.frame = self._router.recv(copy=False)
        self.has_more = self.frame.more

    def end(self) -> None:
        """Also where it was not understood."""
        while self.has_more:
            self._next()
        self.frame = _NO_FRAME  # or its memory could not be had for the next

    def is_by(self, peer: Peer) -> bool:
        """Whether it came by the key of that peer, where there are keys."""
        return not self._has_keys or peer.guest.is_author_of(self.frame)

    def receive(self, peer: Peer) -> None:
        """What `peer` says, of which the first frame has been received."""
        if not self.is_by(peer):
            raise WireError("it has the key of another")
        data = self.frame.buffer
        if len(data) == 1:  # also between two pieces: whoever was interrupted there says goodbye
            self._receive_sign(peer)
        elif peer.has_gap:
            return
        elif peer.due is not None:
            self._receive_piece(peer, peer.due, data)
        else:
            self._receive_message(peer, data)
        if self.has_more and not peer.has_gap:
            raise WireError("more came than was announced")

    def _receive_message(self, peer: Peer, data: memoryview) -> None:
        count, read, contents = self._receive_front(peer, data)
        if read.behind:
            if not is_whole(read):
                peer.due = Due(self._inbox, peer.rank, count, read, contents)
                return
            slot = read.behind[0]
            piece = self._next().buffer
            check_size(len(piece), read.sizes[slot])
            contents.insert(slot, piece)
        self._inbox.deliver_whole(peer.rank, read, contents)

    def _receive_front(self, peer: Peer, data: memoryview) -> tuple[int, front.Front, list[Any]]:
        """The number of a message, what its front says, and the small buffers in it."""
        count, read = peer.reader.read(data)
        if count != peer.num_received:
            raise WireError(f"message {count} came, {peer.num_received} was due")
        peer.num_received += 1
        contents: list[Any] = []
        if read.small:
            contents = [bytearray(data[start:end]) for _, start, end in read.small]
        return count, read, contents

    def _receive_piece(self, peer: Peer, due: Due, stamp: memoryview) -> None:
        due.check(stamp)
        if due.fill(self._next_into(due.place)):
            peer.due = None

    def _receive_sign(self, peer: Peer) -> None:
        sign = self.frame.bytes
        if sign == LENT:
            if not peer.has_gap:
                self._borrow(peer)
        elif sign == TAKEN:
            peer.loans.has_taken(self._next().bytes)
        elif sign in (HELLO, BORROWER) and not peer.has_come:
            peer.has_come = True
            peer.loans.borrows = sign == BORROWER and self._lends
            self._gate.greet(self.frame, peer.guest, brings_all=True)
        elif sign in (GOODBYE, DROPPED, DEAF):
            reason = self._next().bytes[:MAX_REASON_LETTERS] if self.has_more else b""
            self._on_farewell(peer, sign, reason.decode("utf-8", "replace").strip())
        else:
            raise WireError("it sent a sign that means nothing")

    def _borrow(self, peer: Peer) -> None:
        """A message whose large buffers lie in the memory of `peer`."""
        if peer.due is not None:
            raise WireError("it lends between two pieces of a message")
        count, read, contents = self._receive_front(peer, self._next().buffer)
        offer = self._next().buffer
        arrival = self._inbox.arrive(peer.rank, read)
        for (slot, _, _), content in zip(read.small, contents, strict=True):
            arrival.take(slot, content)
        if not peer.loans.borrow(arrival, offer):
            peer.has_gap = True
            self._gate.note_broken(peer.guest)  # it is leaving: its last words may say why
            return
        self._inbox.deliver(arrival)
        with (
            suppress(zmq.Again),
            Held(),
            peer.lock,
        ):  # if its connection broke, that is found out soon
            send(peer.dealer, TAKEN, MORE)
            send(peer.dealer, receipt(count), LAST)

    def _next(self) -> zmq.Frame:
        """The next frame."""
        if not self.has_more:
            raise WireError("a part of the message is missing")
        self.frame = self._router.recv(copy=False)
        self.has_more = self.frame.more
        return self.frame

    def _next_into(self, place: memoryview) -> int:
        """The same, without a frame: where it goes, and how many bytes it has."""
        if not self.has_more:
            raise WireError("a part of the message is missing")
        size: int = self._router.recv_into(place)
        self.has_more = bool(self._router.rcvmore)
        return size
