"""The example of two ranks that talk: as it is started, and what it lets its reader see."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from processes import SHOAL

from shoal.network import reserve_port

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "point_to_point.py")


def check_sender(said: str, transport: str) -> None:
    assert f"1. blocking, over {transport}" in said
    assert "'next step': 8" in said
    assert "isend came back after" in said
    assert "they had left after" in said


def check_receiver(said: str) -> None:
    assert "with x (128, 128, 3, 3), step 7, from " in said
    assert "irecv came back after" in said
    assert "67,108,864 bytes were here after" in said


@pytest.mark.parametrize("transport", ["zmq", "dist"])
def test_on_two_ranks_of_this_machine(start, transport: str) -> None:
    run = start(*SHOAL, "run", "--workers", "2", EXAMPLE, "--transport", transport)
    assert run.end() == 0, run.said
    assert run.err == ""
    by_rank = ["\n".join(x for x in run.out.splitlines() if x.startswith(f"[{r}]")) for r in (0, 1)]
    check_sender(by_rank[0], transport)
    check_receiver(by_rank[1])


@pytest.mark.parametrize("transport", ["zmq", "dist"])
def test_by_hand(start, transport: str) -> None:
    place = ["--init", f"tcp://127.0.0.1:{reserve_port()}", "--world-size", "2"]
    ranks = [
        start(
            sys.executable, EXAMPLE, *place, "--rank", str(rank), "--transport", transport,
            OMP_NUM_THREADS="1",
        )
        for rank in (0, 1)
    ]  # fmt: skip
    for rank in ranks:
        assert rank.end() == 0, rank.said
    check_sender(ranks[0].out, transport)
    check_receiver(ranks[1].out)


@pytest.mark.parametrize("workers", [1, 3])
def test_with_another_number_of_ranks(start, workers: int) -> None:
    run = start(*SHOAL, "run", "--workers", str(workers), EXAMPLE)
    assert run.end() == 1, run.said
    assert f"Two ranks talk here, not {workers}: shoal run --workers 2" in run.err
    assert "Traceback" not in run.said
