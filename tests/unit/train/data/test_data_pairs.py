"""Images and labels must agree: `faults` and `read` find the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.errors import DataError
from shoal.train.data import idx, pairs


def written(tmp_path: Path, images: idx.Bytes, labels: idx.Bytes) -> tuple[Path, Path]:
    paths = tmp_path / "images", tmp_path / "labels"
    paths[0].write_bytes(idx.encode(images))
    paths[1].write_bytes(idx.encode(labels))
    return paths


def zeros(*shape: int) -> idx.Bytes:
    return np.zeros(shape, dtype=np.uint8)


def test_good_pair(tmp_path: Path) -> None:
    paths = written(tmp_path, zeros(4, 28, 28), np.arange(4, dtype=np.uint8))
    assert pairs.faults(*paths) == []
    images, labels = pairs.read(*paths)
    assert images.shape == (4, 28, 28)
    assert labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (zeros(4, 28, 28), zeros(3), "expected 4 labels, one for each image of images, got 3"),
        (zeros(1, 28, 28), zeros(1) + 10, "expected labels from 0 to 9, got 10"),
        (zeros(0, 28, 28), zeros(0), "holds none"),
    ],
)
def test_disagreement(tmp_path: Path, images: idx.Bytes, labels: idx.Bytes, words: str) -> None:
    paths = written(tmp_path, images, labels)
    assert any(words in fault for fault in pairs.faults(*paths))
    with pytest.raises(DataError, match=words):
        pairs.read(*paths)


def test_both_files_bad_gives_both_faults(tmp_path: Path) -> None:
    paths = written(tmp_path, zeros(2, 28, 28), zeros(2))
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    faults = pairs.faults(*paths)
    assert len(faults) == 2
    assert str(paths[0]) in faults[0]
    assert str(paths[1]) in faults[1]
