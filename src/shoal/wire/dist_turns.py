"""Who receives from a peer over gloo: whoever waits for a message of its, or else a thread.

A thread that receives for others makes every message wake up two threads, one behind the other. So
whoever waits receives itself, and the thread takes over only when nobody has for a while:

    who waits     | receives |      | receives |      | computes ...
    the thread                                            | takes over, receives ...

Nobody can be called back from a receive of gloo's before something comes. Who comes while the
thread is in one waits for it, once; then the thread leaves the next one to who waits.
"""

from __future__ import annotations

import threading
import time

LEASE_S = 0.002
"""Who has received may come again for so long, before the thread takes over."""


class Turns:
    """Of receiving from one peer."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._called = threading.Event()
        self._lease_until = 0.0
        self._is_awaited = False
        """The thread waits for whoever receives to leave."""
        self.is_waiters = False
        """The turn is that of somebody who waits, not the thread's."""
        self.is_wanted = False
        """Somebody waits for its turn, until this is False again."""

    def take(self) -> bool:
        """For whoever waits: whether it is its turn now. Then `leave` must follow."""
        if self._turn.acquire(blocking=False):
            self.is_waiters = True
            return True
        return False

    def leave(self) -> None:
        self.is_waiters = self.is_wanted = False
        self._lease_until = time.monotonic() + LEASE_S
        self._turn.release()
        if self._is_awaited:
            self._called.set()

    def call(self) -> None:
        """The thread is to take over at once, if nobody receives."""
        self._lease_until = 0.0
        self._called.set()

    # -- the thread --------------------------------------------------------------------------------

    def take_over(self, limit_s: float) -> bool:
        """Wait until it is the thread's turn, so long at most; whether it is."""
        deadline = time.monotonic() + limit_s
        while (now := time.monotonic()) < deadline:
            lease_s = self._lease_until - now
            self._is_awaited = lease_s <= 0  # before it is tried: who leaves in between will call
            if self._is_awaited and self._turn.acquire(blocking=False):
                break
            self._called.wait(lease_s if lease_s > 0 else deadline - now)
            self._called.clear()
        else:
            return False
        self._is_awaited = False
        return True

    def give_back(self) -> bool:
        """After a message: whether somebody who waits would rather receive the next one itself."""
        is_wanted, self.is_wanted = self.is_wanted, False
        if is_wanted:
            self._lease_until = time.monotonic() + LEASE_S
        self._turn.release()
        return is_wanted
