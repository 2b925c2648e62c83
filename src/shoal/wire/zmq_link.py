"""A link over ZeroMQ: one listening port per process, whatever the number of peers.

    rank 0   ROUTER <──────── DEALER   rank 1        each rank listens on one ROUTER and has a
             DEALER ────────> ROUTER                 DEALER to every peer: a connection each way,
                                                     and one more each for signs of life

A message is its front and, behind it, its large buffers (zmq_pieces.py); what comes is read in
zmq_receiving.py, what it says of itself in zmq_signs.py; how sockets are made is in zmq_sockets.py,
what is known of a rank in zmq_peer.py.

Whoever waits, for a message to come or to have gone, receives for all (`_pump`): on the way of a
message there is no thread of ours. Who may connect, and who has gone, is the gate's business
(zmq_gate.py). Queues on the sending side have no limit and hold no copies; on the receiving side
they are short, so that a slow receiver slows its senders and does not fill its memory.
"""

from __future__ import annotations

import copy
import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from shoal.errors import PeerLost, PeerSilent, WireError
from shoal.interrupts import Held
from shoal.network import is_loopback
from shoal.wire import front, zmq_sockets
from shoal.wire.header import DEFAULT_LIMIT_BYTES
from shoal.wire.inbox import ReceiveJob
from shoal.wire.lending import Seals, is_readable
from shoal.wire.link import DONE, FAREWELL_S, Job, Link, has_left
from shoal.wire.loans import LEAST_BYTES, Loans, is_worth_lending
from shoal.wire.terms import check_seconds
from shoal.wire.tree import Tree
from shoal.wire.zmq_gate import Gate, Guest, Keys
from shoal.wire.zmq_jobs import SendJob, ZmqLendJob
from shoal.wire.zmq_peer import Peer
from shoal.wire.zmq_pieces import LAST, MORE, send, send_pieces
from shoal.wire.zmq_receiving import Receiving
from shoal.wire.zmq_signs import BORROWER, DEAF, DROPPED, GOODBYE, HELLO, LENT, say, say_goodbye
from shoal.wire.zmq_sockets import PULSE, TURN_S, Card, give_pulse, identity

LAST_WORDS_S = 1.0
"""After a connection broke: how long what is still under way may take to arrive, unless it is known
that all is here."""

LEND_AND_WAIT_BYTES = 8 * 2**20
"""More than fits into buffers on its way: whoever waits until so much has gone waits for the other
to receive it anyway, and may as well lend it."""
PULSE_GRACE_S = 0.2
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
        self._receiving = Receiving(
            self._router,
            rank,
            self._inbox,
            self._gate,
            self._hear_farewell,
            has_keys=keys is not None,
            lends=self._seals is not None,
        )
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
            may_borrow = self._seals and card.lender and is_readable(card.lender, self.rank)
            lender = card.lender if may_borrow else None
            peer = self._peers[rank] = Peer(
                rank,
                name,
                guest,
                dealer,
                pulse,
                front.Packer(self._limit_bytes),
                front.FrontReader(self._limit_bytes),
                Loans(self.rank, lender),
            )
            self._by_identity[identity(rank, self.card.token)] = peer
            self._by_pulse[identity(rank, self.card.token, PULSE)] = peer
            for each in (dealer, pulse):
                each.connect(card.endpoint)
                with suppress(zmq.Again):  # it was refused already; `settle` will say so
                    each.send(BORROWER if lender else HELLO, zmq.DONTWAIT)
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

    def send(self, tree: Tree, to: int, tag: str = "", timeout_s: float | None = None) -> None:
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)  # before anything goes
        self._send(tree, to, tag, LEND_AND_WAIT_BYTES).wait(timeout_s)

    def isend(self, tree: Tree, to: int, tag: str = "", *, lend: bool = False) -> Job:
        return self._send(tree, to, tag, LEAST_BYTES if lend else None)

    def _send(self, tree: Tree, to: int, tag: str, least_lent_bytes: int | None) -> Job:
        self._check(to, tag)
        peer = self._peers[to]
        if peer.torn:
            self._tear_off(peer)
        before = peer.num_sent
        try:
            return self._start(peer, tree, tag, least_lent_bytes)
        except (KeyboardInterrupt, SystemExit) as error:
            if peer.num_sent != before:
                peer.torn = type(error).__name__
            raise

    def _start(self, peer: Peer, tree: Tree, tag: str, least_lent_bytes: int | None) -> Job:
        """least_lent_bytes: None: nothing is lent."""
        with peer.lock:  # the pieces of two messages must not mix
            if not self._is_open:
                raise WireError("the link was closed")
            if peer.is_gone:
                raise self.lost(peer.rank)
            if peer.deaf:
                raise copy.copy(peer.deaf)
            number = peer.num_sent
            head, buffers = peer.packer.pack(tree, tag, number)
            peer.num_sent += 1
            try:
                if not buffers:
                    send(peer.dealer, head, LAST)
                    return DONE
                if peer.loans.borrows and is_worth_lending(buffers, least_lent_bytes):
                    return self._lend(peer, head, number, buffers)
                return SendJob(self, peer, send_pieces(peer.dealer, head, number, buffers))
            except zmq.Again:  # there is no limit to the queue, but no queue without a connection
                broken = PeerSilent(f"{self._name} lost {peer.name}: {_DEAD}")
        # Its last words, with the reason why it left, may have come and not been received.
        if self._pump_until(lambda: peer.is_gone, 2 * self._last_words_s):
            raise self.lost(peer.rank)
        raise broken

    def _lend(self, peer: Peer, head: bytes, number: int, buffers: list[front.Memory]) -> Job:
        loan, offer = peer.loans.lend(number, buffers)
        send(peer.dealer, LENT, MORE)
        send(peer.dealer, head, MORE)
        send(peer.dealer, offer, LAST)
        return ZmqLendJob(self, peer, loan)

    def _tear_off(self, peer: Peer) -> None:
        """It may have got a part of a message, and our script goes on: both sides are told."""
        if peer.is_gone:
            return
        was_torn = f"was interrupted in the midst of a message ({peer.torn})"
        say(peer, DROPPED, was_torn)
        self._drop(peer, PeerLost(f"{self._name} {was_torn} to {peer.name}: it gets no more"))

    def lends_to(self, rank: int) -> bool:
        return self._peers[rank].loans.borrows

    # -- receiving ---------------------------------------------------------------------------------

    def _pump_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        self._check_process()
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
            self._receiving.begin()
            peer = self._by_identity.get(sender)
            if peer is None:
                self._receive_pulse(sender)
            elif not peer.is_gone:
                self._receiving.receive(peer)
        except zmq.Again:
            self._bury(is_quiet=True)
        except WireError as error:
            self._refuse(sender, peer, error)
        except (KeyboardInterrupt, SystemExit) as error:
            has_more = self._receiving.has_more = bool(self._router.rcvmore)
            if sender or has_more:  # not while we waited: something had come, and is lost
                self._tear(error)
            raise
        finally:
            self._receiving.end()
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
        text = f"was interrupted while it received ({type(why).__name__})"
        with Held():
            for peer in self._peers.values():
                if peer.guest.is_connected and not (peer.is_gone or peer.torn):
                    say(peer, DEAF, text)

    def give_up(self, job: ReceiveJob) -> None:
        with Held():
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
        frame = self._receiving.frame
        if self._on_call is None or len(frame) > MAX_CALL_BYTES or self._receiving.has_more:
            raise WireError("it is no rank of this crew")
        self._gate.greet(frame, None)
        key = str(frame.get("User-Id")) if self._keys else ""
        reply = self._on_call(sender, frame.bytes, key)
        if reply is not None:
            self._router.send_multipart([sender, reply])

    def _receive_pulse(self, sender: bytes) -> None:
        """The one message that comes by a connection for signs of life."""
        peer = self._by_pulse.get(sender)
        if peer is None and self._on_call is not None:
            self._receive_call(sender)
            return
        if peer is None or not self._receiving.is_by(peer):
            raise WireError("it is no rank of this crew")
        self._gate.greet(self._receiving.frame, peer.guest)
        peer.has_pulse = True

    def _hear_farewell(self, peer: Peer, sign: bytes, reason: str) -> None:
        if sign == DEAF:
            if self._seals:
                self._seals.break_for(peer.rank)
            peer.deaf = PeerLost(f"{peer.name} {reason}: it takes nothing more from {self._name}")
            peer.loans.take_back()
        elif sign == GOODBYE:
            self._drop(peer, PeerLost(has_left(peer.name, reason)))
        else:
            self._drop(peer, PeerLost(f"{peer.name} dropped {self._name}: {reason}"))

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
            say(peer, DROPPED, str(error))
            return
        self._gate.turn_away(sender, self._receiving.frame, str(error))

    def _drop(self, peer: Peer, error: PeerLost) -> None:
        if self._seals:
            self._seals.break_for(peer.rank)  # it may only be gone for us, and read it later
        peer.is_gone = True
        peer.due = None
        self._inbox.lose(peer.rank, error)
        peer.loans.take_back()

    def close(self, farewell_s: float = FAREWELL_S, reason: str = "") -> None:
        """Say goodbye, behind all that was sent before, and give it time to get there."""
        if self.is_inherited:
            return
        self._is_open = False
        with self._pumping:
            if self._is_closed:
                return
            say_goodbye(
                self._peers.values(), self._router, lambda: self._pump(0), farewell_s, reason
            )
            super().close(farewell_s, reason)
            self._is_closed = True
            if self._seals:
                self._seals.close()
            self._gate.close()
            for peer in self._peers.values():
                peer.loans.take_back()
                peer.dealer.close(linger=0)
                peer.pulse.close(linger=0)
            self._router.close(linger=0)
            self._context.term()


_DEAD = "its connection broke or it gave no sign of life. It was killed, is frozen, or is cut off"
