"""Fixtures that every folder of tests may use."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from processes import Running
from warm import Host, Nursery
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# What is tested is the same everywhere; `make soak` draws other and many more examples. How long it
# takes decides nothing.
PATIENT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("same", derandomize=True, **PATIENT)
hypothesis.settings.register_profile("soak", max_examples=5000, **PATIENT)
hypothesis.settings.load_profile("same")

# Started in the background by a shell, Ctrl-C would be ignored here and in all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

Start = Callable[..., Running]
LONGEST_FIRST = ["lab", "faults", "parity"]
"""Folders: what is begun last should be short, when two tests run at a time."""


class OneAfterAnother(LoadScopeScheduling):
    """Tests of one file, and those of the one lab there can be."""

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])
        return "lab" if path.parent.name == "lab" else str(path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneAfterAnother:
    """Not by xdist's own groups: with pytest 9 it does not see them."""
    return OneAfterAnother(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Has imported torch, for all processes of this session that start in it."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process in a folder of its own; what still runs afterwards is killed."""
    yield from starting(tmp_path)


@pytest.fixture
def start_warm(tmp_path: Path, nursery: Nursery) -> Iterator[Start]:
    """As `start`, but a program of Python that need not import torch, on any host. See warm.py."""
    yield from starting(tmp_path, nursery)


def starting(folder: Path, nursery: Nursery | None = None) -> Iterator[Start]:
    started: list[Running] = []
    name = "process" if nursery is None else "warm"

    def begin(*argv: str, host: Host | None = None, **environment: str) -> Running:
        own = folder / f"{name}{len(started)}"
        started.append(Running(own, argv, nursery, host, **environment))
        return started[-1]

    yield begin
    for running in started:
        running.kill()
