"""Ctrl-C that works while the main thread is inside torch.

Python runs its signal handlers between two bytecodes of the main thread. A rank that waits in a
collective is inside C++ for as long as its peers please, and Ctrl-C waits with it. Here a second
thread hears of the signal through the wakeup descriptor; if the main thread has not come back to
Python within the grace, that thread ends the process.

What must not be left half done can be held: Ctrl-C comes when it is over.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

from shoal.errors import EXIT_INTERRUPTED

GRACE_S = 0.4
ROUSE_S = 0.02
"""What is held and waits is asked to come to an end after so long,"""
PATIENCE_S = 0.3
"""and is made to after so long."""
HANDLED = b"\0"
"""Beside the numbers of signals: that Python has come to handle one."""

Rouse = Callable[[bool], None]
"""Brings the main thread back from C++; True: whatever it takes. Called in another thread."""


class _Main:
    """What Ctrl-C finds in the main thread. Signals are the process's, and so is this."""

    handler: Callable[[int, FrameType | None], None] | None = None
    """Of SIGINT: ours, while there is one."""
    is_held = False
    was_interrupted = False
    """While it was held."""
    rouse: Rouse | None = None
    bell: socket.socket | None = None
    """Rung when Python has come to handle a signal."""

    def has_our_handler(self) -> bool:
        return self.handler is not None and signal.getsignal(signal.SIGINT) is self.handler

    def interrupt(self) -> None:
        if self.bell is not None:
            with suppress(OSError):
                self.bell.send(HANDLED)
        raise KeyboardInterrupt


_main = _Main()


def can_be_held() -> bool:
    """Whether Ctrl-C can be put off in this thread. In others than the main one it never comes."""
    return threading.get_ident() != threading.main_thread().ident or _main.has_our_handler()


class Held:
    """While entered, Ctrl-C waits: it is raised in the end. Where `can_be_held`."""

    __slots__ = ("_is_in_main", "_rouse")

    def __init__(self, rouse: Rouse | None = None) -> None:
        """rouse: how to end what is held, if it waits."""
        self._rouse = rouse
        self._is_in_main = False

    def __enter__(self) -> Held:
        if threading.get_ident() == threading.main_thread().ident:
            _main.rouse = self._rouse
            _main.is_held = self._is_in_main = True
        return self

    @property
    def was_interrupted(self) -> bool:
        """It should come to an end."""
        return self._is_in_main and _main.was_interrupted

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_in_main:
            _main.is_held, _main.rouse = False, None
            if _main.was_interrupted:
                _main.was_interrupted = False
                _main.interrupt()


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
        if _main.is_held:
            _main.was_interrupted = True
        else:
            _main.interrupt()

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    previous_fd = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    if previous_fd != -1:
        signal.set_wakeup_fd(previous_fd)
        ours.close()
        theirs.close()
        yield
        return

    watcher = threading.Thread(
        target=_watch, args=(theirs, grace_s), name="shoal-interrupts", daemon=True
    )
    watcher.start()
    signal.signal(signal.SIGINT, on_interrupt)
    _main.handler, _main.bell = on_interrupt, ours
    try:
        yield
    finally:
        _main.handler = _main.bell = None
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGINT) is on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)
        ours.close()
        watcher.join()
        theirs.close()


def _watch(signals: socket.socket, grace_s: float) -> None:
    """In a thread: end the process if Python does not come to handle an interrupt."""
    ahead: list[tuple[float, Callable[[], None]]] = []
    """What is done if nothing is heard for so long, and then for so long."""
    while True:
        signals.settimeout(ahead[0][0] if ahead else None)
        try:
            received = signals.recv(4096)
        except TimeoutError:
            _, act = ahead.pop(0)
            act()
            continue
        if not received:
            return
        # Two may be read at once: what counts is whether Python was reached after the last one.
        for byte in received:
            if byte == HANDLED[0]:
                ahead = []
            elif byte == signal.SIGINT and _main.has_our_handler():
                ahead = [(grace_s, _end)]
                if _main.is_held:
                    ahead = [(ROUSE_S, _ask), (PATIENCE_S, _insist), *ahead]


def _ask() -> None:
    if rouse := _main.rouse:
        rouse(False)


def _insist() -> None:
    if rouse := _main.rouse:
        rouse(True)


def _end() -> None:
    os._exit(EXIT_INTERRUPTED)
