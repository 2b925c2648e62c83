"""The random numbers of this process: whether some were drawn, and back to where they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch


class Dice:
    """The random numbers of this process: torch's, Python's and, where it is loaded, numpy's.

    And those that a model draws from dice of its own.
    """

    def __init__(self, held: Iterable[Any] = ()) -> None:
        """held: things among which there may be such dice."""
        self._held = [each for each in held if isinstance(each, random.Random | torch.Generator)]
        self._of_held = [_state(each) for each in self._held]
        self._torch = torch.random.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = getattr(numpy, "random", None)
        self._of_numpy = self._numpy.get_state() if self._numpy else ()

    def put_back(self) -> None:
        torch.random.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy:
            self._numpy.set_state(self._of_numpy)
        for each, state in zip(self._held, self._of_held, strict=True):
            each.setstate(state) if isinstance(each, random.Random) else each.set_state(
                torch.from_numpy(state)
            )

    def were_thrown(self) -> bool:
        """Since this was made."""
        now = Dice(self._held)
        return not (
            torch.equal(self._torch, now._torch)
            and all(map(torch.equal, self._cuda, now._cuda))
            and self._python == now._python
            and list(map(_plain, self._of_numpy)) == list(map(_plain, now._of_numpy))
            and list(map(_plain, self._of_held)) == list(map(_plain, now._of_held))
        )


def _state(dice: random.Random | torch.Generator) -> Any:
    return dice.getstate() if isinstance(dice, random.Random) else dice.get_state().numpy()


def _plain(part: Any) -> Any:
    return part.tobytes() if hasattr(part, "tobytes") else part
