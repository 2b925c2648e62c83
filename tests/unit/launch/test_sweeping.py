"""After an agent that was killed or hangs, where another one does not come through."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.launch.hosts import Host
from shoal.launch.loss import Loss
from shoal.launch.sweeping import sweep


def test_what_may_be_left_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    hosts = [Host(name=name, ssh=f"me@{name}") for name in ("box", "other", "frozen")]
    lost = {
        "box": Loss("box", "", way="killed"),
        "other": Loss("other", "", way="cut"),
        "frozen": Loss("frozen", "", way="silent", agent=4711),
    }
    notes: list[str] = []
    runs = {host.name: f"run-{host.name}" for host in hosts}
    box, frozen = sweep(hosts, runs, lost, notes.append)
    wait = "waiting for box, frozen, to end what is left there. Ctrl-C gives it up."
    assert notes == [wait, ""]
    assert sweep(hosts, runs, lost, notes.append, gives_up=True) == [box, frozen]
    assert len(notes) == 2  # nobody was waited for
    assert box.startswith("box: processes of this run may be left there. To end them: ssh me@box ")
    end = "'grep -ls SHOAL_RUN=run-{} /proc/[0-9]*/environ | cut -d/ -f3 | xargs -r kill -9{}'"
    assert box.endswith(end.format("box", ""))
    assert frozen.endswith(end.format("frozen", "; kill -9 4711"))
