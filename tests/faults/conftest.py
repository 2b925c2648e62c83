"""Fixtures of the tests in this folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from waiting import within
from wire_log import Log

CLOSING_S = 60.0


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    """What links say in their log."""
    caplog.set_level(logging.INFO, "shoal.wire")
    return Log(caplog)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closed after the test: what was opened last goes first."""
    made = ExitStack()
    yield made
    within(CLOSING_S, made.close)
