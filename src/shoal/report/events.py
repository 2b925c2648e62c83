"""What a rank tells whoever holds the terminal, one JSON object a line.

The launcher reads these from a pipe of each rank it started; a rank that was started by hand
hands them to its own terminal. Either way there is one writer on the screen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from shoal.report.records import EpochRecord, Summary
from shoal.settings import pipe_in_environment


class Waiting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Whom we wait for, and how long; empty when the wait is over."""

    text: str


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The crew has met; training begins."""

    model: str
    data: str
    sync: str
    transport: str = "dist"
    boss: bool = False
    """Whether the stages are on workers of a boss."""
    stages: int = 1
    schedule: str | None = None
    microbatches: int = 1
    cut: list[str] = []
    """The modules that stages 1, 2, ... begin with."""
    hosts: list[str]
    parameters: int
    batch_size: int
    train_samples: int
    test_samples: int
    threads: list[int]
    """Of each rank, of which those on different hosts may have different numbers."""
    folder: str | None = None
    """Where rank 0 keeps what there is of the run."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Within an epoch."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float | None
    accuracy: float | None


class EpochDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    record: EpochRecord
    epochs: int


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    summary: Summary


class Verified(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The outcome of `--verify`."""

    passed: bool
    steps: int
    replicas: int
    sync: str
    transport: str = "dist"
    stages: int = 1
    schedule: str | None = None
    microbatches: int = 1
    largest_difference: float | None
    parameter: str
    tolerance: float
    dtype: str
    notes: list[str]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This rank ends with an error."""

    rank: int
    host: str
    kind: str
    message: str
    traceback: str
    exit_code: int
    is_consequence: bool
    """It only lost a peer: some other rank has the cause."""


Event: TypeAlias = Waiting | Started | Progress | EpochDone | Finished | Verified | Failed
Emit: TypeAlias = Callable[[Event], None]


def encode(event: Event) -> bytes:
    return msgspec.json.encode(event) + b"\n"


def decode(line: bytes) -> Event:
    return msgspec.json.decode(line, type=Event)  # type: ignore[no-any-return, unused-ignore]


def pipe_name(fd: int) -> str:
    """By which a rank knows that a descriptor is still its pipe."""
    return f"{fd}:{os.fstat(fd).st_ino}"


def launcher_emitter() -> Emit | None:
    """To the launcher that has started this very process as a rank; None: there is none."""
    name = pipe_in_environment()
    number = name.partition(":")[0]
    try:
        return pipe_emitter(int(number)) if pipe_name(int(number)) == name else None
    except (ValueError, OSError):
        return None


def pipe_emitter(fd: int) -> Emit:
    """Events into a pipe. A reader that is gone is no reason to stop: the launcher ends us."""

    def emit(event: Event) -> None:
        data = encode(event)
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BrokenPipeError:
                return

    return emit
