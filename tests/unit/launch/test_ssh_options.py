"""What ssh is told: past the user's config for logging in by hand, to the right interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import RunFailed
from shoal.launch import ssh
from shoal.launch.agents import Agents
from shoal.launch.hosts import Host


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    ssh._of_sessions.cache_clear()
    yield
    ssh._of_sessions.cache_clear()


@pytest.mark.parametrize(
    ("version", "is_told"),
    [
        ("OpenSSH_9.2p1 Debian-2+deb12u3, OpenSSL 3.0.15", True),
        ("OpenSSH_8.7p1, OpenSSL 3.0.7", True),
        ("OpenSSH_10.0p2", True),
        ("OpenSSH_8.2p1 Ubuntu-4ubuntu0.11", False),
        ("Dropbear v2022.83", False),
    ],
)
def test_only_an_ssh_that_knows_an_option_is_told_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_told: bool
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho '{version}' >&2\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    words = ssh.ssh_argv(Host(name="box"), "true")
    assert ("SessionType=default" in words, "StdinNull=no" in words) == (is_told, is_told)
    assert "RemoteCommand=none" in words


def interpreter(path: Path, says: str) -> None:
    """One that has shoal."""
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] || echo {says}\n')
    path.chmod(0o755)


@pytest.mark.parametrize("is_installed", [True, False])
def test_what_was_installed_there_comes_before_the_path_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    """So that `shoal hosts install` helps where an old shoal is at that path."""
    interpreter(tmp_path / "own/python", "own")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own/python"))
    if is_installed:
        interpreter(tmp_path / ssh.VENV / "bin/python", "installed")
    found = subprocess.run(
        ["sh", "-c", ssh.find_python(Host(name="box"), "shoal.launch.agent")],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert found.stdout.split() == ["installed" if is_installed else "own"], found.stderr


def test_where_there_is_no_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunFailed, match="there is no ssh here"), Agents([Host(name="box")]):
        pass
