"""A link over torch.distributed: gloo's send and receive, under a small header.

A receive of gloo's wants to know beforehand how much will come, cannot be asked whether it is done,
and cannot be given up without breaking its whole group. So each pair of ranks has a group of its
own, and each peer two threads here: one that receives (dist_arrivals.py) while nobody who waits
does so (dist_turns.py), one that waits for sends to end.

Nothing here is encrypted or authenticated, as in every group of torch's: for networks that you
trust.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist

from shoal.errors import PeerLost, PeerSilent, WireError
from shoal.interrupts import Held, can_be_held
from shoal.network import is_loopback
from shoal.wire import front
from shoal.wire.connections import Outflow
from shoal.wire.dist_arrivals import Arrivals
from shoal.wire.dist_departures import Departures
from shoal.wire.dist_meeting import MakeLane, Meeting, Met
from shoal.wire.dist_parts import PIECE_BYTES
from shoal.wire.dist_peer import A_MOMENT_S, DistLendJob, Outgoing, Peer
from shoal.wire.dist_signs import ASK, BEAT, DROPPED, GOODBYE, LENT, MAX_REASON_LETTERS, TAKEN
from shoal.wire.header import DEFAULT_LIMIT_BYTES
from shoal.wire.inbox import ReceiveJob
from shoal.wire.lending import Seals
from shoal.wire.link import DONE, FAREWELL_S, Job, Link, has_left
from shoal.wire.loans import LEAST_BYTES, Loan
from shoal.wire.tree import Tree

BEAT_S = 1.0
"""A rank that has nothing to say shows that it lives."""
PARTING_S = 1.0
"""How long threads may take to notice that their peer is lost."""
CLOSING_TURN_S = 0.02
TURN_S = 0.25
"""How often a wait looks for peers that are hung."""
QUICK_BYTES = 16 * 2**20
"""Within one host, it takes but a moment to receive so many."""
LEND_UNASKED_BYTES = 4 * 2**20
"""Less goes in one piece, as fast as bare gloo's; to lend it costs the sender two messages."""
T = TypeVar("T")

log = logging.getLogger("shoal.wire")


class DistLink(Link):
    """Made by `join`."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        timeout_s: float = 60.0,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        hung_s: float = 10.0,
        lends: bool = True,
    ) -> None:
        """lends: large tensors to ranks of this host are read by them from where they lie, if all
        ranks are here; else they are sent."""
        super().__init__(rank, size, timeout_s)
        self._seals = Seals(size) if lends else None
        self._limit_bytes = limit_bytes
        self._hung_s = hung_s
        self._peers: dict[int, Peer] = {}
        self._is_open = True
        self._is_local = False
        """All ranks are on this host."""
        self._counting = threading.Lock()
        self._num_waiting = 0
        """Threads that wait for this link, in a send or a receive."""
        self._num_asked = 0
        """Of waits and questions, since the link was made."""
        self._paused: set[int] = set()
        """Ranks from which nothing is received for the moment."""
        self._inbox.wait_until = self._wait_until
        self._inbox.wait_for = self._wait_for

    def join(
        self,
        store: dist.Store,
        address: str,
        names: list[str] | None = None,
        make_lane: MakeLane | None = None,
    ) -> None:
        """Meet all others at `store`, each at the same time.

        address: of this rank.
        make_lane: for tensors that go from GPU to GPU, where every rank has one of its own.
        """
        self._is_local = is_loopback(address)
        meeting = Meeting(store, self.rank, address, self.timeout_s, self._seals, make_lane)
        for other in range(self.size):
            if other == self.rank:
                continue
            name = names[other] if names else f"rank {other}"
            try:
                met = meeting.with_rank(other, may_lend=self._is_local)
            except RuntimeError as error:
                raise WireError(f"rank {self.rank} has no link with {name}: {error}") from error
            self._peers[other] = self._peer(other, name, met)
        for peer in self._peers.values():
            for work in (self._receive_for_ever, self._see_off):
                peer.threads.append(
                    threading.Thread(target=work, args=(peer,), name="shoal-dist", daemon=True)
                )
                peer.threads[-1].start()

    def _peer(self, other: int, name: str, met: Met) -> Peer:
        group, lane, loans, made = met
        place = int(self.rank < other)
        packer = front.Packer(self._limit_bytes, lane.stays if lane else None)
        # If there are several, somebody else made one meanwhile, and nobody knows which it is.
        outflow = Outflow(next(iter(made))[0]) if len(made) == 1 else None
        arrivals = Arrivals(other, group, place, self._inbox, self._limit_bytes, lane, loans, made)
        departures = Departures(group, place, packer, lane, outflow, loans)
        peer = Peer(other, name, arrivals, departures, loans)
        peer.rouse = functools.partial(self._rouse, peer)
        arrivals.listen()
        return peer

    # -- sending -----------------------------------------------------------------------------------

    def lends_to(self, rank: int) -> bool:
        return self._peers[rank].loans.borrows

    def isend(self, tree: Tree, to: int, tag: str = "", *, lend: bool = False) -> Job:
        self._check(to, tag)
        peer = self._peers[to]
        with peer.departures.lock:
            if not self._is_open:
                raise WireError("the link was closed")
            least = LEAST_BYTES if lend else LEND_UNASKED_BYTES
            begun = self._begin(peer, lambda: peer.departures.begin(tree, tag, least))
        self._prepare(peer)
        if isinstance(begun, Loan):
            return DistLendJob(self, peer, begun)
        return Outgoing(self, peer, begun) if begun else DONE

    def _begin(self, peer: Peer, begin: Callable[[], T]) -> T:
        """With the lock of its departures held."""
        if peer.lost:
            raise copy.copy(peer.lost)
        try:
            return begin()
        except RuntimeError as error:
            raise self._lose(peer, error) from error
        finally:
            if peer.departures.is_torn and not peer.lost:
                cause = f"rank {self.rank} was interrupted in the midst of a message to {peer.name}"
                self._break_off(peer, PeerLost(f"{cause}: nothing more can be sent there"))

    def _start_sign(self, peer: Peer, sign: bytes, reason: str = "") -> None:
        """With the lock of its departures held. If it is lost already there is nobody to tell."""
        text = sign + reason[:MAX_REASON_LETTERS].encode("utf-8", "replace")
        with suppress(PeerLost):
            self._begin(peer, lambda: peer.departures.begin_sign(text))

    def _say_goodbye(self, peer: Peer, reason: str = "") -> None:
        """With the lock of its departures held: once, whether we leave or answer one who does."""
        if not peer.has_goodbye:
            peer.has_goodbye = True
            self._start_sign(peer, GOODBYE, reason)
            peer.departures.end()

    def _see_off(self, peer: Peer) -> None:
        """In a thread: wait until what is sent has gone, and show a sign of life in between."""
        try:
            for size_bytes in peer.departures.see_off(min(BEAT_S, self._hung_s / 4)):
                if peer.lost:
                    return
                if size_bytes is None:
                    with peer.departures.lock:
                        if self._is_open:
                            self._start_sign(peer, BEAT)
                elif size_bytes == 0:
                    self._inbox.stir()
                elif size_bytes >= PIECE_BYTES:
                    # It takes what we send. Its own signs of life may not come through meanwhile:
                    # gloo sends nothing while there is always more to be read. What is small goes
                    # without it, as far as this host's own memory.
                    peer.arrivals.heard_at = time.monotonic()
        except RuntimeError as error:
            self._lose(peer, error)

    # -- receiving ---------------------------------------------------------------------------------

    def _wait_for(self, job: ReceiveJob | DistLendJob, limit_s: float) -> bool:
        """For a message, or for its receipt: by receiving it, if nobody does, within one host.

        Whoever receives does not come back before something comes, be it a sign of life. So it must
        have more time than it takes to find that none will, and leaves what takes long to a thread.
        """
        self._check_process()
        peer, deadline = self._peers[job.peer], time.monotonic() + limit_s
        while not job.is_over:
            left_s = deadline - time.monotonic()
            is_quick = self._is_local and not peer.arrivals.is_begun
            if not is_quick or left_s <= self._hung_s or not can_be_held():
                return self._wait_until(lambda: job.is_over, left_s)
            with Held(peer.rouse) as held:
                is_our_turn = peer.turns.take()
                if is_our_turn:
                    self._receive_for(job, peer, held, deadline - self._hung_s)
            if not is_our_turn:
                peer.turns.is_wanted = True
                self._wait_until(lambda: job.is_over or not peer.turns.is_wanted, left_s)
        return True

    def _receive_for(
        self, job: ReceiveJob | DistLendJob, peer: Peer, held: Held, until: float
    ) -> None:
        """It is our turn."""
        try:
            if self._paused:
                self._inbox.stir()
            while not (job.is_over or held.was_interrupted or peer.is_over):
                self._receive_one(peer, QUICK_BYTES)
                if peer.arrivals.is_begun or time.monotonic() > until:
                    break
        finally:
            peer.turns.leave()
            if self._inbox.is_waited_for:
                peer.turns.call()
                self._inbox.stir()

    def _receive_for_ever(self, peer: Peer) -> None:
        """In a thread."""
        while not peer.is_over:
            if not peer.turns.take_over(TURN_S):
                self._part_from_hung()  # while somebody else waits for it inside gloo
                continue
            try:
                if not peer.is_over:
                    peer.arrivals.prepare()
                    self._receive_one(peer)
            finally:
                if peer.turns.give_back():
                    self._inbox.stir()
            if not peer.is_over:
                self._pause(peer)

    def _receive_one(self, peer: Peer, most_bytes: int | None = None) -> None:
        """A message, or a sign. With its turn taken. most_bytes: a longer one is only begun."""
        try:
            sign = peer.arrivals.next(most_bytes)
            if sign:
                self._heed(peer, sign)
        except WireError as error:
            peer.is_over = True
            log.warning("rank %d dropped %s: %s", self.rank, peer.name, error)
            with peer.departures.lock:
                self._start_sign(peer, DROPPED, str(error))
                self._part(peer, PeerLost(f"rank {self.rank} dropped {peer.name}: {error}"))
        except RuntimeError as error:
            peer.is_over = True
            self._lose(peer, error)

    def _prepare(self, peer: Peer) -> None:
        """For an answer: whoever has received and now sends had better things to do so far."""
        if peer.arrivals.is_unprepared and can_be_held():
            with Held():
                if peer.turns.take():
                    try:
                        peer.arrivals.prepare()
                    finally:
                        peer.turns.leave()

    def _rouse(self, peer: Peer, insist: bool) -> None:
        """Bring back whoever receives: an answer from the peer will, or else its loss."""
        if insist:
            cause = f"rank {self.rank} was interrupted while {peer.name} was silent"
            self._break_off(peer, PeerLost(f"{cause}: nothing more comes from there"))
        else:
            with peer.departures.lock:
                self._start_sign(peer, ASK)

    def _pause(self, peer: Peer) -> None:
        """Until there is room: a receiver that is slow slows its senders, not fills its memory.

        Not while somebody waits here, for whatever: whom it waits for may itself be waiting, at the
        end of a row of others, for us to take what comes. Whoever only asks gets one message more.
        """
        num_asked = self._num_asked

        def may_go_on() -> bool:
            was_asked = self._num_waiting > 0 or self._num_asked != num_asked
            return was_asked or self._inbox.has_room(peer.rank) or self._is_received_from()

        if may_go_on():
            return
        self._paused.add(peer.rank)
        while not self._inbox.wait_for_others(may_go_on, TURN_S):
            if peer.lost:
                break
        peer.arrivals.heard_at = time.monotonic()  # what it sent meanwhile has not been read
        self._paused.discard(peer.rank)

    def _is_received_from(self) -> bool:
        """Whether somebody waits by receiving itself."""
        return any(peer.turns.is_waiters for peer in self._peers.values())

    def _heed(self, peer: Peer, sign: bytes) -> None:
        kind, answer = sign[:1], b""
        if kind in (GOODBYE, DROPPED):
            self._hear_farewell(peer, kind, sign[1:].decode("utf-8", "replace"))
            return
        if kind == LENT:
            if number := peer.arrivals.borrow(sign):
                answer = TAKEN + number
        elif kind == TAKEN:
            peer.loans.has_taken(sign[1:])
            self._inbox.stir()
        elif kind == ASK:
            answer = BEAT
        elif kind != BEAT:
            raise WireError("it sent a sign that means nothing")
        if answer:  # first: somebody waits for it
            with peer.departures.lock:
                self._start_sign(peer, answer)
        peer.arrivals.listen()

    def _hear_farewell(self, peer: Peer, kind: bytes, reason: str) -> None:
        """It says goodbye, or has dropped us."""
        dropped = f"{peer.name} dropped rank {self.rank}: {reason}"
        lost = dropped if kind == DROPPED else has_left(peer.name, reason)
        with peer.departures.lock:
            self._say_goodbye(peer)
            self._part(peer, PeerLost(lost))
        peer.is_over = True

    # -- waiting, and peers that go ----------------------------------------------------------------

    def _wait_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        self._check_process()
        if condition():
            return True
        if limit_s > 0:
            for peer in self._peers.values():
                peer.turns.call()
        deadline = time.monotonic() + limit_s
        if self._inbox.wait_for_others(condition, min(limit_s, A_MOMENT_S)):
            return True
        with self._counting:
            self._num_asked += 1
            self._num_waiting += 1
        try:
            if self._paused:
                self._inbox.stir()
            while not self._inbox.wait_for_others(condition, min(limit_s, TURN_S)):
                self._part_from_hung()
                limit_s = deadline - time.monotonic()
                if limit_s <= 0:
                    return condition()
            return True
        finally:
            with self._counting:
                self._num_waiting -= 1

    def _part_from_hung(self) -> None:
        for peer in self._peers.values():
            if peer.lost or peer.rank in self._paused:
                continue
            peer.arrivals.look()
            if time.monotonic() > peer.arrivals.heard_at + self._hung_s:
                silent = f"no sign of life for {self._hung_s:g} s. It is frozen or cut off"
                self._break_off(peer, PeerSilent(f"rank {self.rank} lost {peer.name}: {silent}"))

    def _lose(self, peer: Peer, error: RuntimeError) -> PeerLost:
        """Its connection broke."""
        reason = str(error).partition("] ")[2].partition(" [")[0] or str(error)
        cause = f"{reason}. It was killed or is cut off"
        lost = peer.parting or PeerSilent(f"rank {self.rank} lost {peer.name}: {cause}")
        self._part(peer, lost)
        return copy.copy(peer.lost or lost)

    def _part(self, peer: Peer, lost: PeerLost) -> None:
        if self._seals:
            self._seals.break_for(peer.rank)  # it may only be gone for us, and read it later
        peer.lost = peer.lost or lost
        self._inbox.lose(peer.rank, peer.lost)
        peer.loans.take_back()

    def close(self, farewell_s: float = FAREWELL_S, reason: str = "") -> None:
        """Say goodbye, behind all that was sent before, and give it time to get there."""
        if not self._is_open or self.is_inherited:
            return
        self._is_open = False
        super().close(farewell_s, reason)
        deadline = time.monotonic() + farewell_s
        for peer in self._peers.values():
            with peer.departures.lock:
                self._say_goodbye(peer, reason)
            peer.turns.call()
        for peer in self._peers.values():
            self._wait_for_threads(peer, deadline)
            if not any(thread.is_alive() for thread in peer.threads):
                # Its connections and its threads end with it; the crew keeps us until it ends.
                peer.arrivals.close()
                peer.departures.close()
        if self._seals:
            self._seals.close()
        for peer in self._peers.values():
            peer.loans.take_back()

    def _wait_for_threads(self, peer: Peer, deadline: float) -> None:
        """Also where the peer is lost: a thread that comes back from gloo while the interpreter
        ends would end the process with it."""
        lost_at = 0.0
        while alive := [thread for thread in peer.threads if thread.is_alive()]:
            now = time.monotonic()
            lost_at = lost_at or (now if peer.lost else 0.0)
            if now > deadline or (lost_at and now > lost_at + PARTING_S):
                self._break_off(peer, PeerLost(f"rank {self.rank} has left {peer.name}"))
                for thread in alive:
                    thread.join(PARTING_S)
                return
            alive[0].join(CLOSING_TURN_S)
            self._part_from_hung()

    def _break_off(self, peer: Peer, lost: PeerLost) -> None:
        """Make gloo give up all that is under way with `peer`.

        Only then is anybody told. A peer that was frozen may come back, and would go on writing
        into places, and reading from tensors, that their owners have back.
        """
        peer.parting = peer.parting or peer.lost or lost
        peer.arrivals.break_off()
        self._part(peer, peer.parting)
