"""Exactness, our promise: a model over 2 to 4 ranks, every schedule, against one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import Ranks
from warm import Nursery

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from pipeline_cases import TIMEOUT_S, cases_for  # noqa: E402  (the script that the ranks run)
from pipeline_faults import FATAL  # noqa: E402

SIZES = (2, 3, 4)
RESULTS: dict[int, tuple[list[dict[str, Any]], str]] = {}


def results_of(num_ranks: int, tmp: Path, nursery: Nursery) -> tuple[list[dict[str, Any]], str]:
    """By rank. All cases of one crew size run in one crew: starting processes costs time."""
    if num_ranks not in RESULTS:
        crew = Ranks(nursery, tmp, num_ranks, str(HERE / "pipeline_cases.py"), str(tmp))
        crew.end(limit_s=150)
        files = [tmp / f"rank-{rank}.json" for rank in range(num_ranks)]
        results = [json.loads(file.read_text()) for file in files if file.exists()]
        RESULTS[num_ranks] = results, crew.said
    return RESULTS[num_ranks]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("num_ranks", "case"), [(ranks, case) for ranks in SIZES for case in cases_for(ranks)]
)
def test_same_as_one_process(
    num_ranks: int, case: str, tmp_path_factory: pytest.TempPathFactory, nursery: Nursery
) -> None:
    folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
    results, output = results_of(num_ranks, folder, nursery)
    reached = [each for each in results if case in each]
    problems = "\n".join(each[case] for each in reached if each[case])
    assert not problems, f"{case}:\n{problems}"
    assert len(reached) == num_ranks, f"{case} was not reached:\n{output[-3000:]}"


WORDS = {
    "other number of samples": ["y has 5 samples", "x has 8"],
    "inference on one rank only": ["rank 1 does inference", "rank 0 does step", "the same calls"],
    "unknown cut on one rank only": ["22", "no module of that name"],
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "num_ranks", [pytest.param(ranks, id=name) for ranks, (name, _) in FATAL.items()]
)
def test_a_fault_of_one_rank_is_told_to_all(
    num_ranks: int, tmp_path_factory: pytest.TempPathFactory, nursery: Nursery
) -> None:
    """Nobody waits long for a rank that has found a fault, and all hear what it was."""
    folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
    results, output = results_of(num_ranks, folder, nursery)
    assert [each.keys() & {"told"} for each in results] == [{"told"}] * num_ranks, output[-3000:]
    told = [each["told"] for each in results]
    kinds = ["PeerLost", "ModelError", "PeerLost", "PeerLost"][:num_ranks]
    assert [each["kind"] for each in told] == kinds, told
    for each in told:
        for words in WORDS[FATAL[num_ranks][0]]:
            assert words in each["text"], f"expected {words!r} in: {each['text']}"
        assert each["seconds"] < TIMEOUT_S / 2, "it was heard of when all waiting was over"
