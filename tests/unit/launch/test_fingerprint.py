"""Is the code on two hosts the same?"""

from __future__ import annotations

from pathlib import Path

from shoal.launch.fingerprint import fingerprint


def project(folder: Path) -> Path:
    (folder / "package").mkdir(parents=True)
    (folder / "train.py").write_text("import package")
    (folder / "package/__init__.py").write_text("")
    return folder


def test_equal_folders_are_equal(tmp_path: Path) -> None:
    one, other = project(tmp_path / "one"), project(tmp_path / "other")
    assert fingerprint(one) == fingerprint(other)
    (other / "train.py").write_text("import package  # changed")
    assert fingerprint(one) != fingerprint(other)
    (other / "train.py").write_text("import package")
    (other / "train.py").rename(other / "main.py")
    assert fingerprint(one) != fingerprint(other)


def test_what_is_never_copied_does_not_count(tmp_path: Path) -> None:
    one, other = project(tmp_path / "one"), project(tmp_path / "other")
    for name in (
        "__pycache__/a.pyc",
        "package/__pycache__/b.pyc",
        "runs/log",
        ".git/HEAD",
        "c.pyc",
    ):
        path = other / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    (other / "broken").symlink_to("nowhere")
    assert fingerprint(one) == fingerprint(other)


def test_names_and_paths_that_stay_at_home(tmp_path: Path) -> None:
    one, other = project(tmp_path / "one"), project(tmp_path / "other")
    for each in (one, other):
        (each / ".shoalignore").write_text("data/\n/only\npackage/old\n")
    for name in ("data/a", "package/data/b", "only", "package/old"):
        (other / name).parent.mkdir(exist_ok=True)
        (other / name).write_text("x")
    assert fingerprint(one) == fingerprint(other)
    (other / "package/only").write_text("x")
    assert fingerprint(one) != fingerprint(other)


def test_no_folder(tmp_path: Path) -> None:
    assert fingerprint(tmp_path / "nowhere") == ""
