"""What is told of results that nobody has fetched."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

from shoal.launch.addresses import Site
from shoal.launch.hosts import Host
from shoal.launch.results import Results


def test_where_they_stay_is_told_unless_nobody_misses_them(tmp_path: Path) -> None:
    sites = [
        Site(Host(name=name), Mock(), name == "here", "/code", f"/{name}/results", name)
        for name in ("here", "box", "other")
    ]
    results = Results(sites, tmp_path)
    said = "what ranks left, if anything, stays there: "
    assert results.stay() == [f"{said}box:/box/results, other:/other/results"]
    assert results.stay(["here", "other"]) == [f"{said}other:/other/results"]
    assert results.stay(["here"]) == []
    assert Results(sites, tmp_path, may_be_missed=False).stay() == []  # those of workers
