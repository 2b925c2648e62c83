"""The example of two ranks that talk: as it is started, and what it lets its reader see."""

from __future__ import annotations

import sys
from pathlib import Path

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


def test_on_two_ranks_of_this_machine_over_zmq(start) -> None:
    run = start(*SHOAL, "run", "--workers", "2", EXAMPLE)
    assert run.end() == 0, run.said
    assert run.err == ""
    by_rank = ["\n".join(x for x in run.out.splitlines() if x.startswith(f"[{r}]")) for r in (0, 1)]
    check_sender(by_rank[0], "zmq")
    check_receiver(by_rank[1])


def test_by_hand_over_dist(start_warm) -> None:
    place = ["--init", f"tcp://127.0.0.1:{reserve_port()}", "--world-size", "2"]
    ranks = [
        start_warm(
            sys.executable, EXAMPLE, *place, "--rank", str(rank), "--transport", "dist",
            OMP_NUM_THREADS="1",
        )
        for rank in (0, 1)
    ]  # fmt: skip
    for rank in ranks:
        assert rank.end() == 0, rank.said
    check_sender(ranks[0].out, "dist")
    check_receiver(ranks[1].out)


def test_alone(start) -> None:
    run = start(*SHOAL, "run", "--workers", "1", EXAMPLE)
    assert run.end() == 1, run.said
    assert "Two ranks talk here, not 1: shoal run --workers 2" in run.err
    assert "Traceback" not in run.said
