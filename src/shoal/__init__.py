"""shoal: train one PyTorch model on the machines you have.

with shoal.join() as crew:
    model = crew.replicate(Net(), sync="ring")
    for x, y in crew.loader(train_set, batch_size=128): ...
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.version import VERSION

if TYPE_CHECKING:
    from shoal.boss.async_boss import AsyncBoss
    from shoal.boss.boss import Boss
    from shoal.errors import (
        DataError,
        KeyFileError,
        MeetingError,
        ModelError,
        OutOfStepError,
        PeerLost,
        PeerSilent,
        RunFailed,
        SettingsError,
        ShoalError,
        StorageError,
        SyncError,
        WireError,
        WorkerError,
    )
    from shoal.joined import JoinedCrew, join
    from shoal.pipeline.layer import Layer

__version__ = VERSION

# Loaded on first use, so that the launcher, which needs no torch, starts without it.
_HOMES = {
    "AsyncBoss": "shoal.boss.async_boss",
    "Boss": "shoal.boss.boss",
    "join": "shoal.joined",
    "JoinedCrew": "shoal.joined",
    "Layer": "shoal.pipeline.layer",
    "ShoalError": "shoal.errors",
    "SettingsError": "shoal.errors",
    "MeetingError": "shoal.errors",
    "KeyFileError": "shoal.errors",
    "DataError": "shoal.errors",
    "ModelError": "shoal.errors",
    "StorageError": "shoal.errors",
    "SyncError": "shoal.errors",
    "WireError": "shoal.errors",
    "OutOfStepError": "shoal.errors",
    "PeerLost": "shoal.errors",
    "PeerSilent": "shoal.errors",
    "RunFailed": "shoal.errors",
    "WorkerError": "shoal.errors",
}

__all__ = [
    "AsyncBoss",
    "Boss",
    "DataError",
    "JoinedCrew",
    "KeyFileError",
    "Layer",
    "MeetingError",
    "ModelError",
    "OutOfStepError",
    "PeerLost",
    "PeerSilent",
    "RunFailed",
    "SettingsError",
    "ShoalError",
    "StorageError",
    "SyncError",
    "WireError",
    "WorkerError",
    "__version__",
    "join",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
