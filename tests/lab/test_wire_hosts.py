"""Links between two hosts: closed without keys, open to those who are authorized, and no others."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import Host, two_hosts, why_not
from processes import ENOUGH_S, SHOAL, Running, clean_environment

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

PLACE = "tcp://10.77.0.1:23457"
HUNG_S = 3.0

HEAD = f"""
import sys, time, torch, shoal
LARGE = torch.arange(2**20)
with shoal.join({PLACE!r}, rank=int(sys.argv[1]), world_size=2, timeout_s=30) as crew:
    other = 1 - crew.rank
"""
TALK = """
    link = crew.link("zmq", timeout_s=30)
    link.send(["hello", LARGE], to=other)
    word, tensor = link.recv(other)
    print(word, torch.equal(tensor, LARGE))
"""

Talk = Callable[..., list[Running]]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Path, Path]:
    """Where each host has its settings: they share the file system, unlike two machines."""
    made = tmp_path / "laptop", tmp_path / "desktop"
    for home in made:
        home.mkdir()
    return made


@pytest.fixture
def talk(hosts: tuple[Host, Host], homes: tuple[Path, Path], start_warm, tmp_path: Path) -> Talk:
    """Starts a script on both hosts."""

    def begin(body: str) -> list[Running]:
        script = tmp_path / "script.py"
        script.write_text(HEAD + body)
        return [
            start_warm(
                SHOAL[0],
                str(script),
                str(rank),
                host=hosts[rank],
                XDG_CONFIG_HOME=str(homes[rank]),
                OMP_NUM_THREADS="1",
                PYTHONUNBUFFERED="1",
                TORCH_CPP_LOG_LEVEL="ERROR",
            )
            for rank in range(2)
        ]

    return begin


def keygen(host: Host, home: Path) -> str:
    """The line that `shoal keygen` prints for the other host."""
    done = subprocess.run(
        host.command(*SHOAL, "keygen"),
        env=clean_environment(XDG_CONFIG_HOME=str(home)),
        capture_output=True,
        text=True,
        timeout=ENOUGH_S,
        check=True,
    )
    line = (home / "shoal" / "key.pub").read_text()
    assert line.strip() in done.stdout
    return line


def authorize(home: Path, line: str) -> None:
    with (home / "shoal" / "authorized_keys").open("a") as file:
        file.write(line)


def both_fail(ranks: list[Running]) -> list[str]:
    codes = [rank.end() for rank in ranks]
    assert 0 not in codes, ranks[0].said + ranks[1].said
    return [rank.err for rank in ranks]


def both_talk(ranks: list[Running]) -> None:
    assert [rank.end() for rank in ranks] == [0, 0], ranks[0].said + ranks[1].said
    assert [rank.out for rank in ranks] == ["hello True\n"] * 2


def test_without_keys_the_link_stays_closed(talk: Talk) -> None:
    """And says what to do, on both hosts."""
    for said in both_fail(talk(TALK)):
        assert "shoal keygen" in said
        assert "there is no key at" in said or "without keys" in said
        assert "insecure" in said


def test_a_key_that_is_not_authorized_is_refused_with_the_line_to_append(
    talk: Talk, hosts: tuple[Host, Host], homes: tuple[Path, Path]
) -> None:
    """The desktop knows the laptop; the laptop does not know the desktop yet. Then it does, and
    with keys that each has of the other they talk."""
    lines = [keygen(host, home) for host, home in zip(hosts, homes, strict=True)]
    authorize(homes[1], lines[0])
    path = homes[0] / "shoal" / "authorized_keys"
    for said in both_fail(talk(TALK)):
        assert "rank 0 does not know the key of rank 1 (desktop" in said
        assert f"append this line to {path} on rank 0's host" in said
        assert lines[1].split()[0] in said
    authorize(homes[0], lines[1])
    both_talk(talk(TALK))


def test_insecure_and_dist_links_go_without_keys_until_a_host_is_cut_off(
    talk: Talk, hosts: tuple[Host, Host]
) -> None:
    """Nothing tells of that but silence: no connection is closed. It is named all the same."""
    ranks = talk(f"""
    links = [
        crew.link("zmq", insecure=True, hung_s={HUNG_S}, timeout_s=40),
        crew.link("dist", hung_s={HUNG_S}, timeout_s=40),
    ]
    for link in links:
        link.send(["hello", LARGE], to=other)
        word, tensor = link.recv(other)
        print(word, torch.equal(tensor, LARGE))
    print("linked")
    for link in links:
        begun = time.monotonic()
        try:
            link.recv(other)
        except shoal.PeerLost as lost:
            print("lost", time.monotonic() - begun < {HUNG_S} + 10, lost)
    raise shoal.PeerLost("on purpose")
""")
    for rank in ranks:
        rank.until_says("linked")
    hosts[1].cut_off()
    for rank, other in zip(ranks, ("rank 1 (desktop", "rank 0 (laptop"), strict=True):
        assert rank.end() == 1, rank.said
        lines = rank.out.splitlines()
        assert lines[:3] == ["hello True", "hello True", "linked"], rank.said
        assert len(lines) == 5, rank.said
        for line in lines[3:]:
            assert line.startswith("lost True ")
            assert other in line


def test_what_takes_longer_to_come_than_a_sign_of_life_may_is_one(
    talk: Talk, hosts: tuple[Host, Host]
) -> None:
    """Over a slow cable a piece of gloo's took longer than `hung_s`, its sender's signs of life had
    to wait behind it, and a rank that lived was called frozen."""
    slow = ["tbf", "rate", "10mbit", "burst", "64kb", "latency", "100ms"]
    for host in hosts:
        command = host.command("tc", "qdisc", "add", "dev", host.interface, "root", *slow)
        subprocess.run(command, check=True, timeout=ENOUGH_S)
    ranks = talk("""
    link = crew.link("dist", hung_s=1.0, timeout_s=60)
    piece = torch.arange(2**19)  # 4 MiB: 3.4 s
    for number in range(2):
        if crew.rank == 0:
            link.send(piece + number, to=1)
        else:
            print(torch.equal(link.recv(0), piece + number))
""")
    assert [rank.end() for rank in ranks] == [0, 0], ranks[0].said + ranks[1].said
    assert ranks[1].out == "True\nTrue\n"
