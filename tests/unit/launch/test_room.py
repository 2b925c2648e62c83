"""Whether runs can have a folder on a host: real places, good and bad."""

from __future__ import annotations

from pathlib import Path

import pytest
from mounts import disk

from shoal.launch.messages import Condition, Examine
from shoal.launch.probing import answer


def examined(folder: Path) -> Condition:
    found = answer(Examine(names=[], folder=str(folder), project=None))
    assert isinstance(found, Condition)
    return found


def test_where_a_folder_can_be_made_nothing_is_left_of_trying(tmp_path: Path) -> None:
    found = examined(tmp_path / "runs/of mine")
    assert found.folder_fault == ""
    assert found.free_disk_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_with_room_that_may_only_be_read(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", 2**30, "ro") as place:
        fault = examined(place / "runs").folder_fault
    assert fault == f"no folder for a run can be made in {place}/runs (Read-only file system)."


@pytest.mark.parametrize(
    ("folder", "why"), [("/proc/nope", "No such file"), (f"{__file__}/runs", "Not a directory")]
)
def test_where_there_can_be_none(folder: str, why: str) -> None:
    assert f"in {folder} ({why}" in examined(Path(folder)).folder_fault
