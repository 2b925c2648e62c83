"""What comes from one peer over gloo: receives that wait for it, and the way into the inbox.

What comes under which tag is in dist_parts.py. Every receive that is not waiting yet when its data
is sent costs a turn of the network. So room for a buffer as long as the last one is held ready:
also where each message has a front of its own, a stream of equal shapes never waits. Memory for the
room after the next is had beforehand, too (`prepare`): whoever waits has its message sooner.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from shoal.errors import WireError
from shoal.wire.arrival import Arrival
from shoal.wire.connections import Connection, Traffic, traffic
from shoal.wire.dist_parts import FIRST, NEVER, PIECE, PIECE_BYTES, REST, WHOLE
from shoal.wire.dist_signs import read_lent
from shoal.wire.first_piece import MOST_ROOM_BYTES, Room
from shoal.wire.front import Front, FrontReader, without_number
from shoal.wire.gpu_lane import GpuLane
from shoal.wire.inbox import Inbox
from shoal.wire.loans import Loans, receipt
from shoal.wire.slots import DTYPES, as_tensor

PIECES_AHEAD = 64
"""That receives wait for. With 8 of them 64 MiB took a tenth longer, on one host."""
MAX_SPARES = 8
MORE_THAN_SIGNS_BYTES = 4096
FOR_EVER = timedelta(days=365)
_AT_ONCE = timedelta(milliseconds=1)


class Arrivals:
    """Of the messages of one peer. One thread receives them; `look` and `break_off` are for any."""

    def __init__(
        self,
        rank: int,
        group: Any,
        other: int,
        inbox: Inbox,
        limit_bytes: int,
        lane: GpuLane | None,
        loans: Loans,
        connections: Iterable[Connection] = (),
    ) -> None:
        """other: the peer's rank within the group of two. connections: those of the group."""
        self.heard_at = time.monotonic()
        self._connections = list(connections)
        self._traffic = Traffic(0, 0)
        self.spare: dict[int, tuple[Any, torch.Tensor]] = {}
        """By length: a receive that waits for a buffer, and where it will be."""
        self._rank = rank
        self._group = group
        self._other = other
        self._inbox = inbox
        self._lane = lane
        self._loans = loans
        self._has_gap = False
        """A message was taken back: what its sender said after that is not for anybody."""
        self._reader = FrontReader(limit_bytes, has_gpu=lane is not None)
        self._num_received = 0
        self._room = Room(None)
        self._reserve: Room | None = None
        """Not waiting yet."""
        self._front: Front | None = None
        """The one that came last; `_data`: as it came; `_is_repeated`: it has come twice."""
        self._data = b""
        self._is_repeated = False
        self._begun: tuple[Front, torch.Tensor | None] | None = None
        """A message that is here in part: its front, and its first buffer if that came with it."""

    def listen(self) -> None:
        """Before the first message, and after a sign."""
        self._make_room(self._room)

    @property
    def is_unprepared(self) -> bool:
        return self._reserve is None and self._is_repeated

    def prepare(self) -> None:
        """Have memory for the room that will be needed when the next message has come."""
        if self.is_unprepared:
            self._reserve = Room(self._front)

    @property
    def is_begun(self) -> bool:
        """Of a long message more is to come than was received so far."""
        return self._begun is not None

    def next(self, most_bytes: int | None = None) -> bytes:
        """Wait for a message and deliver it; or else for a sign, which is returned.

        most_bytes: of one that has more behind its front only that is received: the rest next time.
        """
        if self._begun is None and (sign := self._begin()):
            return sign
        assert self._begun is not None
        front, first = self._begun
        if most_bytes is None or sum(front.sizes[slot] for slot in front.behind) <= most_bytes:
            self._begun = None
            self._receive(front, first)
        return b""

    def borrow(self, sign: bytes) -> bytes:
        """Deliver a message whose large buffers lie in the memory of its sender, who says so.

        Returns the receipt; none if it was taken back.
        """
        head, offer = read_lent(sign)
        number, front = self._reader.read(memoryview(head))
        self._check(number)
        self._num_received += 1
        if self._has_gap:
            return b""
        arrival = self._inbox.arrive(self._rank, front)
        for slot, start, end in front.small:
            arrival.take(slot, bytearray(head[start:end]))
        if not self._loans.borrow(arrival, offer):
            self._has_gap = True  # it is leaving: its last words may say why
            return b""
        self._inbox.deliver(arrival)
        return receipt(number)

    def _begin(self) -> bytes:
        """What a message begins with; or a sign, which is returned."""
        self._await(self._room.work)
        if self._room.is_full:
            if self._front is None or self._room.tensor is None:
                raise WireError("a buffer came where a front was due")
            self._begun = self._front, self._room.tensor
            return b""
        is_sign, data = self._whole_front()
        if is_sign:
            return data
        self._begun = self._read(data), None
        return b""

    def look(self) -> None:
        """That something comes, or is taken, though no receive has ended, is a sign of life too.

        Over a slow network one piece may take long, and signs of life, ours and its, wait behind
        it: gloo asks for each before it is sent. What its system takes for a rank that is frozen
        counts only if it is more than such a sign.
        """
        now = traffic(self._connections)
        if now.come > self._traffic.come or now.taken > self._traffic.taken + MORE_THAN_SIGNS_BYTES:
            self._traffic = now
            self.heard_at = time.monotonic()

    def break_off(self) -> None:
        """Make gloo give up all that is under way in its group: it does when a wait times out."""
        with suppress(RuntimeError):
            self._expect(torch.empty(1, dtype=torch.uint8), NEVER).wait(_AT_ONCE)

    def close(self) -> None:
        """Let go of what gloo has of us. Nobody waits for it any more."""
        self.spare.clear()
        self._room, self._reserve, self._begun, self._group = Room(None), None, None, None

    def _whole_front(self) -> tuple[bool, bytes]:
        """Whether it is a sign, and all of it."""
        is_sign, length, head = self._room.read()
        if len(head) < length:
            rest = torch.empty(length - len(head), dtype=torch.uint8)
            self._await(self._expect(rest, REST))
            head += rest.numpy().tobytes()
        return is_sign, head

    def _read(self, data: bytes) -> Front:
        number, front = self._reader.read(memoryview(data))
        self._check(number)
        self._is_repeated = without_number(data) == without_number(self._data)
        self._front, self._data = front, data
        return front

    def _check(self, number: int) -> None:
        if number != self._num_received:
            raise WireError(f"message {number} came, {self._num_received} was due")

    def _receive(self, front: Front, first: torch.Tensor | None) -> None:
        """A message with this front; first: its first buffer, if that came in the front's place."""
        self._num_received += 1
        if first is not None and len(front.slots) == 1:
            self._deliver_alone(front, first)
            return
        arrival = self._inbox.arrive(self._rank, front)
        for number, start, end in front.small:
            arrival.take(number, bytearray(self._data[start:end]))
        room, behind, is_free = self._room, front.behind, True
        if first is not None:
            is_free = arrival.take(behind[0], room.content)
            behind = behind[1:]
        copied = [self._receive_buffer(arrival, number) for number in behind]
        self._deliver(arrival)
        # Not earlier: gloo would make us wait until it has read what is coming in.
        self._make_room(room if is_free else self._from_reserve())
        if behind and not front.slots[behind[-1]].is_on_gpu:
            self._make_spare(front.sizes[behind[-1]], copied[-1])

    def _deliver_alone(self, front: Front, first: torch.Tensor) -> None:
        """A message that is all here: a tensor, the only one.

        There is room for the next one before anybody is told, and whoever waits then has the
        interpreter for itself. What was copied into place leaves its room to the next: another
        would be one more to be fetched into the cache.
        """
        room = self._room
        if self._inbox.has_places_for(self._rank, front):
            arrival = self._inbox.arrive(self._rank, front)
            is_free = arrival.take(0, room.content)
            self._make_room(room if is_free else self._from_reserve())
            self._deliver(arrival)
        else:
            self._make_room(self._from_reserve())
            if not self._has_gap:
                self._inbox.deliver_ready(self._rank, front, [first])

    def _deliver(self, arrival: Arrival) -> None:
        if not self._has_gap:
            self._inbox.deliver(arrival)

    def _receive_buffer(self, arrival: Arrival, number: int) -> torch.Tensor | None:
        """Where it came to lie, if that was copied from and is free again."""
        slot = arrival.front.slots[number]
        size = arrival.front.sizes[number]
        if slot.is_on_gpu and self._lane:
            arrival.put(number, self._lane.receive(DTYPES[slot.kind], slot.shape))
        elif size in self.spare:
            work, place = self.spare.pop(size)
            self._await(work)
            return place if arrival.take(number, place.numpy()) else None
        else:
            self._receive_pieces(arrival, number, size)
        return None

    def _receive_pieces(self, arrival: Arrival, number: int, size: int) -> None:
        """Into place, some pieces ahead: what gloo is to fill it cannot be told to leave alone, and
        whoever brought the place may want it back."""
        is_whole = size <= MOST_ROOM_BYTES
        tag, step = (WHOLE + size, size) if is_whole else (PIECE, PIECE_BYTES)
        place = as_tensor(arrival.room(number))
        ahead: deque[Any] = deque()
        for start in range(0, size, step):
            if len(ahead) == PIECES_AHEAD:
                self._await(ahead.popleft())
            if arrival.must_move:
                while ahead:
                    self._await(ahead.popleft())
                self._inbox.move(arrival)
                place = as_tensor(arrival.memory(number))
            ahead.append(self._expect(place[start : start + step], tag))
        while ahead:
            self._await(ahead.popleft())

    def _from_reserve(self) -> Room | None:
        room, self._reserve = self._reserve, None
        return room

    def _make_room(self, room: Room | None) -> None:
        """For what the next message begins with: this one, if it is what is needed."""
        front = self._front if self._is_repeated else None
        if room is None or room.front is not front:
            room = Room(front)
        room.make_ready()
        self._room = room
        room.work = self._expect(room.place, FIRST)

    def _make_spare(self, size: int, place: torch.Tensor | None) -> None:
        """For a buffer of that length, there if it is free."""
        in_hand = len(self.spare) < MAX_SPARES  # a receive that waits cannot be taken back
        if size <= MOST_ROOM_BYTES and size not in self.spare and in_hand:
            place = torch.empty(size, dtype=torch.uint8) if place is None else place
            self.spare[size] = self._expect(place, WHOLE + size), place

    def _expect(self, place: torch.Tensor, tag: int) -> Any:
        return self._group.recv([place], self._other, tag)

    def _await(self, work: Any) -> None:
        work.wait(FOR_EVER)
        self.heard_at = time.monotonic()
