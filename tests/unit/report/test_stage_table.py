"""The table of stages, with names of any length."""

from __future__ import annotations

import pytest

from shoal.report.records import StageRecord
from shoal.report.stage_table import folded, stage_lines


def stage(number: int, *modules: str) -> StageRecord:
    return StageRecord(
        stage=number, hosts=["laptop"], modules=list(modules), parameters=1234, share=0.5, idle=0.1
    )


def test_short_names_have_a_line_each() -> None:
    assert stage_lines([stage(0, "conv1", "pool1"), stage(1, "fc")], 80) == [
        "  stage   host     modules        parameters   time   waiting",
        "      0   laptop   conv1, pool1        1,234    50%       10%",
        "      1   laptop   fc                  1,234    50%       10%",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_long_names_are_broken_inside_their_column(width: int) -> None:
    names = [f"extractor.{kind}_normalised" for kind in ("first", "second", "third")]
    lines = stage_lines([stage(0, *names), stage(1, "head")], width)
    assert max(map(len, lines)) <= width
    assert lines[0].endswith("waiting")
    assert all(any(name in line for line in lines) for name in names)
    assert sum("50%" in line for line in lines) == 2
    assert len(stage_lines([stage(0, *names), stage(1, "head")])) == 3, "not on a terminal"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b.0", "b.1", "b.2", "c"], ["a", "b.0–2", "c"]),
        (["0", "1", "3"], ["0–1", "3"]),
        (["b.0.fc", "b.1.fc"], ["b.0.fc", "b.1.fc"]),
        (["b.1", "b.0"], ["b.1", "b.0"]),
        (["a.1", "b.2"], ["a.1", "b.2"]),
        (["b.01", "b.02"], ["b.01", "b.02"]),
        ([], []),
    ],
)
def test_numbered_ones_in_a_row_are_one(names: list[str], expected: list[str]) -> None:
    assert folded(names) == expected
