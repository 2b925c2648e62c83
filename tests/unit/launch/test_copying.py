"""What goes along to a host, by rsync and by tar: the real ones, with no ssh between them."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import msgspec
import pytest

from shoal.errors import RunFailed, SettingsError
from shoal.launch.copying import Copy, _remedy, copy_all
from shoal.launch.hosts import Host
from shoal.launch.on_hosts import Watcher, run_on_hosts

LOCAL_SSH = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
command = words[words.index("there") + 1:]
os.environ["PATH"] = os.path.dirname(sys.argv[0]) + "/there:" + os.environ["PATH"]
os.execvp("sh", ["sh", "-c", " ".join(word for word in command if word != "--")])
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """One that is this machine, by an ssh that goes nowhere."""
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(LOCAL_SSH)
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(ssh.parent), prepend=":")
    return Host(name="there")


def notes_its_mark(tool: str, folder: Path) -> None:
    """This program there."""
    own = folder / "bin/there" / tool
    own.parent.mkdir()
    own.write_text(
        f'#!/bin/sh\necho "$SHOAL_RUN" >> {folder}/marks\nexec {shutil.which(tool)} "$@"\n'
    )
    own.chmod(0o755)


def marks(folder: Path) -> set[str]:
    return set((folder / "marks").read_text().splitlines())


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name in (
        "train.py",
        "data/a",
        "sub/data/b",
        "top",
        "sub/top",
        "sub/old/c",
        "old/d",
        "e.ckpt",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return folder


@pytest.mark.parametrize("tool", ["rsync", "tar"])
def test_what_stays_at_home_is_the_same_by_rsync_and_by_tar(
    host: Host, project: Path, tmp_path: Path, tool: str
) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool}")
    (project / ".shoalignore").write_bytes(b"# large\n data/\n/top\nsub/old\n*.ckpt\n\n\xff\n")
    notes_its_mark(tool, tmp_path)
    there = tmp_path / "copy"
    there.mkdir()
    copy_all([Copy(host, project, str(there), by_rsync=tool == "rsync", run="a run")], limit_s=30)
    assert marks(tmp_path) == {"a run"}, "so that the agent can end it"
    found = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert found == {".shoalignore", "train.py", "sub/top", "old/d"}


@pytest.mark.parametrize("tool", ["rsync", "tar"])
def test_results_of_the_same_size_and_second_come_back(
    host: Host, tmp_path: Path, tool: str
) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool}")
    here, there = tmp_path / "here", tmp_path / "results"
    for folder, text in ((here, "of rank 2"), (there, "of rank 0")):
        folder.mkdir()
        (folder / "model.pt").write_text(text)
        os.utime(folder / "model.pt", (1e9, 1e9))
    copy = Copy(host, here, str(there), by_rsync=tool == "rsync", run="a run", is_back=True)
    copy_all([copy], limit_s=30)
    assert (here / "model.pt").read_text() == "of rank 0"


def test_an_exception_to_what_stays_at_home_is_refused(project: Path, tmp_path: Path) -> None:
    (project / ".shoalignore").write_text("data\n!data/a\n")
    with pytest.raises(SettingsError, match=r"line 2: '!data/a' would bring something back"):
        run_on_hosts(
            [], tmp_path, lambda sites, ways: [], Watcher(lambda *words: None),
            project=project, sync=True, threads=None,
        )  # fmt: skip


def test_what_is_waited_for_is_not_left_on_the_screen(host: Host, tmp_path: Path) -> None:
    told: list[str] = []
    watcher = Watcher(lambda *words: None, notify=told.append)
    nowhere = msgspec.structs.replace(host, python=str(tmp_path / "none"))
    with pytest.raises(RunFailed):
        run_on_hosts(
            [nowhere], tmp_path, lambda sites, ways: [], watcher,
            project=tmp_path, sync=True, threads=None,
        )  # fmt: skip
    assert told == ["waiting for there.", ""]


def test_what_may_not_be_read_is_told_of_where_it_is(tmp_path: Path) -> None:
    said = 'rsync: [sender] send_files failed to open "no": Permission denied (13)'
    box = Host(name="box")
    assert ".shoalignore" in _remedy(said, Copy(box, tmp_path, "/there", True, "run"))
    back = _remedy(said, Copy(box, tmp_path, "/there", True, "run", is_back=True))
    assert "chmod -R u+rX /there" in back
    assert ".shoalignore" not in back
