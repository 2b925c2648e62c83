"""Calls that may never return: torch's client of a store waits for a frozen leader for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LET_GO_S = 1.0


def bounded(
    call: Callable[[], T],
    limit_s: float,
    error: Exception,
    give_up: Callable[[], None] = lambda: None,
) -> T:
    """Run a call that may never return on a thread that nobody has to wait for.

    A call with a timeout of its own needs a much shorter one: a thread that comes back from C++
    while Python is shutting down aborts the process.

    error: raised when the time is over.
    give_up: asks the call to return soon, where it can; also when the wait is interrupted.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as fault:
            errors.append(fault)

    thread = threading.Thread(target=run, daemon=True, name="shoal-bounded")
    thread.start()
    try:
        thread.join(limit_s)
    except BaseException:
        give_up()
        thread.join(LET_GO_S)
        raise
    if errors:
        raise errors[0]
    if not results:
        give_up()
        raise error
    return results[0]
