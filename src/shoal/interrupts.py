"""Ctrl-C that works while the main thread is inside torch.

Python runs its signal handlers between two bytecodes of the main thread. A rank that waits in a
collective is inside C++ for as long as its peers please, and Ctrl-C waits with it. Here a second
thread hears of the signal through the wakeup descriptor; if the main thread has not come back to
Python within the grace, that thread ends the process.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from shoal.errors import EXIT_INTERRUPTED

GRACE_S = 0.4
HANDLED = b"\0"
"""Beside the numbers of signals: that Python has come to handle one."""


@contextmanager
def prompt_interrupts(grace_s: float = GRACE_S) -> Iterator[None]:
    """While open, SIGINT ends this process within `grace_s`, whatever the main thread is doing.

    Does nothing where it cannot: outside the main thread, where SIGINT is ignored or handled by
    the program itself, or where someone (asyncio, say) already listens on the wakeup descriptor.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            ours.send(HANDLED)
        raise KeyboardInterrupt

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    previous_fd = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    if previous_fd != -1:
        signal.set_wakeup_fd(previous_fd)
        ours.close()
        theirs.close()
        yield
        return

    def watch() -> None:
        # Two may be read at once: what counts is whether Python was reached after the last one.
        is_waiting = False
        while True:
            theirs.settimeout(grace_s if is_waiting else None)
            try:
                received = theirs.recv(4096)
            except TimeoutError:
                os._exit(EXIT_INTERRUPTED)
            if not received:
                return
            for byte in received:
                if byte in (signal.SIGINT, HANDLED[0]):
                    is_waiting = byte == signal.SIGINT

    watcher = threading.Thread(target=watch, name="shoal-interrupts", daemon=True)
    watcher.start()
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGINT) is on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)
        ours.close()
        watcher.join()
        theirs.close()
