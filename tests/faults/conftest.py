"""Fixtures of the tests in this folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from wire_log import Log


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    """What links say in their log."""
    caplog.set_level(logging.INFO, "shoal.wire")
    return Log(caplog)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closed after the test: what was opened last goes first."""
    with ExitStack() as made:
        yield made
