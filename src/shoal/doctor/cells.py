"""A verdict on one thing: fine, worth a look, or in the way of training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

Verdict: TypeAlias = Literal["ok", "warning", "bad", "unknown"]
"""Unknown: it could not be found out, for a reason that another cell gives."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    verdict: Verdict
    text: str
    """What a table shows."""
    sentence: str = ""
    """What is wrong."""
    remedy: str = ""
    """What to do: a command, or where to look."""


UNKNOWN = Cell(verdict="unknown", text="–")


def ok(text: str) -> Cell:
    return Cell(verdict="ok", text=text)


def warning(text: str, sentence: str, remedy: str) -> Cell:
    return Cell(verdict="warning", text=text, sentence=sentence, remedy=remedy)


def bad(text: str, sentence: str, remedy: str) -> Cell:
    return Cell(verdict="bad", text=text, sentence=sentence, remedy=remedy)


def worst(cells: Iterable[Cell]) -> Verdict:
    found = {cell.verdict for cell in cells}
    return "bad" if "bad" in found else "warning" if "warning" in found else "ok"
