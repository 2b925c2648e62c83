"""The sample inside the package is whole, balanced, small, and free of pickles."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from shoal.errors import DataError
from shoal.train.data import sample


def test_counts_shapes_and_kinds() -> None:
    train, test = sample.read()
    for (images, labels), per_class in ((train, 400), (test, 100)):
        assert images.shape == (10 * per_class, 28, 28)
        assert images.dtype == np.uint8
        assert labels.dtype == np.uint8
        assert np.bincount(labels).tolist() == [per_class] * 10
        assert images.flags.writeable  # torch.from_numpy warns otherwise


def test_no_image_is_in_both_parts() -> None:
    (train, _), (test, _) = sample.read()
    train_set = {image.tobytes() for image in train}
    assert len(train_set) == len(train)
    assert not train_set & {image.tobytes() for image in test}


def test_order_is_shuffled_so_any_batch_has_most_classes() -> None:
    (_, labels), _ = sample.read()
    assert all(len(set(labels[at : at + 64].tolist())) >= 8 for at in range(0, 3_900, 64))


def test_digits_look_like_digits() -> None:
    # A one is thin and a zero is not; the middle of a zero is empty and that of a one is not.
    # It would fail if labels and images had come apart in repacking.
    (images, labels), _ = sample.read()
    mean = [images[labels == digit].mean(axis=0) for digit in range(10)]
    assert mean[1].mean() < min(mean[digit].mean() for digit in (0, 2, 3, 5, 6, 8))
    assert mean[0][13:15, 13:15].mean() < 60 < 150 < mean[1][13:15, 13:15].mean()
    centroids = np.stack(mean).reshape(10, -1)
    test_images, test_labels = sample.read()[1]
    far = ((test_images.reshape(-1, 1, 784).astype(np.float32) - centroids) ** 2).sum(-1)
    assert (far.argmin(axis=1) == test_labels).mean() > 0.75  # by chance: 0.1


def test_file_is_small_and_attributed() -> None:
    folder = resources.files("shoal.train.data")
    with resources.as_file(folder / sample.FILE_NAME) as path:
        assert path.stat().st_size < 1_000_000
    notice = (folder / "NOTICE").read_text()
    for word in ("LeCun", "Cortes", "Burges", "ShareAlike 3.0", "Raschka", "BSD", "AS IS"):
        assert word in notice


def test_a_damaged_install_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    with pytest.raises(DataError, match="Install shoal again"):
        sample.read()
    (tmp_path / sample.FILE_NAME).write_bytes(b"not a zip")
    with pytest.raises(DataError, match="Install shoal again"):
        sample.read()
    np.savez(tmp_path / sample.FILE_NAME, images=np.array([{}]), labels=np.zeros(1))
    with pytest.raises(DataError, match="allow_pickle"):
        sample.read()
