"""Where a script of the project is in a copy of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.launch.scripts import as_copied


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    (made / "sub").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(made)
    (made / "out").symlink_to(tmp_path / "other")
    return made


def test_inside_however_it_is_written(project: Path) -> None:
    for written in ("sub/a.py", "./sub/a.py", f"{project}/sub/a.py", "../project/sub/../sub/a.py"):
        assert as_copied(written, project) == "sub/a.py"
    assert as_copied(f"{project.parent}/link/sub/a.py", project) == "sub/a.py"
    assert as_copied("out/a.py", project) == "out/a.py"  # the link comes along


def test_outside(project: Path) -> None:
    for written in ("../a.py", "/a.py", f"{project.parent}/other/a.py", f"{project}s/a.py"):
        assert as_copied(written, project) is None
