"""What data there is, and what is wrong with it: known without torch and without a download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.errors import DataError
from shoal.settings import unknown
from shoal.train.data import obtain, sources
from shoal.train.data.download import Progress


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One data set that shoal knows by name."""

    name: str
    input_shape: tuple[int, ...]
    """Of one sample, without the batch."""


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(name="mnist-sample", input_shape=(1, 28, 28)),
        Entry(name="mnist", input_shape=(1, 28, 28)),
        Entry(name="fashion-mnist", input_shape=(1, 28, 28)),
        Entry(name="sine", input_shape=(1,)),
    )
}
NAMES = tuple(ENTRIES)


def entry(name: str) -> Entry:
    """The data set of this name; DataError, with names that are near, if there is none."""
    for fault in unknown("--data", name, NAMES):
        raise DataError(fault.removesuffix(".") + ", or package.module:factory of your own.")
    return ENTRIES[name]


def faults(name: str, data_dir: Path | None, cache_dir: Path) -> list[str]:
    """Every fault that shows before anything is loaded or downloaded; [] if there is none.

    Cached files are not read: a bad one there is fetched anew when it is needed.
    """
    if ":" in name:
        return []  # a user's factory: only calling it tells
    found: list[str] = []
    try:
        entry(name)
    except DataError as err:
        found.append(str(err))
    source = sources.SOURCES.get(name)
    try:
        if source is not None:
            paths = sources.locate(source, data_dir)
            if paths is None:
                found += obtain.faults(source, cache_dir)
            else:
                found += sources.faults(paths)
        elif data_dir is not None:
            found += _idle_folder(name, data_dir)
    except DataError as err:
        found.append(str(err))
    return found


def name_faults(name: str, data_dir: Path | None) -> list[str]:
    """Those that show without looking at any folder, where the data is on other machines."""
    try:
        entry(name)
    except DataError as err:
        return [str(err)]
    return [_idle(name, data_dir)] if data_dir is not None and name not in sources.SOURCES else []


def prepare(name: str, data_dir: Path | None, cache_dir: Path, progress: Progress) -> None:
    """Download what is missing, so that ranks which start later find it there."""
    source = sources.SOURCES.get(name)
    if source is not None:
        obtain.obtain(source, data_dir, cache_dir, progress)


def _idle_folder(name: str, data_dir: Path) -> list[str]:
    try:
        if not data_dir.is_dir():
            return [f"data folder {data_dir}: there is no such folder. Check --data-dir."]
    except OSError as err:
        return [f"data folder {data_dir}: no way to look into it ({err})."]
    if name not in ENTRIES:
        return []
    return [_idle(name, data_dir)]


def _idle(name: str, data_dir: Path) -> str:
    """Not passed over in silence: who points at a folder would believe to have trained on it."""
    return (
        f"data {name} reads no folder, yet --data-dir {data_dir} is given. Leave it out, or choose "
        f"data that is in files: {', '.join(sources.SOURCES)}."
    )
