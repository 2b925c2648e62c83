"""A diagnosis as a person sees it: two tables, then a sentence for each cell that is not well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.doctor.cells import Cell
from shoal.doctor.verdicts import Diagnosis, HostDiagnosis, PairDiagnosis, findings

STYLES = {"ok": "green", "warning": "yellow", "bad": "bold red", "unknown": "dim"}
MARKS = {"warning": "! ", "bad": "✗ "}
"""Without colours, these tell."""


WIDE = 10_000
"""More than any table needs."""

Row: TypeAlias = HostDiagnosis | PairDiagnosis


def show(diagnosis: Diagnosis, console: Console) -> None:
    for rows in (diagnosis.hosts, diagnosis.pairs):
        for table in _tables(rows, console):
            console.print(table)
            console.print()
    is_cut_elsewhere = not console.is_terminal  # lines of a file are as long as they are
    for host in diagnosis.hosts:
        if why := _why(host):
            console.print(Text(why, style="dim"), soft_wrap=is_cut_elsewhere)
    console.print()
    found = findings(diagnosis)
    for finding in found:
        cell = finding.cell
        style = STYLES[cell.verdict]
        head = f"{MARKS[cell.verdict]}{finding.where}, {finding.what}: "
        text = Text.assemble((head, style), cell.sentence)
        console.print(text, soft_wrap=is_cut_elsewhere)
        if cell.remedy:  # in one piece, to be copied
            console.print(Text(f"    {cell.remedy}", style="bold"), soft_wrap=True)
    if not found:
        console.print(Text("all is well", style="green"))


def _tables(rows: Sequence[Row], console: Console) -> Iterator[Table]:
    """One, or more where one would be too wide."""
    wide = console.options.update(width=WIDE)
    waiting = [list(rows[0].cells)] if rows else []
    while waiting:
        columns = waiting.pop(0)
        table = _table(rows, columns)
        if len(columns) > 1 and console.measure(table, options=wide).maximum > console.width:
            half = (len(columns) + 1) // 2
            waiting[:0] = [columns[:half], columns[half:]]
        else:
            yield table


def _table(rows: Sequence[Row], columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    heads = ["from", "to"] if isinstance(rows[0], PairDiagnosis) else ["host"]
    for name in (*heads, *columns):
        table.add_column(name, overflow="fold")
    for row in rows:
        names = [row.source, row.target] if isinstance(row, PairDiagnosis) else [row.name]
        cells = (_shown(row.cells[column]) for column in columns)
        table.add_row(*(Text(name) for name in names), *cells)
    return table


def _why(host: HostDiagnosis) -> str:
    """Why this host is found where it is."""
    chosen = host.facts.address
    if chosen is None or not chosen.interface:
        return ""
    where = f"{chosen.interface} {chosen.address} (MTU {chosen.mtu})"
    return f"{host.name} is found at {where}: {host.facts.why}."


def _shown(cell: Cell) -> Text:
    return Text(MARKS.get(cell.verdict, "") + cell.text, style=STYLES[cell.verdict])
