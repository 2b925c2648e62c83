"""From a data set's name to what the loop takes: one set to train on, one to test with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from shoal.train.data import catalog, pairs, sample, sine, sources
from shoal.train.data.obtain import obtain
from shoal.train.data.sets import FASHION_MEAN_STD, MNIST_MEAN_STD, ImageSet


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a run learns from, and what it is measured by."""

    train: Dataset[tuple[Tensor, ...]]
    test: Dataset[tuple[Tensor, ...]]


def load(name: str, data_dir: Path | None, cache_dir: Path) -> Data:
    """The data set of this name; DataError if there is none, or its files are at fault.

    Files that are nowhere yet are downloaded, if the launcher has not done so before.
    """
    catalog.entry(name)
    if name == "sine":
        train, test = sine.make()
        return Data(train=train, test=test)
    if name == "mnist-sample":
        parts = sample.read()
    else:
        paths = obtain(sources.SOURCES[name], data_dir, cache_dir, lambda *_: None)
        parts = pairs.read(*paths[:2]), pairs.read(*paths[2:])
    mean_std = FASHION_MEAN_STD if name == "fashion-mnist" else MNIST_MEAN_STD
    return Data(train=ImageSet(*parts[0], mean_std), test=ImageSet(*parts[1], mean_std))
