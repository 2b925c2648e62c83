"""The example of a boss: the seed's residual model on sin x, as it is started."""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.network import reserve_port

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "boss_residual.py")


def test_two_workers_learn_what_one_process_learns(start) -> None:
    where = f"tcp://127.0.0.1:{reserve_port()}"
    run = start(sys.executable, EXAMPLE, "--local", "--listen", where, "--steps", "101")
    assert run.end() == 0, run.said
    shown = [line.split() for line in run.out.splitlines() if line.startswith("step ")]
    assert [line[1] for line in shown] == ["0", "100"]
    assert float(shown[1][3]) < float(shown[0][3]) / 2
    assert run.out.rstrip().endswith("the same to the last bit: True")
    assert run.out.count("works for the boss") == 2
    assert "Traceback" not in run.err
