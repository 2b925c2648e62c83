"""One crew on two hosts that share nothing but a cable (and, for file://, a folder)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import Host, listening_addresses, two_hosts, why_not

SHOAL = str(Path(sys.executable).with_name("shoal"))
TRAIN = ["train", "--model", "residual-mlp", "--data", "sine", "--epochs", "1"]
TRAIN += ["--batch-size", "1024", "--threads", "1"]
ENOUGH_S = 60.0
PLACE = "tcp://10.77.0.1:23456"

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


class Rank:
    """`shoal train` on one host; what it says goes to files."""

    def __init__(self, folder: Path, argv: list[str]) -> None:
        self._out, self._err = folder / "out", folder / "err"
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(argv, cwd=folder, env=clean, stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def end(self) -> int:
        return self.process.wait(ENOUGH_S)

    def until_waiting(self) -> None:
        deadline = time.monotonic() + ENOUGH_S
        while "waiting for" not in self.out + self.err:
            assert self.process.poll() is None, self.out + self.err
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def reason(self) -> str:
        assert self.end() == 1, self.out + self.err
        assert "Traceback" not in self.err
        return self.err


Start = Callable[..., Rank]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture
def start(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[Start]:
    """Starts rank 0 on the laptop, rank 1 on the desktop; kills what is left in the end."""
    started: list[Rank] = []

    def begin(rank: int, init: str, *options: str, timeout_s: float = 30) -> Rank:
        folder = tmp_path / f"process{len(started)}"
        folder.mkdir()
        meeting = ["--init", init, "--rank", str(rank), "--world-size", "2"]
        argv = [*TRAIN, *meeting, "--timeout", f"{timeout_s:g}", "--out", str(folder), *options]
        started.append(Rank(folder, hosts[rank].command(SHOAL, *argv)))
        return started[-1]

    yield begin
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.wait(10)


def test_by_tcp(start: Start) -> None:
    leader = start(0, PLACE, "--json")
    leader.until_waiting()
    assert listening_addresses(leader.process.pid) == {"10.77.0.1"}
    other = start(1, PLACE)
    assert (leader.end(), other.end()) == (0, 0), leader.err + other.err
    summary = json.loads(leader.out)
    assert summary["hosts"] == ["laptop", "desktop"]
    assert summary["layout"]["replicas"] == 2
    assert "2 replicas, sync all-reduce on desktop, laptop" in other.out


def test_by_a_shared_file(start: Start, tmp_path: Path) -> None:
    """Neither host has a default route, so that neither route nor leader tells the interface."""
    place = f"file://{tmp_path}/meeting"
    leader, other = start(0, place, "--json"), start(1, place)
    assert (leader.end(), other.end()) == (0, 0), leader.err + other.err
    assert json.loads(leader.out)["hosts"] == ["laptop", "desktop"]
    assert not (tmp_path / "meeting").exists()


def test_an_interface_that_one_host_does_not_have(start: Start) -> None:
    leader = start(0, PLACE, "--interface", "eth0", timeout_s=5)
    other = start(1, PLACE, "--interface", "wlan0")
    assert "no interface 'wlan0' on desktop. It has: eth0 (10.77.0.2), lo" in other.reason()
    assert "still waits for rank 1 of 2" in leader.reason()


def test_an_interface_that_does_not_lead_to_the_other_host(start: Start, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/meeting"
    ranks = [start(0, place), start(1, place, "--interface", "lo")]
    for rank in ranks:
        reason = rank.reason()
        assert "spans several machines" in reason
        assert "rank 1 (desktop" in reason
        assert "would use 127.0.0.1" in reason
    assert not (tmp_path / "meeting").exists()


def test_an_interface_other_than_the_leaders_address(start: Start) -> None:
    reason = start(0, PLACE, "--interface", "lo").reason()
    assert f"--interface lo and {PLACE} disagree on laptop: 10.77.0.1 belongs to eth0" in reason


def test_a_host_that_is_cut_off(start: Start, hosts: tuple[Host, Host]) -> None:
    hosts[1].cut_off()
    reason = start(1, PLACE, timeout_s=3).reason()
    assert "Rank 1 on desktop did not reach rank 0 at 10.77.0.1:23456 within 3 s" in reason
    assert "Network is unreachable" in reason
