"""Pipelines against torch's own, `torch.distributed.pipelining`: two ranks, the same cut.

    shoal run --workers 2 --threads 1 tests/parity/test_torch_pipelining.py OUT

This file is also the script that both ranks run. There each way of training begins with the same
weights and takes the same steps, one after the other; OUT/rank-R.json holds what rank R knows of
`way -> {"losses", "sizes", "state"}`. Both cut a batch into as many micro-batches, torch evenly,
shoal with smaller ones at both ends: what is learned must be the same all the same.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.wire.link import Link

if TYPE_CHECKING:
    from warm import Nursery

SCHEDULES = ("1f1b", "gpipe")
TRANSPORTS = ("zmq", "dist")
REDUCTIONS = {"mean": 0.1, "sum": 0.01}
"""Each with its learning rate: a sum is larger than a mean."""
CUT = 3
"""The layer that stage 1 begins with."""
MICROBATCHES = 4
BATCH_SIZE = 16
STEPS = 10
TOLERANCE = 1e-12
LIMIT_S = 60

Batch = tuple[torch.Tensor, torch.Tensor]
Told = dict[str, Any]


# -- on the ranks ----------------------------------------------------------------------------------


def seeded_net() -> nn.Sequential:
    torch.manual_seed(0)
    first = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16)]
    last = [nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    return nn.Sequential(*first, *last).double()


def all_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(BATCH_SIZE, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (BATCH_SIZE,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def sgd(reduction: str) -> dict[str, Any]:
    return {"lr": REDUCTIONS[reduction], "momentum": 0.9, "weight_decay": 0.01}


class Noting:
    """The loss, which also notes how large the micro-batches of a step are."""

    def __init__(self, reduction: str) -> None:
        self.sizes: list[int] = []
        self._loss = functools.partial(F.cross_entropy, reduction=reduction)

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(target))
        return self._loss(output, target)


def told(losses: list[float], loss: Noting, state: dict[str, torch.Tensor]) -> Told:
    return {
        "losses": losses,
        "sizes": loss.sizes[:MICROBATCHES],
        "state": {name: value.tolist() for name, value in state.items()},
    }


def train_torch(crew: shoal.JoinedCrew, schedule: str, reduction: str) -> Told:
    """Each rank knows its own stage's weights; the last one knows the losses."""
    # Here, since it takes seconds, and only the ranks need it.
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    layers = list(seeded_net().named_children())
    mine = layers[:CUT] if crew.rank == 0 else layers[CUT:]
    part = nn.Sequential(OrderedDict(mine))  # under the names that the whole net has for them
    optimizer = torch.optim.SGD(part.parameters(), **sgd(reduction))
    loss = Noting(reduction)
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    stages = kind(
        PipelineStage(part, crew.rank, crew.size, torch.device("cpu")),
        MICROBATCHES,
        loss_fn=loss,
        scale_grads=reduction == "mean",
    )
    losses = []
    for x, y in all_batches():
        optimizer.zero_grad()
        if crew.rank == 0:
            stages.step(x)
        else:
            parts: list[torch.Tensor] = []
            stages.step(target=y, losses=parts)
            losses.append(getattr(torch.stack(parts), reduction)().item())
        optimizer.step()
    return told(losses, loss, part.state_dict())


def train_shoal(crew: shoal.JoinedCrew, schedule: str, reduction: str, link: Link) -> Told:
    loss = Noting(reduction)
    pipe = crew.pipeline(
        seeded_net(),
        schedule=schedule,
        microbatches=MICROBATCHES,
        link=link,
        cuts=[str(CUT)],
        loss=loss,
        reduction=reduction,
        optimizer=torch.optim.SGD,
        **sgd(reduction),
    )
    losses = [pipe.step(x, y).item() for x, y in all_batches()]
    return told(losses, loss, pipe.state_dict())


def main(out: Path) -> None:
    with shoal.join(timeout_s=LIMIT_S / 2) as crew:
        links = {transport: crew.link(transport) for transport in TRANSPORTS}
        found = {"untrained": told([], Noting("mean"), seeded_net().state_dict())}
        for schedule, reduction in itertools.product(SCHEDULES, REDUCTIONS):
            found[f"torch {schedule} {reduction}"] = train_torch(crew, schedule, reduction)
            for transport, link in links.items():
                name = f"shoal {schedule} {reduction} {transport}"
                found[name] = train_shoal(crew, schedule, reduction, link)
        (out / f"rank-{crew.rank}.json").write_text(json.dumps(found))


# -- in the test -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> list[dict[str, Told]]:
    """By rank."""
    from processes import Ranks  # here, since the ranks do not know it

    out = tmp_path_factory.mktemp("torch-pipelining")
    crew = Ranks(nursery, out, 2, __file__, str(out))
    assert crew.end(LIMIT_S) == [0, 0], crew.said
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2)]


def assert_close(actual: list[Any], expected: list[Any], what: str) -> None:
    """Relative to the largest of all the numbers: what is near 0 is the sum of what is not."""
    one, other = (torch.tensor(each, dtype=torch.float64) for each in (actual, expected))
    assert one.shape == other.shape, f"{what}: {one.shape} for {other.shape}"
    difference = ((one - other).abs().max() / other.abs().max()).item()
    assert difference <= TOLERANCE, f"{what} by {difference:.1e}"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_same_as_torch(
    results: list[dict[str, Told]], schedule: str, reduction: str, transport: str
) -> None:
    ours = [each[f"shoal {schedule} {reduction} {transport}"] for each in results]
    torchs = [each[f"torch {schedule} {reduction}"] for each in results]

    losses = torchs[1]["losses"]
    assert len(losses) == STEPS
    assert ours[0]["losses"] == ours[1]["losses"]
    assert_close(ours[0]["losses"], losses, "losses")

    weights = {**torchs[0]["state"], **torchs[1]["state"]}
    assert list(ours[0]["state"]) == list(weights) == list(seeded_net().state_dict())
    for name, value in weights.items():
        assert value != results[0]["untrained"]["state"][name], f"torch has not trained {name}"
        assert_close(ours[0]["state"][name], value, name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_cases_differ_in_how_they_cut_a_batch(
    results: list[dict[str, Told]], schedule: str
) -> None:
    """Else they would not show that parts of a batch are weighed by their size."""
    sizes = {name: each["sizes"] for name, each in results[1].items() if schedule in name}
    even = [BATCH_SIZE // MICROBATCHES] * MICROBATCHES
    for name, cut in sizes.items():
        assert sum(cut) == BATCH_SIZE, name
        assert (cut == even) == name.startswith("torch"), f"{name}: {cut}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
