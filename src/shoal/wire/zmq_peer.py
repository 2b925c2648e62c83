"""Another rank, as a zmq link knows it: its sockets, its counts, and when all it said was heard."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import zmq

from shoal.errors import PeerLost
from shoal.wire import front
from shoal.wire.loans import Loans
from shoal.wire.zmq_gate import Guest
from shoal.wire.zmq_pieces import Due


@dataclass
class Peer:
    rank: int
    name: str
    guest: Guest
    """Who the gate says is behind the messages of this rank."""
    dealer: zmq.Socket[bytes]
    pulse: zmq.Socket[bytes]
    """A connection for signs of life: that of the dealer may be full, and then passes none.

    Nor can signs come from the other side, which does not read when its queue is full: ZeroMQ
    4.3.5 ends the process if such a connection breaks (zeromq/libzmq issue 4364).
    """
    packer: front.Packer
    reader: front.FrontReader
    loans: Loans
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_sent: int = 0
    num_received: int = 0
    silent_since: float = 0.0
    """After its connection broke: when it was last heard of, or nothing of it was first."""
    passed_over: int = 0
    """How often others were heard since then. ZeroMQ takes from all in turn."""
    has_ended: bool = False
    """All that it sent was here to be received when it was last looked at."""
    has_come: bool = False
    has_pulse: bool = False
    is_gone: bool = False
    due: Due | None = None
    """The message whose pieces are coming, if one is."""
    torn: str = ""
    """What interrupted us in the midst of a message to it. It can be told goodbye, and no more."""
    deaf: PeerLost | None = None
    """It was interrupted while it received, and takes nothing more. What it sends is received."""
    has_gap: bool = False
    """A message of it is lost, or was taken back: what it sent after that is not for anybody."""

    def has_said_all(self, is_heard: bool, turns: int, last_words_s: float) -> bool:
        """Its connection broke: is nothing of what it sent left to be received?

        To be asked again and again, whenever something has been received, or nothing was there.
        turns: how often others may have been heard before it would have had its turn; 0: nothing at
            all is left to be received.
        last_words_s: how long what is under way may take, unless it is known that all is here.
        """
        now = time.monotonic()
        is_end_new = self.guest.has_ended and not self.has_ended
        if is_heard or not self.silent_since or is_end_new:
            self.has_ended = self.guest.has_ended
            self.silent_since = now
            self.passed_over = 0
            return False
        self.passed_over += 1
        had_its_turn = not turns or self.passed_over > turns
        return had_its_turn and (self.has_ended or now > self.silent_since + last_words_s)
