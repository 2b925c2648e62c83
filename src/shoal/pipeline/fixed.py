"""Plain values that a forward() takes from its module: stages have them as they were when read.

A script that sets `model.tau` between steps would change nothing there. So it is told.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import nn

from shoal.errors import ModelError

MOST_VALUES = 100
"""Of a list or dict that is compared with each step."""


class FixedValues:
    """Of the modules of a model that were read."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[weakref.ref[nn.Module], str, Any]] = {}
        """By what a user calls it: its module, its name there, and what it was."""

    def note(self, path: str, module: nn.Module, name: str, value: Any) -> None:
        """That forward() has asked for it. path: of the module."""
        what = f"{path}.{name}".strip(".")
        if what not in self._values and _is_plain(value):
            self._values[what] = weakref.ref(module), name, copy.deepcopy(value)

    def add(self, others: FixedValues) -> None:
        self._values |= others._values

    def check(self) -> None:
        """Raises ModelError if one is another now."""
        for what, (reference, name, before) in self._values.items():
            module = reference()
            now = before if module is None else vars(module).get(name, before)
            if type(now) is not type(before) or now != before:
                raise ModelError(
                    f"{what} of the model was {before!r:.60} when it was read, and is {now!r:.60} "
                    "now: its stages go on with what it was. Make it a buffer (which "
                    "pipe.load_state_dict sets), or an input of forward(); or move the part that "
                    "uses it into an nn.Module of its own that cannot be read, and is kept whole."
                )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        inner = list(value.values()) if isinstance(value, dict) else list(value)
        return len(inner) <= MOST_VALUES and all(
            isinstance(v, bool | int | float | str) for v in inner
        )
    return isinstance(value, bool | int | float | complex | str)
