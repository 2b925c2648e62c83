"""One crew on two hosts that share nothing but a cable (and, for file://, a folder)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import Host, listening_addresses, two_hosts, why_not
from processes import SHOAL, Running

TRAIN = ["train", "--model", "residual-mlp", "--data", "sine", "--epochs", "1"]
TRAIN += ["--batch-size", "1024", "--threads", "1"]
PLACE = "tcp://10.77.0.1:23456"

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


Train = Callable[..., Running]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture
def train(hosts: tuple[Host, Host], start_warm: Callable[..., Running], tmp_path: Path) -> Train:
    """Starts rank 0 on the laptop, rank 1 on the desktop."""

    def begin(rank: int, init: str, *options: str, timeout_s: float = 30) -> Running:
        meeting = ["--init", init, "--rank", str(rank), "--world-size", "2"]
        fixed = ["--timeout", f"{timeout_s:g}", "--out", str(tmp_path / "runs")]
        return start_warm(*SHOAL, *TRAIN, *meeting, *fixed, *options, host=hosts[rank])

    return begin


def why(rank: Running) -> str:
    """What a rank said that failed to meet."""
    assert rank.end() == 1, rank.said
    assert "Traceback" not in rank.err
    return rank.err


def test_by_tcp(train: Train) -> None:
    leader, other = train(0, PLACE, "--json"), train(1, PLACE)
    leader.until(lambda: "10.77.0.1" in listening_addresses(leader.process.pid))
    assert listening_addresses(leader.process.pid) <= {"10.77.0.1"}
    assert (leader.end(), other.end()) == (0, 0), leader.err + other.err
    summary = json.loads(leader.out)
    assert summary["hosts"] == ["laptop", "desktop"]
    assert summary["layout"]["replicas"] == 2
    assert "2 replicas, sync all-reduce on desktop, laptop" in other.out


def test_by_a_shared_file(train: Train, tmp_path: Path) -> None:
    """Neither host has a default route, so that neither route nor leader tells the interface."""
    place = f"file://{tmp_path}/meeting"
    leader, other = train(0, place, "--json"), train(1, place)
    assert (leader.end(), other.end()) == (0, 0), leader.err + other.err
    assert json.loads(leader.out)["hosts"] == ["laptop", "desktop"]
    assert not (tmp_path / "meeting").exists()


def test_gradients_over_zmq(train: Train, tmp_path: Path) -> None:
    """Closed without keys; with each other's keys the same as one process."""
    lines = []
    options = []
    for rank in range(2):
        key = tmp_path / f"key{rank}"
        done = subprocess.run(
            [*SHOAL, "keygen", "--key", str(key)], capture_output=True, timeout=30, check=True
        )
        lines.append(key.with_suffix(".pub").read_text())
        assert lines[-1].split()[0] in done.stdout.decode()
        options.append(["--transport", "zmq", "--key", str(key)])
    for rank in range(2):
        trusted = tmp_path / f"authorized{rank}"
        trusted.write_text(lines[1 - rank])
        trusted.chmod(0o600)
        options[rank] += ["--authorized-keys", str(trusted)]
    ranks = [train(rank, PLACE, "--verify", *options[rank]) for rank in range(2)]
    assert [rank.end() for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    assert "sync ring over zmq" in ranks[0].out
    assert "pass" in ranks[0].out

    options[1][-1] = str(tmp_path / "nobody")
    ranks = [train(rank, PLACE, "--verify", *options[rank]) for rank in range(2)]
    for rank in ranks:
        assert rank.end() != 0
        assert "rank 1 does not know the key of rank 0 (laptop" in rank.err
        assert lines[0].split()[0] in rank.err
        assert str(tmp_path / "nobody") in rank.err


def test_an_interface_that_one_host_does_not_have(train: Train) -> None:
    leader = train(0, PLACE, "--interface", "eth0", timeout_s=3)
    other = train(1, PLACE, "--interface", "wlan0")
    assert other.end() == 2
    assert "--interface wlan0: there is none of this name" in other.err
    assert "eth0 (10.77.0.2), lo" in other.err
    assert "still waits for rank 1 of 2" in why(leader)


def test_an_interface_that_does_not_lead_to_the_other_host(train: Train, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/meeting"
    ranks = [train(0, place), train(1, place, "--interface", "lo")]
    for rank in ranks:
        reason = why(rank)
        assert "spans several machines" in reason
        assert "rank 1 (desktop" in reason
        assert "would use 127.0.0.1" in reason
    assert not (tmp_path / "meeting").exists()


def test_an_interface_other_than_the_leaders_address(train: Train) -> None:
    reason = why(train(0, PLACE, "--interface", "lo"))
    assert f"--interface lo and {PLACE} disagree on laptop: 10.77.0.1 belongs to eth0" in reason


def test_a_host_that_is_cut_off(train: Train, hosts: tuple[Host, Host]) -> None:
    hosts[1].cut_off()
    reason = why(train(1, PLACE, timeout_s=3))
    assert "Rank 1 on desktop did not reach rank 0 at 10.77.0.1:23456 within 3 s" in reason
    assert "Network is unreachable" in reason
