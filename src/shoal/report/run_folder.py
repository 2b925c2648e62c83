"""The folder of one run: settings.json, metrics.jsonl, summary.json, model.safetensors.

Every failure to write becomes a StorageError that says which file, why, and what is safe.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import msgspec

from shoal.closing import Closing
from shoal.errors import StorageError
from shoal.report.records import StepRecord, Summary

RUN_FOLDERS = "[0-9]" * 8 + "-" + "[0-9]" * 6 + "-*"
"""What their names match: see `make_folder`."""


def faults(out: str) -> list[str]:
    """Whether run folders can be made in `out`, found by trying, before anything starts."""
    existing = Path(out).absolute()
    try:
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir():
            return [f"--out {out}: {existing} is a file, not a folder."]
        Path(tempfile.mkdtemp(prefix=".shoal-", dir=existing)).rmdir()
    except OSError as error:
        return [f"--out {out}: no folder can be made in {existing} ({error.strerror})."]
    if shutil.disk_usage(existing).free == 0:
        return [f"--out {out}: the disk of {existing} is full. Free some space, or choose another."]
    return []


class RunFolder(Closing):
    """Opened by the leader for the length of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_errors(path):
            self._metrics = (path / "metrics.jsonl").open("ab", buffering=0)

    @classmethod
    def create(
        cls, out: str, name: str, settings: msgspec.Struct, path: Path | None = None
    ) -> RunFolder:
        """A new one in `out`; or `path`, where whoever started us has made it."""
        folder = cls(make_folder(out, name) if path is None else path)
        try:
            folder.write("settings.json", _pretty(settings))
        except BaseException:
            folder.close()
            raise
        return folder

    def log(self, record: StepRecord) -> None:
        line = msgspec.json.encode(record) + b"\n"
        with storage_errors(self.path / "metrics.jsonl"):
            whole = self._metrics.tell()
            try:
                while line:  # a disk that fills up takes a part, and raises only the next time
                    line = line[self._metrics.write(line) :]
            except OSError:
                self._metrics.truncate(whole)
                raise

    def finish(self, summary: Summary) -> None:
        self.write("summary.json", _pretty(summary))

    def write(self, name: str, content: bytes) -> None:
        self.replace(name, lambda temporary: _write_durably(temporary, content))

    def replace(self, name: str, write_to: Callable[[Path], None]) -> None:
        """Write a file beside its place, then rename: never half a file under the final name."""
        target = self.path / name
        temporary = self.path / f".{name}.part"
        with storage_errors(target):
            try:
                write_to(temporary)
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)

    def close(self) -> None:
        self._metrics.close()


def make_folder(out: str, name: str) -> Path:
    """A new folder for a run."""
    path = Path(out) / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    with storage_errors(path):
        return _make_new(path)


@contextmanager
def folder_while_needed(out: str, name: str) -> Iterator[Path]:
    """A new folder for a run, gone again afterwards if nothing was put into it."""
    is_first = not Path(out).exists()
    path = make_folder(out, name)
    try:
        yield path
    finally:
        with suppress(OSError):  # something is in it
            path.rmdir()
            if is_first:
                path.parent.rmdir()


def note_folder(path: Path) -> None:
    """Its summary came from elsewhere: now it says where the folder is here."""
    with storage_errors(path), RunFolder(path) as folder:
        summary = msgspec.json.decode((path / "summary.json").read_bytes(), type=Summary)
        folder.finish(msgspec.structs.replace(summary, folder=str(path)))


def _make_new(path: Path) -> Path:
    """Two runs may begin in the same second: the later gets a number."""
    for number in range(1, 1000):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            continue
    raise FileExistsError(errno.EEXIST, "a thousand runs in one second", str(path))


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _pretty(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """In here, a failure to write is told as one to write this file."""
    try:
        yield
    except OSError as error:
        raise StorageError(_explain(path, error)) from error


def _explain(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"No space left to write {path}. What was written before is whole. "
            "Free some space, or choose another folder with --out."
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"{path} cannot be written: {error.strerror}. "
            "Choose a folder that this user may write with --out."
        )
    return f"{path} cannot be written: {error.strerror or error}."
