"""What an error was made of."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from shoal.errors import PeerLost, PeerSilent, lost_peer

LOST = PeerSilent("rank 1 is gone")


def of_its_own() -> None:
    raise ValueError


def hidden() -> None:
    raise ValueError from None


def as_an_exit() -> None:
    sys.exit(3)


def twice_removed() -> None:
    try:
        of_its_own()
    except ValueError as error:
        raise KeyError from error


def error_of(fail: Callable[[], None]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        fail()
    return caught.value


@pytest.mark.parametrize("fail", [of_its_own, hidden, as_an_exit, twice_removed])
def test_an_error_that_was_made_of_a_lost_peer(fail: Callable[[], None]) -> None:
    assert lost_peer(error_of(fail)) is None
    try:
        raise LOST
    except PeerLost:
        assert lost_peer(error_of(fail)) is LOST


def test_no_error_and_one_that_was_raised_from_itself() -> None:
    error = ValueError()
    error.__cause__ = error
    assert lost_peer(error) is None
    assert lost_peer(None) is None
    assert lost_peer(LOST) is LOST
