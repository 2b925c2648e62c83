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
        self._held = [each for each in held if is_dice(each)]
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
            _set_state(each, state)

    def were_thrown(self) -> bool:
        """Since this was made."""
        now = Dice(self._held)
        return not (
            torch.equal(self._torch, now._torch)
            and all(map(torch.equal, self._cuda, now._cuda))
            and self._python == now._python
            and _plain(self._of_numpy) == _plain(now._of_numpy)
            and _plain(self._of_held) == _plain(now._of_held)
        )


_OF_NUMPY = ("Generator", "RandomState")


def is_dice(thing: Any) -> bool:
    """By its own type: a stand-in of torch.fx's must not be asked what kind of thing it is."""
    kind = type(thing)
    if issubclass(kind, random.SystemRandom):  # which has no state to be put back
        return False
    return issubclass(kind, random.Random | torch.Generator) or _is_numpys(kind)


def _is_numpys(kind: type) -> bool:
    return kind.__name__ in _OF_NUMPY and kind.__module__.startswith("numpy.random")


def _state(dice: Any) -> Any:
    if isinstance(dice, random.Random):
        return dice.getstate()
    if isinstance(dice, torch.Generator):
        return dice.get_state().numpy()
    return dice.bit_generator.state if hasattr(dice, "bit_generator") else dice.get_state()


def _set_state(dice: Any, state: Any) -> None:
    if isinstance(dice, random.Random):
        dice.setstate(state)
    elif isinstance(dice, torch.Generator):
        dice.set_state(torch.from_numpy(state))
    elif hasattr(dice, "bit_generator"):
        dice.bit_generator.state = state
    else:
        dice.set_state(state)


def _plain(part: Any) -> Any:
    """To be compared, also where there are arrays in it."""
    if isinstance(part, dict):
        return {key: _plain(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return list(map(_plain, part))
    return part.tobytes() if hasattr(part, "tobytes") else part
