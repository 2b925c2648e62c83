"""The loss of a step, as last stages tell it and all ranks hear it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.layout import Layout
from shoal.pipeline.shared_loss import SharedLoss
from shoal.wire.memory import MemoryLink


def shared(layout: Layout, reduction: str) -> list[SharedLoss]:
    """Of every rank."""
    size = layout.replicas * layout.stages
    made = []
    for rank, link in enumerate(MemoryLink.crew(size)):
        crew: Any = SimpleNamespace(rank=rank, size=size)
        made.append(SharedLoss(crew, link, layout, reduction))
    return made


def test_one_replica_is_heard_as_it_was_told() -> None:
    first, last = shared(Layout(replicas=1, stages=2), "mean")
    last.tell(1, torch.tensor(0.1), 5)
    last.tell(2, torch.tensor(0.2), 5)  # the first stage may still be at the step before
    assert [first.hear(step).item() for step in (1, 2)] == [
        torch.tensor(each).item() for each in (0.1, 0.2)
    ]
    assert last.hear(2).item() == torch.tensor(0.2).item()


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 2.5), ("sum", 4.0)])
def test_replicas_count_by_their_samples(reduction: str, expected: float) -> None:
    ranks = shared(Layout(replicas=2, stages=2), reduction)
    ranks[1].tell(1, torch.tensor(1.0), 1)
    ranks[3].tell(1, torch.tensor(3.0), 3)
    assert [rank.hear(1).item() for rank in ranks] == [expected] * 4


def test_a_replica_without_samples_has_no_part_in_a_sum() -> None:
    ranks = shared(Layout(replicas=2, stages=1), "sum")
    ranks[0].tell(1, torch.tensor(1.0), 2)
    ranks[1].tell(1, torch.tensor(float("nan")), 0)
    assert [rank.hear(1).item() for rank in ranks] == [1.0, 1.0]
