"""The loader: ranks together see every global batch, exactly once and in the promised order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from shoal.errors import SettingsError
from shoal.layout import Share
from shoal.train.loader import Loader
from shoal.train.order import sample_order

NUM_SAMPLES = 23
BATCH = 6  # 23 = 3 × 6 + 5: with 4 and 5 ranks shares differ, and the last batch is short


@dataclass
class OneRank:
    """All that a loader asks of a crew."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    share: Share | None = None


class Plain(Dataset[tuple[torch.Tensor, int]]):
    """Sample by sample."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index)]), index


class Taking(Plain):
    """Batch by batch."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise AssertionError("take() is there to be used")

    def take(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return indices[:, None].float(), indices


def tensors() -> TensorDataset:
    numbers = torch.arange(NUM_SAMPLES)
    return TensorDataset(numbers[:, None].float(), numbers)


DATASETS = {"tensors": tensors, "plain": Plain, "taking": Taking}


def samples(loader: Loader) -> list[list[int]]:
    """The numbers of the samples in each batch of one epoch."""
    return [y.tolist() for _, y in loader]


def global_batches(num_samples: int, batch: int, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    order = sample_order(num_samples, seed, epoch).tolist()
    return [order[start : start + batch] for start in range(0, num_samples, batch)]


def seen_by_all(dataset: Dataset[Any], size: int, batch_size: int, epoch: int) -> list[list[int]]:
    """What the ranks hold of each global batch, one after the other, stand-ins left out."""
    loaders = []
    for rank in range(size):
        crew = OneRank(rank, size)
        loader = Loader(dataset, crew, batch_size=batch_size)  # type: ignore[arg-type]
        loader.epoch = epoch
        loaders.append((crew, iter(loader)))
    batches = []
    for _ in range(-(-NUM_SAMPLES // batch_size)):
        batch: list[int] = []
        for crew, loader_iter in loaders:
            x, y = next(loader_iter)
            assert x.flatten().tolist() == y.tolist()
            assert crew.share is not None
            assert len(y) == max(1, crew.share.size), "no padding"
            batch += y.tolist()[: crew.share.size]
        batches.append(batch)
    assert all(next(loader_iter, None) is None for _, loader_iter in loaders)
    return batches


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_ranks_together_see_each_global_batch_once(kind: str, size: int) -> None:
    for epoch in range(2):
        seen = seen_by_all(DATASETS[kind](), size, BATCH, epoch)
        assert seen == global_batches(NUM_SAMPLES, BATCH, epoch=epoch)
        assert sorted(chain.from_iterable(seen)) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("kind", DATASETS)
def test_a_rank_without_samples_gets_one_of_weight_zero(kind: str) -> None:
    """23 = 2 × 11 + 1: in the last batch only rank 0 has a sample."""
    crew = OneRank(rank=4, size=5)
    loader = Loader(DATASETS[kind](), crew, batch_size=11)  # type: ignore[arg-type]
    shares, sizes = [], []
    for _, y in loader:
        assert crew.share is not None
        shares.append((crew.share.size, crew.share.total))
        sizes.append(len(y))
    assert shares == [(2, 11), (2, 11), (0, 1)]
    assert sizes == [2, 2, 1]


def test_every_for_is_the_next_epoch_in_a_new_order() -> None:
    loader = Loader(Taking(), OneRank(), batch_size=BATCH, seed=3)  # type: ignore[arg-type]
    epochs = [samples(loader) for _ in range(3)]
    assert epochs == [global_batches(NUM_SAMPLES, BATCH, 3, epoch) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert loader.epoch == 3
    loader.epoch = 1  # a run that is taken up again goes on where it was
    assert samples(loader) == epochs[1]


def test_unshuffled_is_in_the_order_of_the_dataset() -> None:
    crew: Any = OneRank()
    loader = Loader(Taking(), crew, batch_size=BATCH, shuffle=False)
    assert list(chain.from_iterable(samples(loader))) == list(range(NUM_SAMPLES))
    assert samples(loader) == samples(loader)


def test_the_share_is_known_while_a_batch_is_in_hand_and_not_after() -> None:
    crew: Any = OneRank(rank=1, size=4)
    loader = Loader(Plain(), crew, batch_size=BATCH)
    assert crew.share is None
    for _ in loader:
        assert crew.share is not None
    assert crew.share is None
    for _ in loader:
        break
    assert crew.share is None
    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way(loader)
    assert crew.share is None


def fail_half_way(loader: Loader) -> None:
    for _ in loader:
        raise RuntimeError("half way")


@pytest.mark.parametrize(("batch_size", "expected"), [(1, 23), (6, 4), (23, 1), (24, 1), (22, 2)])
def test_its_length_is_the_number_of_steps(batch_size: int, expected: int) -> None:
    crew: Any = OneRank()
    loader = Loader(Taking(), crew, batch_size=batch_size)
    assert len(loader) == expected
    assert len(samples(loader)) == expected


def test_worker_processes_give_the_same_batches() -> None:
    crew: Any = OneRank(rank=1, size=3)
    here = samples(Loader(Plain(), crew, batch_size=BATCH))
    assert samples(Loader(Plain(), crew, batch_size=BATCH, num_workers=1)) == here


@pytest.mark.parametrize("kind", ["tensors", "plain"])
def test_collate_fn_is_used(kind: str) -> None:
    def collate(batch: list[tuple[torch.Tensor, Any]]) -> list[int]:
        return [int(x) for x, _ in batch]

    crew: Any = OneRank()
    loader = Loader(DATASETS[kind](), crew, batch_size=BATCH, collate_fn=collate)
    assert list(loader) == global_batches(NUM_SAMPLES, BATCH)


@pytest.mark.parametrize("kind", DATASETS)
def test_the_models_chance_is_left_alone(kind: str) -> None:
    """Dropout must not depend on how the data is read."""
    crew: Any = OneRank()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(Loader(DATASETS[kind](), crew, batch_size=BATCH))
    assert torch.equal(torch.get_rng_state(), before)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10**9))


def test_what_cannot_be_shared_out_is_refused() -> None:
    crew: Any = OneRank()
    with pytest.raises(SettingsError, match=r"map-style.*Endless"):
        Loader(Endless(), crew, batch_size=1)
    with pytest.raises(SettingsError, match="map-style"):
        Loader(iter([1, 2]), crew, batch_size=1)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="empty"):
        Loader(Plain(0), crew, batch_size=1)
    with pytest.raises(SettingsError, match="batch_size 0"):
        Loader(Plain(), crew, batch_size=0)


def test_faults_come_together() -> None:
    crew: Any = OneRank(rank=0, size=4)
    with pytest.raises(SettingsError) as caught:
        Loader(Plain(0), crew, batch_size=3)
    assert len(caught.value.faults) == 2
    assert "batch_size 3" in caught.value.faults[1]
    assert "4 ranks" in caught.value.faults[1]
