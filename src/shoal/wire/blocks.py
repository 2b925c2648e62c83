"""Memory of large tensors that came, used again for the next of the same size.

Blocks of more than 32 MiB the C library gives back to the system as soon as they are free, smaller
ones sometimes (`keep_memory` in slots.py), and each new one comes with page faults, which take up
to as long as what is received into it.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy

ALIGNMENT = 64
"""Where torch puts its tensors. How matrix products round depends on it."""
LEAST_BYTES = 8 * 2**20
MOST_BYTES = 128 * 2**20
"""Of what is kept. For larger tensors there is `into=`."""
MOST_KEPT = 2
"""Blocks that wait for the next message: one for what comes, while the last one is still in use."""


def fresh(size: int) -> Any:
    """An array of so many bytes that begins where a tensor may. numpy asks for huge pages."""
    memory = numpy.empty(size + ALIGNMENT, dtype=numpy.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size]


class Blocks:
    """Of one size, once it was asked for twice in a row.

    Whoever has one keeps it for as long as it likes; it comes back when nobody refers to it any
    more, in whatever thread that is. So there is no lock, only steps that are one for Python.
    """

    def __init__(self) -> None:
        self._size = 0
        self._is_repeated = False
        self._free: list[Any] = []

    def take(self, size: int) -> Any:
        """An array of so many bytes, for a tensor that is made right of it: its views do not count.
        (numpy lets a view of a view refer to the block itself, torch refers to what it is given.)
        """
        if not LEAST_BYTES <= size <= MOST_BYTES:
            return fresh(size)
        self._is_repeated = size == self._size
        if not self._is_repeated:
            self._size, self._free = size, []
        try:
            block = self._free.pop()
        except IndexError:
            block = fresh(size)
        handed = block[:]
        weakref.finalize(handed, self._take_back, block).atexit = False
        return handed

    def _take_back(self, block: Any) -> None:
        """Nobody refers to it any more."""
        free = self._free
        if self._is_repeated and block.nbytes == self._size and len(free) < MOST_KEPT:
            free.append(block)
