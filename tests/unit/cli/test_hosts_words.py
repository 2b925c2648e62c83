"""--hosts and its like, where nothing is started because something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import app
from shoal.errors import SettingsError


def faults_of(*words: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        app(list(words), standalone_mode=False)
    return caught.value.faults


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "outside.py").touch()
    monkeypatch.chdir(folder)
    return folder


def test_a_script_that_would_not_come_along(project: Path) -> None:
    for script in ("../outside.py", str(project.parent / "outside.py")):
        (fault,) = faults_of("run", "--hosts", "desktop", script)
        assert fault.startswith(f"{script}: is outside of {project}, and only the current folder")
        assert "--no-sync" in fault
    assert list(project.iterdir()) == []


@pytest.mark.parametrize("port", ["0", "65536", "99999999"])
def test_ports_that_are_none(port: str) -> None:
    for more in ((), ("--hosts", "desktop")):
        (fault,) = faults_of("worker", "--boss", f"laptop:{port}", *more)
        assert fault == f"--boss laptop:{port}: a port is between 1 and 65535."
    assert faults_of("worker", "--hosts", "desktop", "--boss", f":{port}")


def test_only_what_was_given_is_complained_of() -> None:
    (fault,) = faults_of("train", "--hosts", "a,b", "--boss")
    assert fault.startswith("--boss cannot be used with --hosts")
    faults = faults_of("train", "--hosts", "a,b", "--boss", "--workers", "2")
    assert [fault.split()[0] for fault in faults] == ["--workers", "--boss"]


def test_what_would_be_ignored_is_refused(project: Path) -> None:
    (project / "script.py").touch()
    for words in (("run", "script.py"), ("train",), ("worker", "--boss", "laptop:1024")):
        (fault,) = faults_of(words[0], "--no-sync", *words[1:])
        assert fault.startswith("--no-sync: is about --hosts")
    words = ("worker", "--boss", ":1024", "--hosts", "a:0", "--key", "x", "--boss-key", "y")
    assert [fault.split()[0] for fault in faults_of(*words)] == ["--key", "--boss-key", "--hosts"]


def test_where_no_file_can_be_written(project: Path) -> None:
    """Nobody is asked for what cannot be kept."""
    faults = faults_of("hosts", "init", "--out", "nowhere/hosts.toml", "no-such-host", "x y")
    assert faults[0].startswith("--out nowhere/hosts.toml: there is no folder nowhere")
    assert "'x y' is no name of a host" in faults[1]


def test_hosts_to_install_on(project: Path) -> None:
    assert "--hosts hosts.toml" in faults_of("hosts", "install")[0]
    (project / "hosts.toml").write_text("[hosts.desktop]\n")
    (fault,) = faults_of("hosts", "install", "destkop", "--hosts", "hosts.toml")
    assert "Did you mean desktop?" in fault
    (fault,) = faults_of("hosts", "install", "desktop", "--pip", "--index-url 'https://there")
    assert fault.startswith("--pip --index-url 'https://there: No closing quotation.")
