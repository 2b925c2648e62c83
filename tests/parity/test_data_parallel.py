"""Exactness, our promise: 1 to 4 ranks, every sync, against one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import Ranks
from warm import Nursery

from shoal.settings import SYNCS

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from cases import LINKED, names_for  # noqa: E402  (the script that the ranks run)

RESULTS: dict[int, tuple[dict[str, str | None], str]] = {}


def results_of(num_ranks: int, tmp: Path, nursery: Nursery) -> tuple[dict[str, str | None], str]:
    """All cases of one crew size run in one crew: starting processes is what costs time."""
    if num_ranks not in RESULTS:
        crew = Ranks(nursery, tmp, num_ranks, str(HERE / "cases.py"), str(tmp))
        crew.end(limit_s=150)
        merged: dict[str, str | None] = {}
        for file in sorted(tmp.glob("rank-*.json")):
            for key, problem in json.loads(file.read_text()).items():
                merged[key] = merged.get(key) or problem
        RESULTS[num_ranks] = merged, crew.said
    return RESULTS[num_ranks]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("sync", [*SYNCS, *LINKED])
def test_same_as_one_process(
    num_ranks: int, sync: str, tmp_path_factory: pytest.TempPathFactory, nursery: Nursery
) -> None:
    folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
    results, output = results_of(num_ranks, folder, nursery)
    for name in names_for(sync):
        key = f"{sync}:{name}"
        assert key in results, f"{key} was not reached:\n{output[-3000:]}"
        assert results[key] is None, f"{key}:\n{results[key]}"


def test_gradients_over_zmq_need_no_keys_on_one_machine(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            *[sys.executable, "-m", "shoal", "train", "--workers", "2", "--transport", "zmq"],
            *["--model", "residual-mlp", "--data", "sine", "--verify", "--threads", "1"],
            *["--batch-size", "7"],
        ],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr
    assert "2 replicas, sync ring over zmq, against one process" in run.stdout
    assert "float64" in run.stdout
    assert run.stdout.splitlines()[-1] == "pass"
    assert list(tmp_path.iterdir()) == []
