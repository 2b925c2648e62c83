"""Sets: one sample and a whole batch are the same bits; sine is the same everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shoal.train.data import sine
from shoal.train.data.sets import FASHION_MEAN_STD, MNIST_MEAN_STD, ImageSet

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, size=(50, 28, 28), dtype=np.uint8)
LABELS = RNG.integers(0, 10, size=50, dtype=np.uint8)


@pytest.mark.parametrize("mean_std", [MNIST_MEAN_STD, FASHION_MEAN_STD])
@settings(max_examples=30)
@given(indices=st.lists(st.integers(0, 49), min_size=1, max_size=40))
def test_take_is_getitem_bit_for_bit(mean_std: tuple[float, float], indices: list[int]) -> None:
    some = ImageSet(IMAGES, LABELS, mean_std)
    x, y = some.take(torch.tensor(indices))
    assert x.shape == (len(indices), 1, 28, 28)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    one_by_one = [some[i] for i in indices]
    assert torch.equal(x, torch.stack([x for x, _ in one_by_one]))
    assert torch.equal(y, torch.stack([y for _, y in one_by_one]))


def test_values() -> None:
    some = ImageSet(IMAGES, LABELS, MNIST_MEAN_STD)
    x, y = some[7]
    assert x.shape == (1, 28, 28)
    assert y.item() == LABELS[7]
    want = (IMAGES[7].astype(np.float64) / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(x[0].numpy(), want, rtol=1e-5, atol=1e-6)


def test_taking_leaves_the_images_alone() -> None:
    # The normalisation is in place: it must be in a copy.
    some = ImageSet(IMAGES.copy(), LABELS, MNIST_MEAN_STD)
    some[0]
    some.take(torch.arange(50))
    assert some.images.dtype == torch.uint8
    assert torch.equal(some.images[:, 0], torch.from_numpy(IMAGES))


def test_as_a_dataset() -> None:
    some = ImageSet(IMAGES, LABELS, MNIST_MEAN_STD)
    assert len(some) == 50
    with pytest.raises(IndexError):
        some[50]
    batches = list(DataLoader(some, batch_size=20))
    assert [len(y) for _, y in batches] == [20, 20, 10]
    assert torch.equal(batches[1][0], some.take(torch.arange(20, 40))[0])


def test_sine() -> None:
    train, test = sine.make()
    assert (len(train), len(test)) == (4_096, 1_024)
    for part in (train, test):
        x, y = part.tensors
        assert x.shape == y.shape == (len(part), 1)
        assert x.dtype == y.dtype == torch.float32
        assert 0 <= x.min() < 0.01
        assert math.pi - 0.01 < x.max() <= torch.tensor(math.pi)
        assert y.min() >= 0
        assert y.max() <= 1
        np.testing.assert_allclose(y, np.sin(x.double().numpy()), atol=2e-7)


def test_sine_hears_no_seed_and_disturbs_none() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = sine.make()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = sine.make()
    for one, two in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, two.tensors, strict=True))
    assert not torch.equal(first[0].tensors[0][:1_024], first[1].tensors[0])
