"""From facts to a diagnosis: a cell for everything that was looked at. Pure."""

from __future__ import annotations

import msgspec

from shoal.doctor.cells import Cell, Verdict, worst
from shoal.doctor.facts import Facts, HostFacts, PairFacts
from shoal.doctor.host_verdicts import host_cells
from shoal.doctor.pair_verdicts import pair_cells


class HostDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    cells: dict[str, Cell]
    facts: HostFacts


class PairDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    target: str
    cells: dict[str, Cell]
    facts: PairFacts

    @property
    def name(self) -> str:
        return f"{self.source} -> {self.target}"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    verdict: Verdict
    """The worst of all cells."""
    hosts: list[HostDiagnosis]
    pairs: list[PairDiagnosis]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that is not well, and where it is."""

    where: str
    what: str
    cell: Cell


def diagnose(facts: Facts) -> Diagnosis:
    hosts = [
        HostDiagnosis(name=host.name, cells=host_cells(facts, host), facts=host)
        for host in facts.hosts
    ]
    pairs = [
        PairDiagnosis(
            source=pair.source, target=pair.target, cells=pair_cells(facts, pair), facts=pair
        )
        for pair in facts.pairs
    ]
    rows: list[HostDiagnosis | PairDiagnosis] = [*hosts, *pairs]
    verdict = worst(cell for row in rows for cell in row.cells.values())
    return Diagnosis(verdict=verdict, hosts=hosts, pairs=pairs)


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """What is wrong; the worst first."""
    rows: list[HostDiagnosis | PairDiagnosis] = [*diagnosis.hosts, *diagnosis.pairs]
    found = [
        Finding(where=row.name, what=what, cell=cell)
        for row in rows
        for what, cell in row.cells.items()
        if cell.verdict in ("warning", "bad")
    ]
    return sorted(found, key=lambda finding: finding.cell.verdict != "bad")
