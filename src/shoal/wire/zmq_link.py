"""A link over ZeroMQ: one listening port per process, whatever the number of peers.

    rank 0   ROUTER <──────── DEALER   rank 1        each rank listens on one ROUTER and has a
             DEALER ────────> ROUTER                 DEALER to every peer: a connection each way,
                                                     and one more each for signs of life

A message is its front and, behind it, its large buffers (zmq_pieces.py); how sockets are made is in
zmq_sockets.py, what is known of another rank in zmq_peer.py.

Whoever waits, for a message to come or to have gone, receives for all (`_pump`): on the way of a
message there is no thread of ours. Who may connect, and who has gone, is the gate's business
(zmq_gate.py). Queues on the sending side have no limit and hold no copies; on the receiving side
they are short, so that a slow receiver slows its senders and does not fill its memory.
"""

from __future__ import annotations

import logging
import secrets
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy
import zmq

from shoal.errors import PeerLost, PeerSilent, WireError
from shoal.network import is_loopback
from shoal.wire import front, lending, zmq_sockets
from shoal.wire.header import DEFAULT_LIMIT_BYTES
from shoal.wire.inbox import ReceiveJob
from shoal.wire.lending import Seals, TakenBack, is_readable
from shoal.wire.link import DONE, FAREWELL_S, Job, Link, has_left
from shoal.wire.terms import check_way
from shoal.wire.tree import Tree
from shoal.wire.zmq_gate import Gate, Guest, Keys
from shoal.wire.zmq_jobs import SEND_TURN_S, LendJob, SendJob
from shoal.wire.zmq_peer import Loan, Peer
from shoal.wire.zmq_pieces import (
    LAST,
    MORE,
    Due,
    SentMemory,
    check_size,
    is_whole,
    is_worth_lending,
    send,
    send_pieces,
)
from shoal.wire.zmq_sockets import PULSE, TURN_S, Card, give_pulse, identity

LAST_WORDS_S = 1.0
"""After a connection broke: how long what is still under way may take to arrive, unless it is known
that all is here."""

PULSE_GRACE_S = 0.2
HELLO, BORROWER, GOODBYE, DROPPED, LENT, TAKEN = b"h", b"b", b"g", b"d", b"l", b"t"
"""Signs: one byte. Behind it a reason (goodbye, dropped), a front and addresses (lent), a message's
number (taken). A borrower says hello, and can read what is lent to it."""
NUMBER = struct.Struct("<Q")
MAX_REASON_LETTERS = 500
MAX_CALL_BYTES = 64 * 1024
OnCall = Callable[[bytes, bytes, str], bytes | None]
"""Told of a call: who (to answer to), what, and with which key; what is to be answered at once."""

log = logging.getLogger("shoal.wire")


class ZmqLink(Link):
    """Listens when it is made: hand out the `card`, then `connect` and `settle`."""

    def __init__(
        self,
        rank: int,
        size: int,
        address: str = "127.0.0.1",
        *,
        keys: Keys | None = None,
        insecure: bool = False,
        timeout_s: float = 60.0,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        hung_s: float = 10.0,
        port: int = 0,
        on_call: OnCall | None = None,
    ) -> None:
        """Listens on `port` of `address`, or on a free one.

        on_call: takes what callers say who are no ranks of this crew, from now on; without it
            they are sent away.
        """
        if not (is_loopback(address) or keys or insecure):
            raise WireError(
                f"rank {rank} will not listen on {address} without keys: anyone on that network "
                "could send to it. Make a key on every host (shoal keygen) and authorize each with "
                "each; or, on a network that you trust, say --insecure."
            )
        super().__init__(rank, size, timeout_s)
        self._limit_bytes = limit_bytes
        self._hung_s = hung_s
        self._last_words_s = min(LAST_WORDS_S, hung_s / 4)
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.blocky = False
        self._router = zmq_sockets.router(self._context)
        self._on_call = on_call
        self._gate = Gate(
            self._context, self._router, rank, keys, any_address=insecure, takes_calls=bool(on_call)
        )
        try:
            endpoint = zmq_sockets.listen(self._router, address, port)
        except zmq.ZMQError as error:
            self._gate.close()
            self._router.close()
            self._context.term()
            where = f"port {port} of {address}" if port else address
            raise WireError(f"rank {rank} cannot listen on {where}: {error}") from error
        self._seals = Seals(size) if is_loopback(address) else None
        self.card = Card(
            endpoint,
            secrets.token_hex(16),
            keys.pair.public if keys else "",
            self._seals.lender if self._seals else None,
        )
        self._name = f"rank {rank}"
        self._peers: dict[int, Peer] = {}
        self._by_identity: dict[bytes, Peer] = {}
        self._by_pulse: dict[bytes, Peer] = {}
        self._pumping = threading.Lock()
        self._frame = _NO_FRAME
        """What was received last."""
        self._has_more = False
        """Whether more of the same zmq message is to be received."""
        self._is_open = True
        self._is_closed = False
        self._inbox.wait_until = self._pump_until
        if on_call is not None:
            self._gate.open()

    def connect(self, cards: list[Card], names: list[str] | None = None) -> None:
        """To all others. cards: of all ranks, by rank; names: how to call them in errors."""
        self._name = names[self.rank] if names else self._name
        for rank, card in enumerate(cards):
            if rank == self.rank:
                continue
            name = names[rank] if names else f"rank {rank}"
            if (self._keys is None) != (not card.public_key):
                which = ("without", "with") if self._keys is None else ("with", "without")
                raise WireError(
                    f"rank {self.rank} came {which[0]} keys, {name} {which[1]}: "
                    "all or none must have them"
                )
            if self._keys and not self._keys.name_of(card.public_key):
                raise WireError(
                    f"rank {self.rank} does not know the key of {name}. If it is to be trusted, "
                    f"append this line to {self._keys.authorized.path} on rank {self.rank}'s host:"
                    f"\n{card.public_key} {name.split()[0]}-{rank}"
                )
            guest = Guest(card.public_key)
            dealer, pulse = (self._dealer(card, guest, what) for what in ("", PULSE))
            give_pulse(pulse, self._hung_s, self._last_words_s)
            peer = self._peers[rank] = Peer(
                rank,
                name,
                guest,
                dealer,
                pulse,
                front.Packer(self._limit_bytes),
                front.FrontReader(self._limit_bytes),
            )
            if self._seals and card.lender and is_readable(card.lender, self.rank):
                peer.lender = card.lender
            self._by_identity[identity(rank, self.card.token)] = peer
            self._by_pulse[identity(rank, self.card.token, PULSE)] = peer
            for each in (dealer, pulse):
                each.connect(card.endpoint)
                with suppress(zmq.Again):  # it was refused already; `settle` will say so
                    each.send(BORROWER if peer.lender else HELLO, zmq.DONTWAIT)
        self._gate.open()

    def _dealer(self, card: Card, guest: Guest, what: str) -> zmq.Socket[bytes]:
        own_name = identity(self.rank, card.token, what)
        pair = self._keys.pair if self._keys else None
        dealer = zmq_sockets.dealer(self._context, card, own_name, pair)
        self._gate.expect(dealer, guest)
        return dealer

    def settle(
        self, timeout_s: float | None = None, is_hopeless: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until all others have connected and are connected to.

        is_hopeless: whether that is known to come to nothing.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        peers = self._peers.values()

        def is_settled() -> bool:
            if is_hopeless() or any(p.guest.refusal for p in peers):
                return True
            missing = list(filter(self._missing, peers))
            return not missing or any(p.is_gone for p in missing)

        self._pump_until(is_settled, limit_s)
        missing = list(filter(self._missing, peers))
        # Where somebody cannot be reached at all, others have not had the time.
        hopeless = [p for p in missing if p.guest.refusal or p.is_gone]
        faults = [f"{p.name}: {self._missing(p)}" for p in hopeless or missing]
        if faults:
            raise WireError(
                f"{self._name}, listening at {self.card.endpoint}, has no link with "
                + "; ".join(faults)
            )
        # Their other connections too, or one that leaves soon would be taken for a stranger.
        self._pump_until(lambda: all(p.has_pulse for p in peers), PULSE_GRACE_S)

    def _missing(self, peer: Peer) -> str:
        if peer.guest.is_connected and peer.has_come:
            return ""
        if peer.is_gone:
            return str(self.lost(peer.rank))
        if not peer.guest.is_connected:
            return peer.guest.refusal or "it cannot be reached (is a firewall between us?)"
        return "it can be reached, but it does not reach us"

    # -- sending -----------------------------------------------------------------------------------

    def isend(self, tree: Tree, to: int, tag: str = "", *, lend: bool = False) -> Job:
        check_way(to, tag, self.rank, self.size)
        peer = self._peers[to]
        with peer.lock:  # the pieces of two messages must not mix
            if not self._is_open:
                raise WireError("the link was closed")
            if peer.is_gone:
                raise self.lost(to)
            number = peer.num_sent
            head, buffers = peer.packer.pack(tree, tag, number)
            peer.num_sent += 1
            try:
                if not buffers:
                    send(peer.dealer, head, LAST)
                    return DONE
                if lend and peer.borrows and is_worth_lending(buffers):
                    return self._lend(peer, head, number, buffers)
                return SendJob(self, peer, send_pieces(peer.dealer, head, number, buffers))
            except zmq.Again:  # there is no limit to the queue, but no queue without a connection
                broken = PeerSilent(f"{self._name} lost {peer.name}: {_DEAD}")
        # Its last words, with the reason why it left, may have come and not been received.
        if self._pump_until(lambda: peer.is_gone, 2 * self._last_words_s):
            raise self.lost(to)
        raise broken

    def _lend(self, peer: Peer, head: bytes, number: int, buffers: list[front.Memory]) -> Job:
        addresses = [buffer.ctypes.data for buffer in buffers]
        peer.lent[number] = Loan(buffers)
        send(peer.dealer, LENT, MORE)
        send(peer.dealer, head, MORE)
        send(peer.dealer, struct.pack(f"<{len(addresses)}Q", *addresses), LAST)
        return LendJob(self, peer, number)

    def lends_to(self, rank: int) -> bool:
        return self._peers[rank].borrows

    # -- receiving ---------------------------------------------------------------------------------

    def _pump_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        begun = time.monotonic()
        left = limit_s
        while not condition():
            if left < 0:
                return False
            if self._pumping.acquire(blocking=False):
                try:
                    if not condition():  # what another thread received just now
                        self._pump(left)
                finally:
                    self._pumping.release()
                    self._inbox.stir()
            else:  # another thread receives for us
                self._inbox.wait_for_others(condition, min(left, TURN_S))
            left = begun + limit_s - time.monotonic()
        return True

    def _pump(self, limit_s: float) -> None:
        """Receive the next message; wait for it, but not for long."""
        if self._is_closed:
            return
        if limit_s < TURN_S and not self._router.poll(int(1000 * limit_s)):
            self._bury(is_quiet=True)
            return
        sender, peer = b"", None
        try:
            sender = self._router.recv()
            self._frame = self._router.recv(copy=False)
            self._has_more = self._frame.more
            peer = self._by_identity.get(sender)
            if peer is None:
                self._receive_pulse(sender)
                return
            if peer.is_gone:
                return
            self._receive(peer)
            if self._has_more and not peer.has_gap:
                raise WireError("more came than was announced")
        except zmq.Again:
            self._bury(is_quiet=True)
        except WireError as error:
            self._refuse(sender, peer, error)
        except (KeyboardInterrupt, SystemExit) as error:
            self._has_more = bool(self._router.rcvmore)
            if sender or self._has_more:  # not while we waited: something had come, and is lost
                self._tear(error)
            raise
        finally:
            while self._has_more:  # the rest of a message that was not understood
                self._next()
            self._frame = _NO_FRAME  # or its memory could not be had for the next
            if self._gate.has_broken:
                self._bury(is_quiet=False, heard=peer)

    def _tear(self, why: BaseException) -> None:
        """A message was being received, and is lost; nobody can say whose."""
        error = WireError(
            f"{self._name} was interrupted in the midst of a message ({type(why).__name__}), which "
            "is lost: nothing more can be received by this link"
        )
        for peer in self._peers.values():
            peer.has_gap = True
            self._inbox.lose(peer.rank, error)

    def give_up(self, job: ReceiveJob) -> None:
        self._inbox.withdraw(job)
        if self._inbox.is_filling(job):
            with self._pumping:  # nobody receives into its places meanwhile
                due = self._peers[job.peer].due
                if due is not None:
                    due.move_if_must()

    def tend(self, condition: Callable[[], bool] = lambda: False, limit_s: float = 0.0) -> bool:
        """Receive, for so long at most, until a condition is met; whether it is."""
        return self._pump_until(condition, limit_s)

    def answer(self, caller: bytes, content: bytes) -> None:
        """Say something to someone who called. Whoever is gone does not hear it."""
        with self._pumping:
            self._router.send_multipart([caller, content])

    def _receive_call(self, sender: bytes) -> None:
        """From someone who is no rank of this crew, or not yet."""
        if self._on_call is None or len(self._frame) > MAX_CALL_BYTES or self._has_more:
            raise WireError("it is no rank of this crew")
        self._gate.greet(self._frame, None)
        key = str(self._frame.get("User-Id")) if self._keys else ""
        reply = self._on_call(sender, self._frame.bytes, key)
        if reply is not None:
            self._router.send_multipart([sender, reply])

    def _receive_pulse(self, sender: bytes) -> None:
        """The one message that comes by a connection for signs of life."""
        peer = self._by_pulse.get(sender)
        if peer is None and self._on_call is not None:
            self._receive_call(sender)
            return
        if peer is None or (self._keys and not peer.guest.is_author_of(self._frame)):
            raise WireError("it is no rank of this crew")
        self._gate.greet(self._frame, peer.guest)
        peer.has_pulse = True

    def _receive(self, peer: Peer) -> None:
        """One zmq message from `peer`, of which the first frame has been received."""
        frame = self._frame
        if self._keys and not peer.guest.is_author_of(frame):
            raise WireError("it has the key of another")
        data = frame.buffer
        if len(data) == 1:  # also between two pieces: whoever was interrupted there says goodbye
            self._receive_sign(peer, frame)
            return
        if peer.has_gap:
            return
        if peer.due is not None:
            self._receive_piece(peer, peer.due, data)
            return
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

    def _borrow(self, peer: Peer) -> None:
        """A message whose large buffers lie in the memory of `peer`."""
        if peer.lender is None or peer.due is not None:
            raise WireError("it lends what nobody can borrow")
        count, read, contents = self._receive_front(peer, self._next().buffer)
        offer = self._next().buffer
        check_size(len(offer), NUMBER.size * len(read.behind))
        arrival = self._inbox.arrive(peer.rank, read)
        for (slot, _, _), content in zip(read.small, contents, strict=True):
            arrival.take(slot, content)
        places = [arrival.room(slot) for slot in read.behind]
        try:
            addresses = [at for (at,) in NUMBER.iter_unpack(offer)]
            lending.read(peer.lender, self.rank, addresses, places)
        except TakenBack as error:
            if is_readable(peer.lender, self.rank):
                raise WireError("it lent memory that it does not have") from error
            peer.has_gap = True
            self._gate.note_broken(peer.guest)  # it is leaving: its last words may say why
            return
        self._inbox.deliver(arrival)
        with suppress(zmq.Again), peer.lock:  # if its connection broke, that is found out soon
            send(peer.dealer, TAKEN, MORE)
            send(peer.dealer, NUMBER.pack(count), LAST)

    def _receive_piece(self, peer: Peer, due: Due, stamp: memoryview) -> None:
        due.check(stamp)
        if due.fill(self._next_into(due.place)):
            peer.due = None

    def _receive_sign(self, peer: Peer, frame: zmq.Frame) -> None:
        sign = frame.bytes
        if sign == LENT:
            if not peer.has_gap:
                self._borrow(peer)
        elif sign == TAKEN:
            number = self._next().bytes
            check_size(len(number), NUMBER.size)
            peer.has_taken(*NUMBER.unpack(number))
        elif sign in (HELLO, BORROWER) and not peer.has_come:
            peer.has_come = True
            peer.borrows = sign == BORROWER and self._seals is not None
            self._gate.greet(frame, peer.guest, brings_all=True)
        elif sign in (GOODBYE, DROPPED):
            reason = self._next().bytes[:MAX_REASON_LETTERS] if self._has_more else b""
            self._hear_farewell(peer, sign, reason.decode("utf-8", "replace").strip())
        else:
            raise WireError("it sent a sign that means nothing")

    def _hear_farewell(self, peer: Peer, sign: bytes, reason: str) -> None:
        if sign == GOODBYE:
            self._drop(peer, PeerLost(has_left(peer.name, reason)))
        else:
            self._drop(peer, PeerLost(f"{peer.name} dropped {self._name}: {reason}"))

    def _next(self) -> zmq.Frame:
        """The next frame of the zmq message that is being received."""
        if not self._has_more:
            raise WireError("a part of the message is missing")
        self._frame = self._router.recv(copy=False)
        self._has_more = self._frame.more
        return self._frame

    def _next_into(self, place: memoryview) -> int:
        """The same, without a frame: where it goes, and how many bytes it has."""
        if not self._has_more:
            raise WireError("a part of the message is missing")
        size: int = self._router.recv_into(place)
        self._has_more = bool(self._router.rcvmore)
        return size

    # -- peers that go -----------------------------------------------------------------------------

    def _bury(self, is_quiet: bool, heard: Peer | None = None) -> None:
        """Give up those whose connection broke, when nothing of theirs is left to be received."""
        # Has ZeroMQ look who has something to say: while there is something from others to be
        # received it does so every 100 frames only, and nobody else has a turn until then.
        self._router.get(zmq.EVENTS)
        for peer in self._peers.values():
            if peer.guest.broken_at and not peer.is_gone:
                turns = 0 if is_quiet else 2 * self.size
                if peer.has_said_all(peer is heard, turns, self._last_words_s):
                    self._drop(peer, PeerSilent(f"{self._name} lost {peer.name}: {_DEAD}"))

    def _refuse(self, sender: bytes, peer: Peer | None, error: WireError) -> None:
        if peer is not None:
            log.warning("rank %d dropped %s: %s", self.rank, peer.name, error)
            self._drop(peer, PeerLost(f"{self._name} dropped {peer.name}: {error}"))
            self._send_sign(peer, DROPPED, str(error))
            return
        self._gate.turn_away(sender, self._frame, str(error))

    def _drop(self, peer: Peer, error: PeerLost) -> None:
        if self._seals:
            self._seals.break_for(peer.rank)  # it may only be gone for us, and read it later
        peer.is_gone = True
        peer.take_back()
        peer.due = None
        self._inbox.lose(peer.rank, error)

    def close(self, farewell_s: float = FAREWELL_S, reason: str = "") -> None:
        """Say goodbye, behind all that was sent before, and give it time to get there."""
        self._is_open = False
        with self._pumping:
            if self._is_closed:
                return
            self._say_goodbye(farewell_s, reason)
            super().close(farewell_s, reason)
            self._is_closed = True
            if self._seals:
                self._seals.close()
            self._gate.close()
            for peer in self._peers.values():
                peer.take_back()
                peer.dealer.close(linger=0)
                peer.pulse.close(linger=0)
            self._router.close(linger=0)
            self._context.term()

    def _say_goodbye(self, farewell_s: float, reason: str) -> None:
        """Who leaves because of an error does not wait for others to take what was lent."""
        deadline = time.monotonic() + farewell_s
        parting: list[tuple[Peer, SentMemory]] = []
        for peer in self._peers.values():
            is_there = peer.guest.is_connected and not peer.is_gone
            if is_there and (sent := self._send_sign(peer, GOODBYE, reason)):
                parting.append((peer, sent))
        while parting and time.monotonic() < deadline:
            while self._router.poll(0) and time.monotonic() < deadline:
                self._pump(0)  # others may have to get rid of something first
            parting = [
                (peer, buffer)
                for peer, buffer in parting
                if not (peer.is_gone or peer.guest.broken_at)
                and (not buffer.is_free() or (peer.lent and not reason))
            ]
            if parting and parting[0][1].is_free(SEND_TURN_S):
                self._router.poll(int(1000 * SEND_TURN_S))  # for "taken"

    def _send_sign(self, peer: Peer, sign: bytes, reason: str) -> SentMemory | None:
        """What tells that it has gone; None if there is no connection any more."""
        text = (reason or " ").encode("utf-8", "replace")[:MAX_REASON_LETTERS]
        content: Any = numpy.frombuffer(text, dtype=numpy.uint8).copy()
        buffer = SentMemory(content)
        with peer.lock:
            peer.dealer.copy_threshold = 0  # so that this too is sent as it lies, and watched
            try:
                peer.dealer.send(sign, zmq.DONTWAIT | zmq.SNDMORE)
                peer.dealer.send(content, zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return None
        return buffer


_NO_FRAME = zmq.Frame()
_DEAD = "its connection broke or it gave no sign of life. It was killed, is frozen, or is cut off"
