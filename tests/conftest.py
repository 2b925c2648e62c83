"""Fixtures that every folder of tests may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from processes import Running

# What is tested is the same everywhere; `make soak` draws other and many more examples.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("soak", max_examples=5000)
hypothesis.settings.load_profile("same")

Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process in a folder of its own; what still runs afterwards is killed."""
    started: list[Running] = []

    def begin(*argv: str, **environment: str) -> Running:
        started.append(Running(tmp_path / f"process{len(started)}", argv, **environment))
        return started[-1]

    yield begin
    for running in started:
        running.kill()
