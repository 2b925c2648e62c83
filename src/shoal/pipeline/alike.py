"""The ranks of a replica go through the data alike: x is taken on the first, y on the last.

A plain DataLoader that shuffles draws its order on each rank. So all of them draw what stage 0
draws, from when the pipeline is made; and where both ranks are given a target, it is looked at
whether it is the same.
"""

from __future__ import annotations

import hashlib
import logging
import random
import zlib
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from shoal.crew import Crew
from shoal.wire.link import Link
from shoal.wire.slots import bytes_of
from shoal.wire.tree import Tree, tensors_of

ROWS, BYTES = 64, 4096
"""What is looked at of each tensor, at most."""
log = logging.getLogger("shoal.pipeline")

_OTHER = (
    "the target that rank %d was given is not that of rank %d: x is taken from the first stage and "
    "y from the last, which may be of other samples then. Does every rank take every batch, in one "
    "order (pipe.loader; a DataLoader's generator with one seed)? A target that does not matter "
    "can be None."
)


def draw_alike(crew: Crew, link: Link, ranks: Sequence[int]) -> None:
    """From now on, what scripts draw with torch's, Python's and numpy's own dice is the same on all
    stages of a replica. ranks: of its stages. Every rank of the crew must call this."""
    states = _states()
    all_of_them = b"".join(state.tobytes() for state in states.values())
    told = crew.exchange("random numbers", hashlib.sha256(all_of_them).hexdigest())
    if len({told[rank] for rank in ranks}) == 1:
        return
    if crew.rank == ranks[0]:
        message = {name: torch.from_numpy(state.copy()) for name, state in states.items()}
        for rank in ranks[1:]:
            link.send(message, rank, "random numbers")
    else:
        _set(link.recv(ranks[0], "random numbers"))


def _states() -> dict[str, Any]:
    version, numbers, _ = random.getstate()
    of_numpy: Any = numpy.random.get_state()
    _, keys, position, *_ = of_numpy
    return {
        "torch": torch.random.get_rng_state().numpy(),
        "python": numpy.array([version, *numbers], dtype=numpy.int64),
        "numpy": numpy.array([*keys, position], dtype=numpy.int64),
    }


def _set(states: dict[str, torch.Tensor]) -> None:
    torch.random.set_rng_state(states["torch"])
    version, *numbers = states["python"].tolist()
    random.setstate((version, tuple(numbers), None))
    *keys, position = states["numpy"].tolist()
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), position, 0, 0.0))


class SameTarget:
    """Whether stage 0 and the last one are given the same target. It is told once."""

    def __init__(self, first: int, last: int) -> None:
        """Their ranks."""
        self._ranks = first, last
        self._is_told = False

    def check(self, told: int, y: Tree) -> None:
        """In the last stage. told: what `mark_of` says in stage 0."""
        if not self._is_told and told not in (0, mark_of(y)):
            self._is_told = True
            log.warning(_OTHER, *self._ranks)


def mark_of(y: Tree) -> int:
    """The same for the same target; 0 where there is none, or none in this host's memory."""
    mark = 0
    for _, tensor in sorted(tensors_of(y).items(), key=lambda item: str(item[0])):
        if tensor.is_cpu and tensor.layout is torch.strided and tensor.numel():
            rows = tensor.detach()[:ROWS] if tensor.dim() else tensor.detach()
            flat = rows.reshape(-1)[:BYTES].resolve_conj().resolve_neg().contiguous()
            mark = zlib.crc32(bytes_of(flat).numpy().data, mark)
    return mark
