"""The table of a model's stages: what is where, and how even it is."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from shoal.report.records import StageRecord

HEADER = ["stage", "host", "modules", "parameters", "time", "waiting"]
LEAST_WIDTH = 24
"""Of the modules' column, however narrow the terminal is."""
GAP = "   "


def stage_lines(stages: Sequence[StageRecord], width: int | None = None) -> list[str]:
    """width: what the terminal has; names of modules are broken into lines that fit."""
    if not stages:
        return []
    rows = [HEADER] + [
        [
            str(each.stage),
            ", ".join(sorted(set(each.hosts))),
            ", ".join(folded(each.modules)),
            f"{each.parameters:,}",
            f"{each.share:.0%}",
            f"{each.idle:.0%}",
        ]
        for each in stages
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    if width is not None:
        others = sum(widths) - widths[2] + len(GAP) * len(HEADER)
        widths[2] = min(widths[2], max(width - others, LEAST_WIDTH))
    return [line for row in rows for line in _lines(row, widths)]


def _lines(row: list[str], widths: list[int]) -> list[str]:
    """Of one row: more than one where its modules do not fit into their column."""
    first, *more = textwrap.wrap(
        row[2], widths[2], break_on_hyphens=False, break_long_words=False
    ) or [""]
    rows = [[*row[:2], first, *row[3:]]] + [["", "", part, "", "", ""] for part in more]
    return [
        "  "
        + GAP.join(
            cell.ljust(width) if column in (1, 2) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(each, widths, strict=True))
        ).rstrip()
        for each in rows
    ]


def folded(names: Sequence[str]) -> list[str]:
    """Numbered ones in a row as one: blocks.0, blocks.1, blocks.2 as blocks.0–2."""
    runs: list[tuple[str, int | None, int | None]] = []
    for name in names:
        path, _, last = name.rpartition(".")
        number = int(last) if last.isdecimal() and str(int(last)) == last else None
        if runs and number is not None and runs[-1][0] == path and runs[-1][2] == number - 1:
            runs[-1] = (path, runs[-1][1], number)
        else:
            runs.append((path if number is not None else name, number, number))
    return [_named(*run) for run in runs]


def _named(path: str, first: int | None, last: int | None) -> str:
    if first is None:
        return path
    number = str(first) if first == last else f"{first}–{last}"
    return f"{path}.{number}" if path else number
