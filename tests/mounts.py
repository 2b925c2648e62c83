"""Disks for tests: real ones, of a few kilobytes, in memory. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = os.sysconf("SC_PAGE_SIZE")
"""What a disk in memory gives out at a time."""


@contextmanager
def disk(folder: Path, size_bytes: int, options: str = "rw") -> Iterator[Path]:
    """A file system of its own at `folder`, gone afterwards whatever happens."""
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},{options}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        timeout=20,
    )
    if mount.returncode != 0:
        pytest.skip(f"needs a disk of its own, and mount (needs root) said: {mount.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)


def fill(folder: Path, leave_bytes: int = 0) -> Path:
    """Take all the space of a disk but `leave_bytes`, which is rounded down to whole pages."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * PAGE)
        except OSError:
            file.truncate(max(0, file.tell() // PAGE * PAGE - leave_bytes // PAGE * PAGE))
    return filler
