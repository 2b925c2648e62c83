"""The shapes of what is written: summary.json and the lines of metrics.jsonl."""

from __future__ import annotations

import msgspec


class EpochRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over the training set, over all ranks."""

    epoch: int
    """Counted from 1."""
    train_loss: float | None
    """None where it is not finite: JSON has no NaN."""
    train_accuracy: float | None
    """None for regression."""
    test_loss: float | None
    test_accuracy: float | None
    seconds: float
    """Of the training pass, evaluation left out."""
    samples_per_second: float
    bytes_sent: int
    """Payload of gradients, summed over ranks."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A line of metrics.jsonl: means over the steps since the last line, over all ranks."""

    epoch: int
    step: int
    """Counted from 1 over the whole run."""
    loss: float | None
    accuracy: float | None
    seconds: float
    """Since training began."""


class LayoutRecord(msgspec.Struct, frozen=True, kw_only=True):
    replicas: int
    stages: int


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the model, on all replicas."""

    stage: int
    hosts: list[str]
    """Of each replica."""
    modules: list[str]
    """Where it begins and ends, and what is between: names of the model's own modules."""
    parameters: int
    share: float
    """Of the time that all stages compute."""
    idle: float
    """The part of its own time in which it waits for others."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """summary.json, and what `--json` prints."""

    model: str
    data: str
    seed: int
    batch_size: int
    sync: str
    transport: str | None
    """How ranks talk: `dist` (torch.distributed); None for a crew of one."""
    schedule: str | None
    """In which order stages work; None where there is one stage."""
    microbatches: int = 1
    """Into how many a replica's batch is cut."""
    layout: LayoutRecord
    stages: list[StageRecord] = []
    """Where the model is cut; empty where it is not."""
    hosts: list[str]
    """The host of each rank."""
    parameters: int
    epochs: list[EpochRecord]
    folder: str | None
    """The run folder; None on ranks that do not keep it."""
    shoal: str
    torch: str
