"""Where runs have their folders on a host, and whether there is room for one."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from shoal.settings import cache_dir


def base_of(folder: str | None) -> Path:
    """folder: as hosts.toml has it; None: in the cache."""
    return (Path(folder).expanduser() if folder else cache_dir() / "runs").absolute()


def room_in(base: Path) -> tuple[int, str]:
    """Bytes that are free, and why no folder can be made there: found by trying, since nothing else
    tells. Nothing is left of it."""
    place = base
    try:
        while not place.exists():
            place = place.parent
        Path(tempfile.mkdtemp(prefix=".shoal-", dir=place)).rmdir()
        return shutil.disk_usage(place).free, ""
    except OSError as error:
        return 0, f"no folder for a run can be made in {base} ({error.strerror})."
