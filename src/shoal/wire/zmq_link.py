"""A link over ZeroMQ: one listening port per process, whatever the number of peers.

    rank 0   ROUTER <──────── DEALER   rank 1        each rank listens on one ROUTER and has a
             DEALER ────────> ROUTER                 DEALER to every peer: a connection each way

A small message is one zmq message: `header [plan] buffer...`. A large one is `header [plan]`, then
its buffers in chunks, each a zmq message of its own, which are received right into place.

There is no thread here. Whoever waits, for a message to come or to have gone, does the receiving
for all (`_pump`); ZeroMQ's own thread moves bytes and keeps the heartbeat meanwhile. Queues on the
sending side have no limit and hold no copies; on the receiving side they are short, so that a slow
receiver slows its senders and not its memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from shoal.errors import PeerLost, WireError
from shoal.network import is_loopback
from shoal.wire import header
from shoal.wire.inbox import Arrival
from shoal.wire.link import Job, Link
from shoal.wire.tree import Parcel, Tree, take_apart

CHUNK_BYTES = 2**20
"""Messages up to this size travel whole, larger ones in pieces of it."""
COPY_BYTES = 64 * 1024
"""Below this, copying a buffer is cheaper than telling when it is free again."""
RECEIVE_QUEUE = 64
"""Zmq messages that wait in this process for someone to receive them."""
FAREWELL_S = 2.0
LAST_WORDS_S = 0.3
"""After a connection broke: how long what is still underway may take to arrive."""

log = logging.getLogger("shoal.wire")


@dataclass
class _Peer:
    rank: int
    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_sent: int = 0
    num_received: int = 0
    arrival: Arrival | None = None
    """The large message that is coming in chunks, if one is."""
    chunks: list[memoryview] = field(default_factory=list)
    """Where its next chunks go, the next one last."""
    is_gone: bool = False
    broken_at: float | None = None


class ZmqLink(Link):
    """Open with `listen`, exchange endpoints, then `connect`."""

    def __init__(
        self, rank: int, size: int, *, timeout_s: float, limit_bytes: int, hung_s: float
    ) -> None:
        super().__init__(rank, size, timeout_s)
        self._limit_bytes = limit_bytes
        self._hung_s = hung_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.rcvhwm = RECEIVE_QUEUE
        self._router.maxmsgsize = max(header.MAX_PLAN_BYTES, CHUNK_BYTES)
        self._keep_heartbeat(self._router)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._peers: dict[int, _Peer] = {}
        self._pumping = threading.Lock()
        self._is_open = True
        self._inbox.wait_until = self._pump_until
        self.endpoint = ""

    @classmethod
    def listen(
        cls,
        rank: int,
        size: int,
        address: str = "127.0.0.1",
        *,
        timeout_s: float = 60.0,
        limit_bytes: int = header.DEFAULT_LIMIT_BYTES,
        hung_s: float = 10.0,
    ) -> ZmqLink:
        """Listen on a free port of `address`; `endpoint` says which."""
        if not is_loopback(address):
            raise WireError(
                f"this link listens on loopback only, not on {address}: "
                "keys, which other addresses need, are not there yet"
            )
        link = cls(rank, size, timeout_s=timeout_s, limit_bytes=limit_bytes, hung_s=hung_s)
        host = f"[{address}]" if ":" in address else address
        if ":" in address:
            link._router.ipv6 = True
        port = link._router.bind_to_random_port(f"tcp://{host}")
        link.endpoint = f"tcp://{host}:{port}"
        return link

    def connect(self, endpoints: list[str]) -> None:
        """Endpoints of all ranks, by rank."""
        for rank, endpoint in enumerate(endpoints):
            if rank == self.rank:
                continue
            dealer = self._context.socket(zmq.DEALER)
            dealer.sndhwm = 0
            dealer.identity = _identity(self.rank)
            self._keep_heartbeat(dealer)
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._poller.register(monitor, zmq.POLLIN)
            self._peers[rank] = _Peer(rank, dealer, monitor)
            dealer.connect(endpoint)

    def _keep_heartbeat(self, socket: zmq.Socket[bytes]) -> None:
        socket.heartbeat_ivl = 1000
        socket.heartbeat_timeout = int(1000 * self._hung_s)

    # -- sending -----------------------------------------------------------------------------------

    def isend(self, tree: Tree, to: int, tag: str = "") -> Job:
        self._check_peer(to)
        peer = self._peers[to]
        parcel = take_apart(tree)
        with peer.lock:  # chunks of two messages must not mix
            if not self._is_open:
                raise WireError("the link was closed")
            if peer.is_gone:
                raise PeerLost(f"rank {self.rank} cannot send to rank {to}: it has left")
            trackers = self._send(peer, parcel, tag)
            peer.num_sent += 1
        return _SendJob(self, trackers, to)

    def _send(self, peer: _Peer, parcel: Parcel, tag: str) -> list[zmq.MessageTracker]:
        head, plan = header.encode(parcel, tag, peer.num_sent)
        front: list[bytes | memoryview] = [head, plan] if plan else [head]
        total = sum(buffer.numel() for buffer in parcel.buffers)
        if total > self._limit_bytes:
            raise WireError(f"a message of {total} bytes; the limit is {self._limit_bytes}")
        if total <= CHUNK_BYTES:
            pieces = [_memory(buffer) for buffer in parcel.buffers]
            more = [zmq.SNDMORE] * (len(front) + len(pieces) - 1) + [0]
        else:
            pieces = [piece for buffer in parcel.buffers for piece in _cut(_memory(buffer))]
            more = [zmq.SNDMORE] * (len(front) - 1) + [0] * (len(pieces) + 1)
        trackers = []
        for frame, flags in zip([*front, *pieces], more, strict=True):
            large = len(frame) >= COPY_BYTES
            if large:
                trackers.append(peer.dealer.send(frame, flags, copy=False, track=True))
            else:
                peer.dealer.send(frame, flags)
        return trackers

    # -- receiving ---------------------------------------------------------------------------------

    def _pump_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self._pumping.acquire(blocking=False):
                try:
                    if not condition():
                        self._pump(min(left, 0.1))
                finally:
                    self._pumping.release()
            else:  # another thread receives for us
                self._inbox._wait_until(condition, min(left, 0.02))
        return True

    def _pump(self, limit_s: float) -> None:
        """Receive what is there; wait for something, `limit_s` at most, if nothing is."""
        if not self._is_open:
            return
        if not self._receive_all():
            for socket, _ in self._poller.poll(int(1000 * limit_s) + 1):
                if socket is self._router:
                    self._receive_all()
                else:
                    self._heed(socket)
        for peer in self._peers.values():
            broken = peer.broken_at
            if broken is not None and not peer.is_gone and time.monotonic() > broken:
                self._receive_all()
                self._drop(peer, PeerLost(f"rank {self.rank} lost rank {peer.rank}: {_DEAD}"))

    def _receive_all(self) -> bool:
        received = False
        for _ in range(2 * RECEIVE_QUEUE):
            try:
                sender = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            received = True
            peer = self._peers.get(_rank_of(sender))
            try:
                if peer is None:
                    raise WireError("it is no rank of this crew")
                if peer.is_gone:
                    continue
                self._receive(peer)
            except WireError as error:
                who = f"rank {peer.rank}" if peer else f"a stranger ({sender[:16].hex()})"
                log.warning("rank %d dropped %s: %s", self.rank, who, error)
                if peer is not None:
                    self._drop(peer, PeerLost(f"rank {self.rank} dropped {who}: {error}"))
            finally:
                while self._router.rcvmore:  # the rest of a message that was not understood
                    self._router.recv()
        return received

    def _receive(self, peer: _Peer) -> None:
        if peer.arrival is not None:
            self._fill(peer.chunks.pop())
            if self._router.rcvmore:
                raise WireError("something came behind a chunk")
            if not peer.chunks:
                arrival, peer.arrival = peer.arrival, None
                self._inbox.deliver(arrival)
            return
        head = self._next_frame()
        if not head:
            self._drop(peer, PeerLost(f"rank {peer.rank} has left"))
            return
        read = header.decode(head, self._limit_bytes)
        if read.number != peer.num_received:
            raise WireError(f"message {read.number} came, {peer.num_received} was due")
        if read.plan_bytes:
            read = header.decode_plan(read, self._next_frame(), self._limit_bytes)
        peer.num_received += 1
        arrival = self._inbox.arrive(peer.rank, read.tag, read.plan, read.slots)
        rooms = [_memory(room) for room in arrival.rooms]
        if read.total_bytes > CHUNK_BYTES:
            peer.arrival = arrival
            peer.chunks = [piece for room in rooms for piece in _cut(room)][::-1]
            return
        for room in rooms:
            self._fill(room)
        if self._router.rcvmore:
            raise WireError("more buffers came than were announced")
        self._inbox.deliver(arrival)

    def _next_frame(self) -> bytes:
        if not self._router.rcvmore:
            raise WireError("a part of the message is missing")
        return self._router.recv()

    def _fill(self, room: memoryview) -> None:
        if not self._router.rcvmore:
            raise WireError("a buffer of the message is missing")
        # An empty view cannot be received into; an empty frame still has to be taken.
        size = self._router.recv_into(room) if len(room) else len(self._router.recv())
        if size != len(room):
            raise WireError(f"{size} bytes came where {len(room)} were announced")

    # -- peers that go -----------------------------------------------------------------------------

    def _heed(self, monitor: zmq.Socket[bytes]) -> None:
        event = recv_monitor_message(monitor)
        for peer in self._peers.values():
            if peer.monitor is monitor and event["event"] == zmq.EVENT_DISCONNECTED:
                peer.broken_at = time.monotonic() + LAST_WORDS_S

    def _drop(self, peer: _Peer, error: PeerLost) -> None:
        peer.is_gone = True
        peer.arrival, peer.chunks = None, []
        self._inbox.lose(peer.rank, error)

    def close(self) -> None:
        """Say goodbye, behind all that was sent before, and give it a moment to get there."""
        with self._pumping:
            if not self._is_open:
                return
            self._pump(0.01)  # hear of those who left before: they need no farewell
            self._is_open = False
            super().close()
            for peer in self._peers.values():
                with peer.lock:
                    gone = peer.is_gone or peer.broken_at is not None
                    if not gone:
                        peer.dealer.send(b"")
                    self._poller.unregister(peer.monitor)
                    peer.dealer.disable_monitor()
                    peer.monitor.close(linger=0)
                    peer.dealer.close(linger=0 if gone else int(1000 * FAREWELL_S))
            self._router.close(linger=0)
            self._context.term()


_DEAD = "its connection broke or it gave no sign of life. It was killed, is frozen, or is cut off"


class _SendJob(Job):
    def __init__(self, link: ZmqLink, trackers: list[zmq.MessageTracker], to: int) -> None:
        self._link = link
        self._trackers = trackers
        self._to = to

    def done(self) -> bool:
        if self._link._peers[self._to].is_gone:
            return True
        self._trackers = [t for t in self._trackers if not t.done]
        return not self._trackers

    def wait(self, timeout_s: float | None = None) -> Tree:
        # Receive meanwhile: two ranks that send much to each other would otherwise wait for ever.
        limit_s = self._link.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while not self.done():
            if time.monotonic() > deadline:
                raise WireError(
                    f"waited {limit_s:g} s for rank {self._to} to take a message; it did not"
                )
            self._link._pump_until(self.done, 0.002)
        if self._trackers and not all(t.done for t in self._trackers):
            raise PeerLost(f"rank {self._to} left before it had taken the whole message")
        return None


def _identity(rank: int) -> bytes:
    return b"r" + rank.to_bytes(4, "big")  # must not begin with a zero byte


def _rank_of(identity: bytes) -> int:
    return int.from_bytes(identity[1:], "big") if identity[:1] == b"r" else -1


def _memory(buffer: torch.Tensor) -> memoryview:
    array: Any = buffer.numpy()
    return memoryview(array)


def _cut(buffer: memoryview) -> list[memoryview]:
    return [buffer[at : at + CHUNK_BYTES] for at in range(0, len(buffer), CHUNK_BYTES)]
