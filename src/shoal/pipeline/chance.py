"""Random numbers of one rank's part of a model: a stream of its own.

Ranks that run the same lines have the same seed. From the one stream that all of them have, every
stage's dropout would draw the same masks, and replicas the same for other samples. And a rank whose
stage draws more than another's would go on with other numbers than it: the next shuffle of a
DataLoader would not be the same on the rank that reads x and on the one that reads y.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Chance:
    def __init__(self, rank: int, device: torch.device) -> None:
        """From the seed that the script has set last (torch.manual_seed), and the rank."""
        self._shared = torch.default_generator
        if device.type == "cuda":
            torch.cuda.init()
            self._shared = torch.cuda.default_generators[device.index or 0]
        digest = hashlib.sha256(f"{torch.initial_seed()} {rank}".encode()).digest()
        own = torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))
        self._state = own.get_state()

    @contextmanager
    def own(self) -> Iterator[None]:
        """What is drawn meanwhile comes from this rank's stream; the script's stays as it is."""
        others = self._shared.get_state()
        self._shared.set_state(self._state)
        try:
            yield
        finally:
            self._state = self._shared.get_state()
            self._shared.set_state(others)
