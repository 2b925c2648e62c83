"""What a rank's part of a model draws leaves the script's own order of random numbers alone."""

from __future__ import annotations

import random

import numpy
import torch

from shoal.pipeline.chance import Chance

CPU = torch.device("cpu")


def drawn(dice: random.Random, numpys: numpy.random.Generator) -> list[float]:
    of_torch, of_numpy = torch.rand(()).item(), float(numpy.random.rand())
    return [of_torch, random.random(), of_numpy, dice.random(), float(numpys.random())]


def test_a_script_goes_on_as_if_nothing_had_been_drawn() -> None:
    """Ranks shuffled in other orders, where one had a module that drew Python's numbers."""
    dice, numpys = random.Random(1), numpy.random.default_rng(1)
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    alone = [drawn(dice, numpys) for _ in range(3)]
    dice, numpys = random.Random(1), numpy.random.default_rng(1)
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    chance = Chance(0, CPU, [dice, numpys])
    seen, own = [], []
    for _ in range(3):
        seen.append(drawn(dice, numpys))
        with chance.own():
            own.append(drawn(dice, numpys))
    assert seen == alone
    assert len({tuple(each) for each in own}) == 3  # which go on, too


def test_ranks_draw_other_numbers() -> None:
    torch.manual_seed(1)
    found = []
    for rank in (0, 1):
        with Chance(rank, CPU).own():
            found.append([torch.rand(()).item(), random.random(), float(numpy.random.rand())])
    assert all(one != other for one, other in zip(*found, strict=True))
