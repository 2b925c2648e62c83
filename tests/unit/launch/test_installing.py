"""What is told when pip fails on a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import RunFailed
from shoal.launch.hosts import Host
from shoal.launch.installing import install


@pytest.mark.parametrize(
    ("said", "has_remedy"),
    [
        ("ERROR: No matching distribution found for torch==2.1.0", True),
        ("ERROR: Could not install packages: No space left on device", False),
    ],
)
def test_a_host_without_a_network_gets_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, has_remedy: bool
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    told: list[str] = []
    with pytest.raises(RunFailed) as raised:
        install([Host(name="box")], [], told.append)
    assert told == [f"[box] {said}"]
    text = str(raised.value)
    assert text.startswith(f"box: shoal could not be installed.\n  {said}")
    assert ("--pip '--no-index --find-links DIR'" in text) == has_remedy
