"""Find a source's files, or download them into the cache, once for all processes of a machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import DataError
from shoal.train.data import idx, sources
from shoal.train.data.download import Progress, fetch
from shoal.train.data.sources import Paths, Source, SourceFile

STALL_S = 120.0
"""How long another process may hold the cache without a byte coming in before we give up."""

_POLL_S = 0.1


def obtain(source: Source, data_dir: Path | None, cache_dir: Path, progress: Progress) -> Paths:
    """The four files; downloaded into cache_dir/<name> if they are in no other place.

    In a user's folder and in the system's, files are only found: reading them tells of faults. The
    cache is ours, so a file that went bad there is fetched anew.
    """
    found = sources.locate(source, data_dir)
    if found is not None:
        return found
    folder = cache_dir / source.name
    if any(not _sound(file, folder) for file in source.files):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise DataError(_unusable(source, folder, str(err))) from err
        with _alone(source, folder, progress):
            for file in source.files:
                # Asked again: whoever held the lock before us has most likely done the work.
                if not _sound(file, folder):
                    fetch(source, file, folder, progress)
    first, second, third, fourth = (_cached(file, folder) for file in source.files)
    return (first, second, third, fourth)


def faults(source: Source, cache_dir: Path) -> list[str]:
    """Why nothing could be downloaded into the cache, if something must be."""
    folder = cache_dir / source.name
    try:
        if all(_cached(file, folder).is_file() for file in source.files):
            return []
        # The nearest folder that is there already: those below it would be made.
        place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as err:
        return [_unusable(source, folder, str(err))]
    if not place.is_dir():
        return [_unusable(source, folder, f"{place} is not a folder")]
    if not os.access(place, os.W_OK | os.X_OK):
        return [_unusable(source, folder, f"no right to write in {place}")]
    return []


def _cached(file: SourceFile, folder: Path) -> Path:
    return folder / f"{file.name}.gz"


def _sound(file: SourceFile, folder: Path) -> bool:
    """The cheap check: header and size. The sha256 was compared when the file came."""
    path = _cached(file, folder)
    try:
        return path.exists() and idx.check(path, file.shape[1:]) == file.shape
    except (DataError, OSError):
        return False


def _unusable(source: Source, folder: Path, reason: str) -> str:
    return (
        f"cache folder {folder}: cannot be used ({reason}). Mend that, or have the four files of "
        f"{source.name} in a folder of your own and give it as --data-dir."
    )


@contextlib.contextmanager
def _alone(source: Source, folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock. While another process has it, report what that process downloads."""
    path = folder / ".lock"
    try:
        lock = path.open("ab")
    except OSError as err:
        raise DataError(_unusable(source, folder, str(err))) from err
    with lock:
        before: dict[str, int] = {}
        patience_ends = time.monotonic() + STALL_S
        while True:
            try:
                # Non-blocking, as a blocked flock has no deadline. Gone with the process, come
                # what may: no stale lock is ever left.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = _arrived(folder)  # another process is at it: watch how it gets on
            except OSError as err:
                raise DataError(_unusable(source, folder, f"no lock on it: {err}")) from err
            for name in sorted(name for name in now if now[name] != before.get(name)):
                patience_ends = time.monotonic() + STALL_S
                progress(name, now[name], None)
            if time.monotonic() > patience_ends:
                raise DataError(
                    f"{path}: another process downloads into this folder, and for {STALL_S:.0f} s "
                    "not a byte has come. End it and start again, or give the data as --data-dir."
                )
            before = now
            time.sleep(_POLL_S)
        yield


def _arrived(folder: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for path in folder.glob("*.gz*"):
        with contextlib.suppress(FileNotFoundError):  # renamed under our eyes
            sizes[path.name.removesuffix(".part")] = path.stat().st_size
    return sizes
