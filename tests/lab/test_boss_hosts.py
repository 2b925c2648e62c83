"""A boss on one host and workers on two: closed without keys, open to those who are authorized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import Host, two_hosts, why_not
from processes import SHOAL, Running

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

BOSS = "10.77.0.1:1024"
SCRIPT = """
import copy, pathlib, sys, time
import torch, shoal
from torch import nn

with shoal.Boss("tcp://0.0.0.0:1024", 2, wait_s=60, timeout_s=30) as boss:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model = boss.place(copy.deepcopy(plain), cuts=["2"])
    optimizers = boss.optimizer(torch.optim.Adam, lr=0.1), torch.optim.Adam(plain.parameters(), 0.1)
    for _ in range(5):
        for each, optimizer in zip((model, plain), optimizers):
            loss = each(torch.ones(4, 6)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    state = model.state_dict()
    print("same", all(torch.equal(state[n], t) for n, t in plain.state_dict().items()), flush=True)
    print("on", *sorted(worker.host for worker in boss.status().workers), flush=True)
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.05)
"""

Begin = Callable[..., Running]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture
def begin(start_warm, tmp_path: Path) -> Begin:
    """Starts something on a host, as a user whose settings are in a folder of that name."""

    def run(host: Host, home: str, *argv: str) -> Running:
        (tmp_path / home).mkdir(exist_ok=True)
        running: Running = start_warm(
            *argv, host=host, XDG_CONFIG_HOME=str(tmp_path / home), OMP_NUM_THREADS="1"
        )
        return running

    return run


def worker(*options: str) -> tuple[str, ...]:
    return (*SHOAL, "worker", "--boss", BOSS, *options)


@pytest.fixture
def script(tmp_path: Path) -> tuple[str, ...]:
    """Trains, and ends when there is a file "enough"."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return SHOAL[0], str(file), str(tmp_path / "enough")


def test_beyond_loopback_neither_goes_without_keys(
    begin: Begin, hosts: tuple[Host, Host], script: tuple[str, ...]
) -> None:
    """And both say what to do."""
    runs = [begin(hosts[0], "laptop", *script), begin(hosts[1], "desktop", *worker())]
    for run in runs:
        assert run.end() in (1, 2)
        assert "shoal keygen" in run.err
        assert "there is no key at" in run.err
    assert "Traceback" not in runs[1].err


def test_only_who_is_authorized_comes_in(
    begin: Begin, hosts: tuple[Host, Host], script: tuple[str, ...], tmp_path: Path
) -> None:
    """Two workers, one on each host, train; a third is not authorized, a fourth pins another boss:
    both wait for ever, and are told why. The boss tells of each in one line."""
    laptop, desktop = hosts
    homes = {"laptop": laptop, "desktop": desktop, "stranger": desktop}
    for run in [begin(host, home, *SHOAL, "keygen") for home, host in homes.items()]:
        assert run.end() == 0, run.said
    lines = {home: (tmp_path / home / "shoal" / "key.pub").read_text() for home in homes}
    for home, known in (("laptop", "desktop"), ("desktop", "laptop"), ("stranger", "laptop")):
        (tmp_path / home / "shoal" / "authorized_keys").write_text(lines[known])
    own = lines["laptop"].split()[0]

    boss = begin(laptop, "laptop", *script)
    stranger = begin(desktop, "stranger", *worker())
    mistaken = begin(desktop, "desktop", *worker("--boss-key", lines["stranger"].split()[0]))
    good = [
        begin(laptop, "laptop", *worker("--boss-key", own)),
        begin(desktop, "desktop", *worker()),
    ]
    boss.until_says("on desktop laptop")
    for refused in (stranger, mistaken):
        refused.until_says("it refused this host's key, or has another key than the one given")
    boss.until(lambda: boss.err.count("refused a caller") >= 2)  # they come again and again
    (tmp_path / "enough").touch()
    assert boss.end() == 0, boss.said
    assert boss.out.splitlines() == ["same True", "on desktop laptop"]
    told = [line for line in boss.err.splitlines() if "refused a caller" in line]
    assert len({line.rpartition(": ")[2] for line in told}) == len(told) == 2, boss.err
    assert any(lines["stranger"].split()[0] in line for line in told)
    for each in good:
        each.until_says("has left")
        assert each.process.poll() is None
    for each in (stranger, mistaken):
        assert "works for" not in each.out
    assert all("works for the boss (laptop)" in each.out for each in good)
