"""The example of a model in stages: as it is started, and what it lets its reader see."""

from __future__ import annotations

from pathlib import Path

from processes import SHOAL

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "pipeline.py")


def test_it_learns_a_sine(start) -> None:
    """In more epochs than it takes by default: each time it begins with other weights."""
    options = ("--workers", "2", "--threads", "1", EXAMPLE, "--stages", "2", "--epochs", "40")
    run = start(*SHOAL, "run", *options)
    assert run.end() == 0, run.said
    assert run.err == ""
    stages = next(line for line in run.out.splitlines() if "stages: " in line)
    assert stages.count("|") == 1
    assert float(run.out.rpartition("sin x: ")[2]) < 0.1
