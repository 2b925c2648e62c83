"""An agent is asked for the folder of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mounts import disk

from shoal.launch.messages import Here, Prepare, Prepared, Refused, Report, encode, read_report


def asked(folder: Path, needed_bytes: int) -> Report:
    """A real one, over its pipes."""
    order = Prepare(run="my-run", folder=str(folder), needed_bytes=needed_bytes)
    argv = [sys.executable, "-m", "shoal.launch.agent"]
    done = subprocess.run(argv, input=encode(order), capture_output=True, timeout=60, check=False)
    hello, answer = (read_report(line) for line in done.stdout.decode().splitlines())
    assert isinstance(hello, Here), done.stderr
    return answer


def test_it_is_made_where_it_was_asked_for(tmp_path: Path) -> None:
    assert asked(tmp_path / "new", 1) == Prepared(
        code=str(tmp_path / "new/my-run/code"), results=str(tmp_path / "new/my-run/results")
    )
    assert (tmp_path / "new/my-run/results").is_dir()


@pytest.mark.parametrize("folder", ["/proc/x", "/dev/null"])
def test_where_none_can_be_made(folder: str) -> None:
    answer = asked(Path(folder), 1)
    assert isinstance(answer, Refused)
    assert answer.reason.startswith(f"no folder for this run can be made in {folder} (")
    assert 'folder = "PATH" in hosts.toml' in answer.reason


def test_where_there_is_no_room(tmp_path: Path) -> None:
    """Of the folder that was asked for, wherever the cache is."""
    with disk(tmp_path / "small", 2**20) as small:
        answer = asked(small, 100 * 2**20)
        assert list(small.iterdir()) == []
    assert isinstance(answer, Refused)
    assert f"1 MiB are free on the disk of {small}, and a run needs 100" in answer.reason
