"""Fit y = sin x: the smallest task with a loss that falls, and one that needs no file."""

from __future__ import annotations

import math

import torch
from torch.utils.data import TensorDataset

NUM_TRAIN = 4_096
NUM_TEST = 1_024

# Not the run's seed: runs with other seeds must still be compared on the same data.
_SEED = 20_260_101


def make() -> tuple[TensorDataset, TensorDataset]:
    """The same (train, test) everywhere and always: x float32 (n, 1) in [0, π], y = sin x.

    Half a wave, so that y lies in [0, 1], which a net that closes with a sigmoid can reach.
    """
    generator = torch.Generator().manual_seed(_SEED)
    num = NUM_TRAIN + NUM_TEST
    # Hosts differ in the last bit of sin (each vector width has its own code). Computed in float64
    # and rounded once, what they hold in float32 is the same.
    x = (torch.rand(num, 1, generator=generator, dtype=torch.float64) * math.pi).float()
    y = x.double().sin().float()
    return (
        TensorDataset(x[:NUM_TRAIN], y[:NUM_TRAIN]),
        TensorDataset(x[NUM_TRAIN:], y[NUM_TRAIN:]),
    )
