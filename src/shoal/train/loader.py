"""This rank's share of every global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from shoal.errors import SettingsError
from shoal.layout import Share, share
from shoal.train.order import sample_order


class Sharer(Protocol):
    """Who shares global batches out: a crew of replicas, or a pipeline's replica among others."""

    rank: int
    size: int
    device: torch.device
    share: Share | None


Collate = Callable[[list[Any]], Any]


class Loader:
    """Iterates over one epoch at a time; each `for` is the next epoch, in a new order.

    While a batch is in the user's hands, `crew.share` says how many samples of the global batch it
    is, so that the sync can weigh its gradient. A rank that has no sample in a short last batch is
    given one all the same, with weight zero: it takes part in the sync and changes nothing.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        crew: Sharer,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
    ) -> None:
        faults = []
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            faults.append(
                "loader: the dataset must have a length and give samples by number "
                f"(a map-style dataset), so that ranks can share it out; got {type(dataset)}."
            )
        elif len(dataset) == 0:
            faults.append("loader: the dataset is empty.")
        if batch_size < crew.size:
            faults.append(
                f"loader: batch_size {batch_size} is the global batch, shared out over "
                f"{crew.size} ranks; it must be at least {crew.size}."
            )
        if faults:
            raise SettingsError(faults)
        self.dataset = dataset
        self.batch_size = batch_size
        self.epoch = 0
        """The epoch that the next `for` goes through, counted from 0."""
        self._crew = crew
        self._shuffle = shuffle
        self._seed = seed
        self._num_workers = num_workers
        self._collate_fn = collate_fn
        self._num_samples: int = len(dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return -(-self._num_samples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        if self._shuffle:
            order = torch.from_numpy(sample_order(self._num_samples, self._seed, self.epoch))
        else:
            order = torch.arange(self._num_samples)
        self.epoch += 1
        batches = order.split(self.batch_size)
        shares = [share(len(batch), self._crew.rank, self._crew.size) for batch in batches]
        mine = [
            batch[part.start : part.stop] if part.size else batch[:1]
            for batch, part in zip(batches, shares, strict=True)
        ]
        try:
            for part, samples in zip(shares, self._fetch(mine), strict=True):
                self._crew.share = part
                yield _to_device(samples, self._crew.device)
        finally:
            self._crew.share = None

    def _fetch(self, batches: Sequence[torch.Tensor]) -> Iterator[Any]:
        """Whole batches at once where the dataset can, else sample by sample."""
        if self._collate_fn is None and self._num_workers == 0:
            if isinstance(self.dataset, TensorDataset):
                for batch in batches:
                    yield [tensor[batch] for tensor in self.dataset.tensors]
                return
            take = getattr(self.dataset, "take", None)
            if callable(take):
                for batch in batches:
                    yield take(batch)
                return
        yield from DataLoader(
            self.dataset,
            batch_sampler=[batch.tolist() for batch in batches],
            num_workers=self._num_workers,
            collate_fn=self._collate_fn,
            generator=torch.Generator(),  # leave the global one to the model
        )


def _to_device(value: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([_to_device(item, device) for item in value])
    return value
