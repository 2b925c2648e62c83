"""A link over torch.distributed: gloo's send and receive, under a small header.

A receive of gloo's wants to know beforehand how much will come, cannot be asked whether it is done,
and cannot be given up without breaking its whole group. So each pair of ranks has a group of its
own, and each peer two threads here: one that receives for ever, one that waits for sends to end.

    tag 1         fronts, into a block that is always waiting; a control byte is a front too
    tag 2         the rest of a front that is longer than the block
    tag 3         pieces of a buffer that is longer than one
    tag 16 + n    a buffer of n bytes

Every receive that is not waiting yet when its data is sent costs a turn of the network. So room for
a buffer as long as the last one is held ready: a steady stream of equal shapes never waits.

Nothing here is encrypted or authenticated, as in every group of torch's: for networks that you
trust.
"""

from __future__ import annotations

import copy
import logging
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.errors import PeerLost, PeerSilent, WireError
from shoal.wire import front
from shoal.wire.arrival import Arrival
from shoal.wire.dist_peer import Outgoing, Peer
from shoal.wire.gpu_lane import GpuLane
from shoal.wire.header import DEFAULT_LIMIT_BYTES
from shoal.wire.link import DONE, FAREWELL_S, Job, Link, has_left
from shoal.wire.slots import DTYPES, as_tensor, view_of
from shoal.wire.terms import check_way
from shoal.wire.tree import Tree

PIECE_BYTES = 4 * 2**20
PIECES_AHEAD = 16
"""That receives wait for. With 8 of them 64 MiB took a tenth longer, on one host."""
BLOCK_BYTES = 64 * 1024
FRONT, REST, PIECE, NEVER, WHOLE = 1, 2, 3, 4, 16
MAX_SPARES = 8
BEAT_S = 1.0
"""A rank that has nothing to say shows that it lives."""
PARTING_S = 1.0
"""How long threads may take to notice that their peer is lost."""
CLOSING_TURN_S = 0.02
TURN_S = 0.25
"""How often a wait looks for peers that are hung."""

_LENGTH = struct.Struct("<I")
_SIGN = 1 << 31
"""Set in the length of what is no message but a sign: one of these, and a reason."""
BEAT, GOODBYE, DROPPED = b"b", b"g", b"d"
MAX_REASON_LETTERS = 500
_FOR_EVER = timedelta(days=365)
_AT_ONCE = timedelta(milliseconds=1)
MakeLane = Callable[[dist.Store, int], GpuLane]

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
    ) -> None:
        super().__init__(rank, size, timeout_s)
        self._limit_bytes = limit_bytes
        self._hung_s = hung_s
        self._peers: dict[int, Peer] = {}
        self._is_open = True
        self._counting = threading.Lock()
        self._num_waiting = 0
        """Threads that wait for this link, in a send or a receive."""
        self._num_asked = 0
        """Of waits and questions, since the link was made."""
        self._inbox.wait_until = self._wait_until

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
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self.timeout_s)
        options._threads = 1
        options._devices = [gloo.create_device(hostname=address)]
        for other in range(self.size):
            if other == self.rank:
                continue
            low, high = sorted((self.rank, other))
            meeting = dist.PrefixStore(f"{low}-{high}", store)
            name = names[other] if names else f"rank {other}"
            try:
                group = gloo(meeting, int(self.rank > other), 2, options)
                lane = make_lane(meeting, int(self.rank > other)) if make_lane else None
            except RuntimeError as error:
                raise WireError(f"rank {self.rank} has no link with {name}: {error}") from error
            reader = front.FrontReader(self._limit_bytes, has_gpu=lane is not None)
            packer = front.Packer(self._limit_bytes, lane.stays if lane else None)
            self._peers[other] = Peer(
                other, name, group, int(self.rank < other), packer, reader, lane
            )
        for peer in self._peers.values():
            for work in (self._receive_for_ever, self._see_off):
                peer.threads.append(
                    threading.Thread(target=work, args=(peer,), name="shoal-dist", daemon=True)
                )
                peer.threads[-1].start()

    # -- sending -----------------------------------------------------------------------------------

    def isend(self, tree: Tree, to: int, tag: str = "", *, lend: bool = False) -> Job:
        check_way(to, tag, self.rank, self.size)
        peer = self._peers[to]
        with peer.lock:
            if not self._is_open:
                raise WireError("the link was closed")
            head, buffers = peer.packer.pack(tree, tag, peer.num_sent)
            outgoing = self._start(peer, _LENGTH.pack(len(head)) + head, buffers)
            peer.num_sent += 1
        return outgoing if buffers else DONE

    def _start(self, peer: Peer, head: bytes, buffers: list[front.Memory]) -> Outgoing:
        if peer.lost:
            raise copy.copy(peer.lost)
        outgoing = Outgoing(self, peer)
        message = as_tensor(bytearray(head))
        fronts = [(FRONT, message)]
        if len(head) > BLOCK_BYTES:
            fronts = [(FRONT, message[:BLOCK_BYTES]), (REST, message[BLOCK_BYTES:])]
        wholes, pieces, on_gpu = [], [], []
        for buffer in buffers:
            if isinstance(buffer, torch.Tensor):
                on_gpu.append(buffer)
                continue
            content = as_tensor(view_of(buffer))
            if len(content) <= PIECE_BYTES:
                wholes.append((WHOLE + len(content), content))
            else:
                pieces += [(PIECE, piece) for piece in content.split(PIECE_BYTES)]
        try:
            # The front after what the other side may be waiting for: it wakes up once, for both.
            for tag, piece in wholes + fronts + pieces:
                outgoing.works.append((peer.group.send([piece], peer.other, tag), piece))
            if peer.lane:
                outgoing.works += [(peer.lane.send(buffer), buffer) for buffer in on_gpu]
        except RuntimeError as error:
            raise self._lose(peer, error) from error
        peer.outgoing.put(outgoing)
        return outgoing

    def _start_sign(self, peer: Peer, sign: bytes, reason: str = "") -> None:
        """With the peer's lock held. If it is lost already there is nobody to tell."""
        text = sign + reason[:MAX_REASON_LETTERS].encode("utf-8", "replace")
        with suppress(PeerLost):
            self._start(peer, _LENGTH.pack(len(text) | _SIGN) + text, [])

    def _say_goodbye(self, peer: Peer, reason: str = "") -> None:
        """With the peer's lock held: once, whether we leave or answer one who does."""
        if not peer.has_goodbye:
            peer.has_goodbye = True
            self._start_sign(peer, GOODBYE, reason)
            peer.outgoing.put(None)

    def _see_off(self, peer: Peer) -> None:
        """In a thread: wait until what is sent has gone, and show a sign of life in between."""
        while not peer.lost:
            try:
                outgoing = peer.outgoing.get(timeout=min(BEAT_S, self._hung_s / 4))
            except queue.Empty:
                with peer.lock:
                    if self._is_open:
                        self._start_sign(peer, BEAT)
                continue
            if outgoing is None:
                return
            try:
                works = outgoing.works
                if all(piece.nbytes < PIECE_BYTES for _, piece in works):
                    works = works[::-1]  # what began last mostly ends last: one wait, not several
                for work, piece in works:
                    work.wait(_FOR_EVER)
                    # It takes what we send. Its own signs of life may not come through meanwhile:
                    # gloo sends nothing while there is always more to be read. What is small goes
                    # without it, as far as this host's own memory.
                    if piece.nbytes >= PIECE_BYTES:
                        peer.heard_at = time.monotonic()
            except RuntimeError as error:
                self._lose(peer, error)
                return
            outgoing.finish()

    # -- receiving ---------------------------------------------------------------------------------

    def _receive_for_ever(self, peer: Peer) -> None:
        """In a thread."""
        block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        try:
            peer.next_front = self._expect(peer, block, FRONT)
            while True:
                self._await(peer, peer.next_front)
                is_sign, data = self._whole_front(peer, block)
                if not is_sign:
                    self._receive(peer, data, block)
                    self._pause(peer)
                elif data[:1] != BEAT:
                    self._heed(peer, data)
                    return
                else:
                    peer.next_front = self._expect(peer, block, FRONT)
        except WireError as error:
            log.warning("rank %d dropped %s: %s", self.rank, peer.name, error)
            with peer.lock:
                self._start_sign(peer, DROPPED, str(error))
                self._part(peer, PeerLost(f"rank {self.rank} dropped {peer.name}: {error}"))
        except RuntimeError as error:
            self._lose(peer, error)

    def _pause(self, peer: Peer) -> None:
        """Until there is room: a receiver that is slow slows its senders, not fills its memory.

        Not while somebody waits here, for whatever: whom it waits for may itself be waiting, at the
        end of a row of others, for us to take what comes. Whoever only asks gets one message more.
        """
        num_asked = self._num_asked

        def may_go_on() -> bool:
            was_asked = self._num_waiting > 0 or self._num_asked != num_asked
            return was_asked or self._inbox.has_room(peer.rank)

        if may_go_on():
            return
        peer.is_paused = True
        while not self._inbox.wait_for_others(may_go_on, TURN_S):
            if peer.lost:
                break
        peer.heard_at = time.monotonic()  # what it sent meanwhile has not been read
        peer.is_paused = False

    def _heed(self, peer: Peer, sign: bytes) -> None:
        """It says goodbye, or has dropped us."""
        reason = sign[1:].decode("utf-8", "replace")
        if sign[:1] == DROPPED:
            lost = f"{peer.name} dropped rank {self.rank}: {reason}"
        elif sign[:1] == GOODBYE:
            lost = has_left(peer.name, reason)
        else:
            raise WireError("it sent a sign that means nothing")
        with peer.lock:
            self._say_goodbye(peer)
            self._part(peer, PeerLost(lost))

    def _whole_front(self, peer: Peer, block: torch.Tensor) -> tuple[bool, bytes]:
        """Whether it is a sign, and all of it."""
        array: Any = block.numpy()
        (length,) = _LENGTH.unpack_from(array)
        is_sign, length = bool(length & _SIGN), length & ~_SIGN
        if not 0 < length <= front.MAX_FRONT_BYTES:
            raise WireError(f"a front of {length} bytes; {front.MAX_FRONT_BYTES} is the most")
        head: bytes = array[_LENGTH.size : _LENGTH.size + length].tobytes()
        if len(head) < length:
            rest = torch.empty(length - len(head), dtype=torch.uint8)
            self._await(peer, self._expect(peer, rest, REST))
            head += rest.numpy().tobytes()
        return is_sign, head

    def _receive(self, peer: Peer, data: bytes, block: torch.Tensor) -> None:
        count, read = peer.reader.read(memoryview(data))
        if count != peer.num_received:
            raise WireError(f"message {count} came, {peer.num_received} was due")
        peer.num_received += 1
        arrival = self._inbox.arrive(peer.rank, read)
        for number, start, end in read.small:
            arrival.take(number, bytearray(data[start:end]))
        ready = None
        for number in read.behind:
            slot = read.slots[number]
            size = slot.size_bytes
            if slot.is_on_gpu and peer.lane:
                arrival.put(number, peer.lane.receive(DTYPES[slot.kind], slot.shape))
            elif size in peer.spare:
                work, place = peer.spare.pop(size)
                self._await(peer, work)
                was_copied = arrival.take(number, place.numpy())
                if was_copied and number == read.behind[-1]:
                    ready = place  # for another as long
            else:
                self._receive_pieces(peer, arrival, number, size)
        self._inbox.deliver(arrival)
        # Not earlier: gloo would make us wait until it has read what is coming in.
        peer.next_front = self._expect(peer, block, FRONT)
        in_hand = len(peer.spare) < MAX_SPARES  # a receive that waits cannot be taken back
        if read.behind and size <= PIECE_BYTES and not slot.is_on_gpu and in_hand:
            ready = torch.empty(size, dtype=torch.uint8) if ready is None else ready
            peer.spare[size] = self._expect(peer, ready, WHOLE + size), ready

    def _receive_pieces(self, peer: Peer, arrival: Arrival, number: int, size: int) -> None:
        """Into place, some pieces ahead: what gloo is to fill it cannot be told to leave alone, and
        whoever brought the place may want it back."""
        tag = WHOLE + size if size <= PIECE_BYTES else PIECE
        place = as_tensor(arrival.room(number))
        ahead: deque[Any] = deque()
        for start in range(0, size, PIECE_BYTES):
            if len(ahead) == PIECES_AHEAD:
                self._await(peer, ahead.popleft())
            if arrival.must_move:
                while ahead:
                    self._await(peer, ahead.popleft())
                self._inbox.move(arrival)
                place = as_tensor(arrival.memory(number))
            ahead.append(self._expect(peer, place[start : start + PIECE_BYTES], tag))
        while ahead:
            self._await(peer, ahead.popleft())

    def _expect(self, peer: Peer, place: torch.Tensor, tag: int) -> Any:
        return peer.group.recv([place], peer.other, tag)

    def _await(self, peer: Peer, work: Any) -> None:
        work.wait(_FOR_EVER)
        peer.heard_at = time.monotonic()

    # -- waiting, and peers that go ----------------------------------------------------------------

    def _wait_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        if condition():
            return True
        deadline = time.monotonic() + limit_s
        with self._counting:
            self._num_asked += 1
            self._num_waiting += 1
        try:
            if any(peer.is_paused for peer in self._peers.values()):
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
            if peer.lost or peer.is_paused:
                continue
            if time.monotonic() > peer.heard_at + self._hung_s:
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
        peer.lost = peer.lost or lost
        self._inbox.lose(peer.rank, peer.lost)

    def close(self, farewell_s: float = FAREWELL_S, reason: str = "") -> None:
        """Say goodbye, behind all that was sent before, and give it time to get there."""
        if not self._is_open:
            return
        self._is_open = False
        super().close(farewell_s, reason)
        deadline = time.monotonic() + farewell_s
        for peer in self._peers.values():
            with peer.lock:
                self._say_goodbye(peer, reason)
        for peer in self._peers.values():
            self._wait_for_threads(peer, deadline)
            if not any(thread.is_alive() for thread in peer.threads):
                # Its connections and its threads end with it; the crew keeps us until it ends.
                peer.spare.clear()
                peer.next_front = peer.group = None

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
        """Make gloo give up all that is under way with `peer`: it does when a wait times out.

        Only then is anybody told. A peer that was frozen may come back, and would go on writing
        into places, and reading from tensors, that their owners have back.
        """
        peer.parting = peer.parting or peer.lost or lost
        with suppress(RuntimeError):
            self._expect(peer, torch.empty(1, dtype=torch.uint8), NEVER).wait(_AT_ONCE)
        self._part(peer, peer.parting)
