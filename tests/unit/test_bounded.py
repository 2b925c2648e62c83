"""Calls that may never return."""

from __future__ import annotations

import threading

import pytest

from shoal.rendezvous.bounded import bounded

TOO_LATE = TimeoutError("too late")


def test_what_the_call_gives_or_raises() -> None:
    assert bounded(lambda: 7, 60, TOO_LATE) == 7
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 / 0, 60, TOO_LATE)


def test_a_call_that_does_not_return_is_given_up() -> None:
    given_up, over = threading.Event(), threading.Event()

    def wait() -> None:
        given_up.wait()
        over.set()

    with pytest.raises(TimeoutError, match="too late"):
        bounded(wait, 0.01, TOO_LATE, given_up.set)
    assert over.wait(60)
