"""What the package promises: its names, its version, and to be light."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import shoal
from shoal import errors

NAMES = [
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


def test_the_names_are_pinned() -> None:
    """A name that goes away breaks scripts. One that is added must be meant, and is added here."""
    assert shoal.__all__ == NAMES
    assert dir(shoal) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(name: str) -> None:
    assert getattr(shoal, name) is not None


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'shoal' has no attribute 'jion'"):
        _ = shoal.jion


def test_every_error_is_exported_and_has_one_root() -> None:
    ours = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert ours == {name for name in NAMES if name.endswith(("Error", "Lost", "Silent", "Failed"))}
    for name in ours:
        assert issubclass(getattr(shoal, name), shoal.ShoalError)
        assert name in (errors.__doc__ or ""), "the tree at the top of the module shows it"


def test_the_version_is_that_of_the_installed_package() -> None:
    assert shoal.__version__ == importlib.metadata.version("shoal")


def test_importing_it_is_light() -> None:
    code = "import sys, shoal; print(*{'torch', 'numpy', 'typer', 'rich'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stderr
