"""Each fault that the doctor knows is made, and is diagnosed by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import SHOAL, Running
from ssh_hosts import Lab, ssh_lab, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

RATE_MBIT = 100
PORT = 5000
ALL_PORTS = "1024-65534"

Start = Callable[..., Running]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with ssh_lab(
        tmp_path_factory.mktemp("lab"),
        rates={"server": f"{RATE_MBIT}mbit"},
        interfaces={"desktop": "enp3s0"},
        dead_ends={"desktop": "docker0"},
        etc_hosts={"desktop": ["127.0.1.1 desktop.home desktop"]},
    ) as made:
        yield made


@dataclass(frozen=True)
class Visit:
    """What the doctor said."""

    done: subprocess.CompletedProcess[str]

    @property
    def found(self) -> dict[str, Any]:
        assert self.done.returncode in (0, 1), self.done.stderr
        content: dict[str, Any] = json.loads(self.done.stdout)
        return content

    def host(self, name: str) -> dict[str, Any]:
        return next(host for host in self.found["hosts"] if host["name"] == name)

    def way(self, source: str, target: str) -> dict[str, Any]:
        ends = (source, target)
        return next(w for w in self.found["pairs"] if (w["source"], w["target"]) == ends)

    def bad(self) -> dict[str, str]:
        """What is red: the sentence and the remedy, by place."""
        rows = {host["name"]: host["cells"] for host in self.found["hosts"]}
        rows |= {f"{w['source']} -> {w['target']}": w["cells"] for w in self.found["pairs"]}
        return {
            f"{row}, {what}": f"{cell['sentence']} | {cell['remedy']}"
            for row, cells in rows.items()
            for what, cell in cells.items()
            if cell["verdict"] == "bad"
        }


def doctor(lab: Lab, *options: str, cwd: Path | None = None) -> Visit:
    """Called on the laptop."""
    return Visit(lab["laptop"].run(*SHOAL, "doctor", "--json", *options, cwd=cwd, limit_s=100))


def hosts_toml(folder: Path, hosts: Mapping[str, str]) -> str:
    path = folder / "hosts.toml"
    path.write_text("".join(f"[hosts.{name}]\n{lines}\n" for name, lines in hosts.items()))
    return str(path)


def test_three_hosts_with_a_slow_link_and_a_name_on_loopback(lab: Lab) -> None:
    visit = doctor(lab, "--hosts", "laptop,desktop,server")
    assert (visit.bad(), visit.done.returncode) == ({}, 0)
    assert visit.found["verdict"] == "warning"
    for name in ("laptop", "desktop", "server"):
        host = visit.host(name)
        cells = dict(host["cells"])
        names = cells.pop("names")
        assert {cell["verdict"] for cell in cells.values()} == {"ok"}, cells
        assert (names["verdict"] == "warning") == (name == "desktop")
        assert abs(host["facts"]["clock"]["offset_s"]) < 1
        assert host["facts"]["address"]["address"] == lab[name].address
        assert host["facts"]["address"]["interface"] == lab[name].interface
    names = visit.host("desktop")["cells"]["names"]
    assert "desktop, stands for 127.0.1.1 there" in names["sentence"]
    assert "10.77.0.2 desktop" in names["remedy"]
    for source, target in [("laptop", "server"), ("server", "laptop"), ("desktop", "server")]:
        way = visit.way(source, target)
        mbit = way["facts"]["measured"]["bytes_per_s"] * 8 / 1e6
        assert 0.75 * RATE_MBIT < mbit < 1.25 * RATE_MBIT
        cell = way["cells"]["bandwidth"]
        assert cell["verdict"] == "warning"
        assert "slow link" in cell["sentence"]
        assert cell["remedy"].startswith("on server: ethtool eth0")
    fast = visit.way("laptop", "desktop")["facts"]["measured"]
    assert fast["bytes_per_s"] * 8 / 1e6 > 2 * RATE_MBIT
    assert fast["latency_s"] < 0.05


def test_a_blocked_port(lab: Lab) -> None:
    lab["desktop"].block_port(PORT)
    visit = doctor(lab, "--hosts", "laptop,desktop", "--port", str(PORT))
    lab["desktop"].unblock_ports()
    bad = visit.bad()
    assert list(bad) == [f"laptop -> desktop, port {PORT}"]
    (text,) = bad.values()
    assert f"laptop cannot connect to port {PORT} of desktop at 10.77.0.2" in text
    assert "a firewall on desktop blocks it" in text
    assert "10.77.0.1" in text.split("|")[1]
    assert visit.done.returncode == 1


def test_a_firewall_that_leaves_ssh_alone(lab: Lab) -> None:
    lab["desktop"].block_port(ALL_PORTS, silently=False)
    visit = doctor(lab, "--hosts", "laptop,desktop")
    lab["desktop"].unblock_ports()
    bad = visit.bad()
    assert (
        "any port of desktop at 10.77.0.2 (the connection was rejected)"
        in bad["laptop -> desktop, port"]
    )
    assert "on desktop: sudo " in bad["laptop -> desktop, port"]


def test_a_stopped_sshd(lab: Lab) -> None:
    """The others are examined all the same."""
    lab["desktop"].stop_sshd()
    visit = doctor(lab, "--hosts", "laptop,desktop,server")
    lab["desktop"].start_sshd()
    bad = visit.bad()
    assert list(bad) == ["desktop, ssh"]
    assert (
        "ssh desktop failed. ssh: connect to host desktop port 22: Connection refused"
        in bad["desktop, ssh"]
    )
    assert "sudo systemctl enable --now ssh" in bad["desktop, ssh"]
    assert visit.way("server", "laptop")["cells"]["port"]["verdict"] == "ok"
    assert visit.way("desktop", "laptop")["cells"]["port"]["verdict"] == "unknown"


def test_pythons_that_cannot_be_used(lab: Lab, tmp_path: Path) -> None:
    """ssh is not to blame."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho libfoo.so: cannot open >&2\nexit 127\n")
    python.chmod(0o755)
    lines = {"desktop": f'python = "{python}"', "server": 'python = "/nope/python"'}
    visit = doctor(lab, "--hosts", hosts_toml(tmp_path, lines))
    bad = visit.bad()
    assert set(bad) == {"desktop, python", "server, python"}
    assert f"{python} ended with exit code 127: libfoo.so: cannot open" in bad["desktop, python"]
    assert "does not exist there. no program there: /nope/python" in bad["server, python"]
    assert visit.host("desktop")["cells"]["ssh"]["verdict"] == "ok"


def test_other_versions(lab: Lab, tmp_path: Path) -> None:
    """Of torch on the desktop, of shoal on the server."""
    for name in ("desktop", "server"):
        (tmp_path / name).mkdir()
        wrapper = tmp_path / f"python-{name}"
        wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / name} exec {sys.executable} "$@"\n')
        wrapper.chmod(0o755)
    metadata = tmp_path / "desktop/torch-1.2.3.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    change = "import shoal.version\nshoal.version.VERSION = '0.0.1'\n"
    (tmp_path / "server/sitecustomize.py").write_text(change)
    lines = {name: f'python = "{tmp_path}/python-{name}"' for name in ("desktop", "server")}
    visit = doctor(lab, "--hosts", hosts_toml(tmp_path, {"laptop": "", **lines}))
    bad = visit.bad()
    assert set(bad) == {"desktop, torch", "server, shoal"}
    assert "it has torch 1.2.3, laptop has " in bad["desktop, torch"]
    assert "-m pip install torch==" in bad["desktop, torch"]
    assert "it has shoal 0.0.1, this host has " in bad["server, shoal"]
    assert f"shoal hosts install server --hosts {tmp_path}" in bad["server, shoal"]


def test_another_clock_and_other_code(lab: Lab, tmp_path: Path) -> None:
    """The desktop's clock is 90 s ahead (as its Python tells: one machine has one clock), the
    server's folder has another file and its runs can have none, and the rest is well."""
    project, other = tmp_path / "project", tmp_path / "other"
    for folder, text in ((project, "steps = 1"), (other, "steps = 2")):
        folder.mkdir()
        (folder / "settings.py").write_text(text)
    ahead = tmp_path / "ahead"
    ahead.mkdir()
    change = "import time\nreal = time.time\ntime.time = lambda: real() + 90\n"
    (ahead / "sitecustomize.py").write_text(change)
    pythons = {
        "desktop": f"PYTHONPATH={ahead} exec",
        "server": f"exec unshare -m sh -c 'mount --bind {other} {project}; exec \"$@\"' sh",
    }
    for name, before in pythons.items():
        wrapper = tmp_path / f"python-{name}"
        wrapper.write_text(f'#!/bin/sh\n{before} {sys.executable} "$@"\n')
        wrapper.chmod(0o755)
    lines = {name: f'python = "{tmp_path}/python-{name}"' for name in pythons}
    lines["server"] += '\nfolder = "/proc/nope"'
    file = hosts_toml(tmp_path, {"laptop": 'folder = "/proc/nope"', **lines})
    bad = doctor(lab, "--no-sync", "--hosts", file, cwd=project).bad()
    assert set(bad) == {"desktop, clock", "server, code", "server, disk"}
    assert re.match(r"its clock is (89|90)\.\d s ahead of this host's", bad["desktop, clock"])
    assert "timedatectl set-ntp true" in bad["desktop, clock"]
    assert f"the files in {project} are not those that are here" in bad["server, code"]
    assert "leave --no-sync out" in bad["server, code"]
    assert "can be made in /proc/nope (No such file or directory)" in bad["server, disk"]


@pytest.mark.parametrize(
    ("hosts", "remedy"),
    [
        (
            {"laptop": "", "desktop": 'interface = "docker0"'},
            'for desktop: interface = "enp3s0"',
        ),
        (
            {"desktop": 'address = "10.78.0.2"', "laptop": ""},
            'for desktop: address = "10.77.0.2" (on enp3s0)',
        ),
    ],
)
def test_a_wrong_interface(lab: Lab, tmp_path: Path, hosts: Mapping[str, str], remedy: str) -> None:
    file = hosts_toml(tmp_path, hosts)
    bad = doctor(lab, "--hosts", file).bad()
    assert "wrong interface: nobody reaches it at 10.78.0.2 (docker0" in bad["desktop, interface"]
    assert bad["desktop, interface"].endswith(f"in {file}, {remedy}")
    assert "while ssh reaches it at 10.77.0.2" in bad["laptop -> desktop, port"]


def test_large_packets_that_are_lost(lab: Lab, tmp_path: Path, start: Start) -> None:
    """An old ssh gets through; a new one has a key exchange of several packets."""
    config = lab["laptop"].home / ".ssh/config"
    old = "Host old\n HostName desktop\n HostKeyAlias desktop\n KexAlgorithms curve25519-sha256\n"
    config.write_text(f"{old}{config.read_text()}")
    lab["desktop"].lose_packets_above(1400)
    new = start(*lab["laptop"].command(*SHOAL, "doctor", "--hosts", "laptop,desktop"))
    visit = doctor(lab, "--hosts", hosts_toml(tmp_path, {"laptop": "", "desktop": 'ssh = "old"'}))
    assert new.end() == 1, new.said
    lab["desktop"].lose_packets_above(1500)
    assert "✗ desktop, ssh: ssh desktop failed. Connection to 10.77.0.2 port 22 timed" in new.out
    assert "MTU" in new.out
    text = visit.bad()["desktop -> laptop, large packets"]
    assert "packets of full size are lost on the way" in text
    assert "The MTU is 1500 on desktop's enp3s0 and 1500 on laptop's eth0" in text
    assert visit.way("desktop", "laptop")["cells"]["latency"]["verdict"] == "ok"
