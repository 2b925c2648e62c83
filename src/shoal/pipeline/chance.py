"""Random numbers of one rank's part of a model: a stream of its own.

Ranks that run the same lines have the same seed. From the one stream that all of them have, every
stage's dropout would draw the same masks, and replicas the same for other samples. And a rank whose
stage draws more than another's would go on with other numbers than it: the next shuffle of a
DataLoader would not be the same on the rank that reads x and on the one that reads y. The same goes
for Python's and numpy's numbers, which a module may draw, and a script for the order of samples.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from shoal.pipeline.dice import Dice


class Chance:
    def __init__(self, rank: int, device: torch.device, held: Iterable[Any] = ()) -> None:
        """From the seed that the script has set last (torch.manual_seed), and the rank.

        held: things among which there may be dice that the model draws from, and the script too.
        """
        self._held = list(held)
        shared = torch.default_generator
        if device.type == "cuda":
            torch.cuda.init()
            shared = torch.cuda.default_generators[device.index or 0]
        digest = hashlib.sha256(f"{torch.initial_seed()} {rank}".encode()).digest()
        seed = int.from_bytes(digest[:7])
        others = Dice(self._held)
        shared.set_state(torch.Generator(device).manual_seed(seed).get_state())
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        self._mine = Dice(self._held)
        others.put_back()

    @contextmanager
    def own(self) -> Iterator[None]:
        """What is drawn meanwhile comes from this rank's stream; the script's stays as it is."""
        others = Dice(self._held)
        self._mine.put_back()
        try:
            yield
        finally:
            self._mine = Dice(self._held)
            others.put_back()
