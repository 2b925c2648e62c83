"""`shoal train --stages`: what it shows, what it refuses, and how it ends when a stage is lost."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
from processes import PROMPT_S, SHOAL, all_gone, until

from shoal.network import reserve_port

HERE = str(Path(__file__).parent)
SMALL = ("--model", "residual-mlp", "--data", "sine", "--threads", "1")
LONG = ("--epochs", "1000", "--batch-size", "64")


def train(*options: str) -> tuple[str, ...]:
    return (*SHOAL, "train", *SMALL, *options)


def ranks_of(family: list[psutil.Process]) -> list[psutil.Process]:
    """In the order in which they were started, which is that of the ranks."""
    return sorted(family, key=lambda process: (process.create_time(), process.pid))


# -- what it shows ---------------------------------------------------------------------------------


def test_the_summary_shows_the_cut(start, tmp_path: Path) -> None:
    run = start(
        *train("--stages", "2", "--transport", "zmq", "--cut", "fc3", "--epochs", "1"),
        *("--schedule", "gpipe", "--microbatches", "3", "--out", str(tmp_path)),
    )
    assert run.end() == 0, run.said
    assert "2 stages over zmq, gpipe × 3 micro-batches" in run.out
    rows = [line.split() for line in run.out.splitlines() if "fc" in line]
    assert [row[0] for row in rows] == ["0", "1"]
    assert "fc1, fc2 " in run.out
    assert "fc3, fc4, fc5 " in run.out
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert summary["layout"] == {"replicas": 1, "stages": 2}
    assert summary["schedule"] == "gpipe"
    assert summary["microbatches"] == 3
    assert [stage["modules"] for stage in summary["stages"]] == [
        ["fc1", "fc2"],
        ["fc3", "fc4", "fc5"],
    ]
    shares = [stage["share"] for stage in summary["stages"]]
    assert sum(shares) == pytest.approx(1, abs=0.01)
    assert sum(stage["parameters"] for stage in summary["stages"]) == summary["parameters"]


def test_replicas_of_stages_prove_themselves(start) -> None:
    run = start(*train("--workers", "4", "--stages", "2", "--batch-size", "45", "--verify"))
    assert run.end() == 0, run.said
    assert "2 replicas (sync all-reduce) of 2 stages, 1f1b × 4 micro-batches" in run.out
    assert run.out.rstrip().endswith("pass")


def test_stages_started_by_hand(start_warm) -> None:
    """Two; three on three hosts: see lab/test_pipeline_hosts.py."""
    place = ("--init", f"tcp://127.0.0.1:{reserve_port()}", "--world-size", "2", "--stages", "2")
    runs = [
        start_warm(
            *train(*place, "--rank", str(rank), "--verify", "--schedule", "sequential", *more)
        )
        for rank, more in enumerate([("--microbatches", "8"), ()])
    ]
    assert [run.end() for run in runs] == [0, 0], [run.said for run in runs]
    assert "0.00e+00" in runs[0].out  # bit for bit
    assert "--microbatches 8: sequential takes the batch whole, so there is one." in runs[0].out


# -- what it refuses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (
            ("--stages", "3", "--workers", "4"),
            ["4 ranks do not make whole replicas of 3 stages; 1 would be left over. Use 3 or 6"],
        ),
        (
            ("--stages", "2", "--model", "broken_models:Branching"),
            ["cannot be read by torch.fx", "broken_models.py:", "if x.sum() > 0:", "Ways out"],
        ),
        (
            ("--stages", "2", "--cut", "1", "--model", "broken_models:misfit"),
            ["module 1 (Linear) does not take", "module 2 (Linear) does not take"],
        ),
    ],
)
def test_refused_with_the_remedy(start, options: tuple[str, ...], texts: list[str]) -> None:
    """By the launcher, and by ranks. What else a model may be refused for: see unit/pipeline."""
    run = start(*train(*options), PYTHONPATH=HERE)
    assert run.end() == 2, run.said
    for text in texts:
        assert text in run.err
    assert "Traceback" not in run.err


def test_cuts_in_other_places_on_two_hosts(start_warm) -> None:
    place = ("--init", f"tcp://127.0.0.1:{reserve_port()}", "--world-size", "2", "--stages", "2")
    runs = [
        start_warm(*train(*place, "--rank", str(rank), "--cut", cut))
        for rank, cut in enumerate(("fc3", "fc4"))
    ]
    for run in runs:
        assert run.end() == 1, run.said
        assert "--cut" in run.err
        assert "fc3" in run.err
        assert "fc4" in run.err


# -- when a stage is lost --------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "victim"), [("zmq", 1), ("dist", 0)])
def test_a_stage_that_is_killed_is_named(start, transport: str, victim: int) -> None:
    run = start(*train("--stages", "2", "--transport", transport, *LONG))
    run.until_says("1/1000")
    family = ranks_of(run.family())
    family[victim].kill()
    assert run.end() == 1
    assert f"rank {victim}" in run.err
    assert "killed by SIGKILL" in run.err
    assert "Traceback" not in run.err
    until(lambda: all_gone(family), "no process left")


def test_a_stage_that_raises_is_shown_once(start) -> None:
    run = start(
        *train("--stages", "2", "--transport", "zmq", "--model", "broken_models:BreakingStage"),
        *("--cut", "last"),
        PYTHONPATH=HERE,
    )
    assert run.end() == 1
    assert run.err.count("Traceback (most recent call last)") == 1
    assert run.err.count("ValueError: the fifth pass is too much") == 1
    assert "rank 1" in run.err


def test_ctrl_c(start) -> None:
    run = start(*train("--stages", "2", "--transport", "zmq", *LONG))
    run.until_says("1/1000")
    family = run.family()
    assert run.interrupt(signal.SIGINT) < PROMPT_S
    assert run.process.returncode == 130
    assert all_gone(family)
    first, where = run.err.splitlines()
    assert first == "shoal: interrupted."
    assert where.startswith("shoal: what there is of this run is in ")
