"""After an agent that was killed, where another one does not come through."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.launch.addresses import Site
from shoal.launch.hosts import Host
from shoal.launch.loss import Loss
from shoal.launch.messages import Here
from shoal.launch.sweeping import sweep

HERE = Here(
    host="box", pid=1, python="", python_version="", shoal="", torch="", seen_as="", seen_from="",
    cores=1, has_rsync=False,
)  # fmt: skip


def test_what_may_be_left_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    sites = [
        Site(Host(name=name, ssh=f"me@{name}"), HERE, False, "", "", f"run-{name}")
        for name in ("box", "other")
    ]
    lost = {"box": Loss("box", "", way="killed"), "other": Loss("other", "", way="cut")}
    (told,) = sweep(sites, lost)
    assert told.startswith("box: what its ranks started in sessions of their own may still run")
    assert told.endswith("ssh me@box 'grep -l SHOAL_RUN=run-box /proc/[0-9]*/environ'")
