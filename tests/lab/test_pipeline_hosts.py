"""One model over three hosts, each with a key of its own.

laptop 10.77.0.1 ──┐
desktop 10.77.0.2 ─┼─ switch        each sees the two others and nothing else
server 10.77.0.3 ──┘
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import Host, _ip, unique_name, why_not
from processes import SHOAL, Running, until
from test_wire_hosts import authorize, keygen

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

PLACE = "tcp://10.77.0.1:23458"
NAMES = ["laptop", "desktop", "server"]
TRAIN = ["train", "--stages", "3", "--transport", "zmq", "--model", "residual-mlp"]
TRAIN += ["--data", "sine", "--epochs", "1", "--batch-size", "1024", "--threads", "1"]

SCRIPT = """
import argparse, copy, json
import torch
import torch.nn.functional as F
from torch import nn
import shoal

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
SIZES = [13, 8, 16, 3, 1, 12]


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.early, self.middle = nn.Linear(6, 16), nn.Linear(16, 16)
        self.late, self.last = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        early = torch.tanh(self.early(x))
        middle = torch.tanh(self.middle(early) * early) + early
        return self.last(torch.tanh(self.late(middle)) * early + middle)


def batches(dtype):
    generator = torch.Generator().manual_seed(7)
    for size in SIZES * 2:
        x = torch.randn(size, 6, generator=generator).to(dtype)
        yield x, torch.randint(0, 3, (size,), generator=generator)


def train_alone(net, dtype):
    optimizer, losses = torch.optim.SGD(net.parameters(), **SGD), []
    for x, y in batches(dtype):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def told(losses, state):
    return {"losses": losses, "state": {name: value.tolist() for name, value in state.items()}}


parser = argparse.ArgumentParser()
parser.add_argument("--init")
parser.add_argument("--rank", type=int)
parser.add_argument("--world-size", type=int)
with shoal.join(**vars(parser.parse_args()), timeout_s=30) as crew:
    said = {}
    for schedule, microbatches, dtype in (
        ("sequential", 1, torch.float32),
        ("1f1b", 4, torch.float64),
    ):
        torch.manual_seed(crew.rank)  # rank 0's weights must win
        net = Skipping().to(dtype)
        own = copy.deepcopy(net)
        pipe = crew.pipeline(
            net, stages=3, cuts=["middle", "late"], transport="zmq", schedule=schedule,
            microbatches=microbatches, loss=F.cross_entropy, optimizer=torch.optim.SGD, **SGD,
        )
        losses = [pipe.step(x, y).item() for x, y in batches(dtype)]
        said[schedule] = told(losses, pipe.state_dict())
        said[schedule]["skips"] = [port.value for port in pipe.routes.between(0, 2)]
        said[schedule]["alone"] = told(train_alone(own, dtype), own.state_dict())
    print(json.dumps(said))
"""

Begin = Callable[..., Running]


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Gone again afterwards, whatever happens."""
    unique = unique_name()
    found = [Host(f"{unique}-{n}", name, f"10.77.0.{n}") for n, name in enumerate(NAMES, start=1)]
    switch = f"{unique}-switch"
    with ExitStack() as stack:
        for namespace in (switch, *(host.namespace for host in found)):
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "delete", namespace)  # takes its interfaces along
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in found:
            inside = ("-n", host.namespace)
            cable = ["type", "veth", "peer", "name", host.name, "netns", switch]
            _ip(*inside, "link", "add", host.interface, *cable)
            _ip("-n", switch, "link", "set", host.name, "master", "bridge", "up")
            _ip(*inside, "address", "add", f"{host.address}/24", "dev", host.interface)
            _ip(*inside, "link", "set", host.interface, "up")
            _ip(*inside, "link", "set", "lo", "up")
        for host in found:
            show = ("-n", host.namespace, "-o", "link", "show", host.interface)
            until(lambda show=show: "state UP" in _ip(*show), f"{host.name}'s interface is up")  # type: ignore[misc]
        yield found


@pytest.fixture(scope="module")
def homes(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Where each host has its key, and the public lines of the two others."""
    made = [tmp_path_factory.mktemp(host.name) for host in hosts]
    lines = [keygen(host, home) for host, home in zip(hosts, made, strict=True)]
    for rank, home in enumerate(made):
        for other in {0, 1, 2} - {rank}:
            authorize(home, lines[other])
    return made


@pytest.fixture
def begin(hosts: list[Host], homes: list[Path], start_warm: Callable[..., Running]) -> Begin:
    """Starts one rank by hand, on the host of the same number."""

    def starting(rank: int, *argv: str) -> Running:
        meeting = ["--init", PLACE, "--rank", str(rank), "--world-size", "3"]
        return start_warm(
            *argv,
            *meeting,
            host=hosts[rank],
            XDG_CONFIG_HOME=str(homes[rank]),
            OMP_NUM_THREADS="1",
            TORCH_CPP_LOG_LEVEL="ERROR",
        )

    return starting


def all_end_well(ranks: list[Running]) -> None:
    codes = [rank.end() for rank in ranks]
    assert codes == [0, 0, 0], "\n".join(rank.said for rank in ranks)


def tensors(told: dict[str, Any]) -> dict[str, torch.Tensor]:
    numbers = {"losses": told["losses"], **told["state"]}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


def test_a_skip_past_a_host_is_trained_as_in_one_process(begin: Begin, tmp_path: Path) -> None:
    """Bit by bit in turns; with micro-batches but for the order of summation."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ranks = [begin(rank, SHOAL[0], str(script)) for rank in range(3)]
    all_end_well(ranks)
    told = [json.loads(rank.out) for rank in ranks]
    for schedule, relative in (("sequential", 0.0), ("1f1b", 1e-11)):
        whole, *others = [each[schedule] for each in told]
        alone = whole["alone"]
        assert whole["skips"] == ["tanh"], "the case shows nothing: nothing skips the desktop"
        torch.testing.assert_close(
            tensors(whole), tensors(alone), rtol=relative, atol=relative / 100
        )
        for other in others:
            assert other["losses"] == whole["losses"]
            assert other["state"] == {}
            assert other["alone"]["state"] != alone["state"], "the case shows nothing: equal seeds"


def test_the_summary_shows_the_hosts(begin: Begin, tmp_path: Path) -> None:
    """Cut where a profile over the three hosts says."""
    ranks = [
        begin(rank, *SHOAL, *TRAIN, "--timeout", "30", "--out", str(tmp_path / "runs"))
        for rank in range(3)
    ]
    all_end_well(ranks)
    for rank in ranks:
        assert "3 stages over zmq, 1f1b × 6 micro-batches on desktop, laptop, server" in rank.out
        _, table = rank.out.split("waiting\n")
        rows = [line.split() for line in table.splitlines()[:3]]
        assert [row[:2] for row in rows] == [["0", "laptop"], ["1", "desktop"], ["2", "server"]]
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["hosts"] == NAMES
    assert [stage["hosts"] for stage in summary["stages"]] == [[name] for name in NAMES]
    modules = [name for stage in summary["stages"] for name in stage["modules"]]
    assert [name for name in modules if name.startswith("fc")] == [
        "fc1",
        "fc2",
        "fc3",
        "fc4",
        "fc5",
    ]
    assert sum(stage["parameters"] for stage in summary["stages"]) == summary["parameters"]


def test_a_host_that_cuts_elsewhere_is_named_before_training(begin: Begin, tmp_path: Path) -> None:
    def train(rank: int, cuts: str) -> Running:
        out = ["--timeout", "30", "--out", str(tmp_path / "runs")]
        return begin(rank, *SHOAL, *TRAIN, "--cut", cuts, *out)

    ranks = [train(0, "fc3,fc4"), train(1, "fc3,fc4")]
    ranks[1].until_says("waiting for rank 2 of 3")  # so the leader is not gone when it comes
    ranks.append(train(2, "fc3,fc5"))
    for rank in ranks:
        assert rank.end() == 1, rank.said
        assert "Traceback" not in rank.err
        for words in ("rank 2 (server", "--cut", "fc4", "fc5", "the same settings"):
            assert words in rank.err
        assert "epoch" not in rank.out
    assert not (tmp_path / "runs").exists()
