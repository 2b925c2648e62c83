"""The example of a model in stages: as it is started, and what it lets its reader see."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import SHOAL

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "pipeline.py")


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        ("3", ()),
        ("4", ("--stages", "2")),
    ],
)
def test_it_learns_a_sine(start, workers: str, options: tuple[str, ...]) -> None:
    run = start(*SHOAL, "run", "--workers", workers, "--threads", "1", EXAMPLE, *options)
    assert run.end() == 0, run.said
    assert run.err == ""
    stages = next(line for line in run.out.splitlines() if "stages: " in line)
    assert stages.count("|") == (1 if options else 2)
    error = float(run.out.rpartition("sin x: ")[2])
    assert error < 0.1
