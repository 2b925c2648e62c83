"""A hash of the files that make up a project: is the code on two hosts the same?"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from shoal.launch.copying import ignored


def fingerprint(folder: Path) -> str:
    """Of names and contents, without what is never copied; empty if there is no such folder."""
    if not folder.is_dir():
        return ""
    whole = hashlib.sha256()
    for path in sorted(_files(folder, ignored(folder))):
        whole.update(os.fsencode(path.relative_to(folder)) + b"\0")
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def _files(folder: Path, names: list[str]) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        place = f"/{Path(parent).relative_to(folder)}/".replace("/./", "/")
        folders[:] = [name for name in folders if not _matches(place, name, names)]
        for name in files:
            path = Path(parent) / name
            if path.is_file() and not _matches(place, name, names):
                yield path


def _matches(place: str, name: str, patterns: list[str]) -> bool:
    return any(
        fnmatch.fnmatchcase(place + name if pattern.startswith("/") else name, pattern)
        for pattern in patterns
    )
