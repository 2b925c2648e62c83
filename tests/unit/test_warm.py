"""Forks of the nursery, which other tests take for processes of their own: as good as those."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Running, all_gone

Start = Callable[..., Running]

TELL = """
import json, os, random, sys
print(json.dumps([
    __name__, sys.argv[1:], sys.path[0], os.getcwd(), os.environ.get("OWN"),
    os.environ.get("OPENBLAS_NUM_THREADS"), random.random(),
]))
print("to the other", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "users_own.py").write_text(TELL)
    return tmp_path / "users_own.py"


def test_a_fork_is_told_the_same_as_a_process(
    start: Start, start_warm: Start, script: Path
) -> None:
    """By every way to name a program. Only chance differs."""
    about = {"OWN": "mine", "PYTHONPATH": str(script.parent)}
    for program in ([str(script)], ["-m", "users_own"], ["-c", TELL]):
        told = []
        for begin in (start, start_warm):
            run = begin(sys.executable, *program, "--an", "argument", **about)
            assert run.end() == 7, run.said
            assert run.err == "to the other\n"
            told.append(json.loads(run.out.replace(str(run.folder), "FOLDER")))
        assert told[0][:-1] == told[1][:-1]
        assert told[0][-1] != told[1][-1]


def test_a_fork_has_as_many_threads_as_it_is_told(start_warm: Start) -> None:
    """torch reads that once, when it is imported."""
    show = "import torch; print(torch.get_num_threads())"
    runs = [start_warm(sys.executable, "-c", show, OMP_NUM_THREADS=n) for n in ("1", "3")]
    assert [run.end() for run in runs] == [0, 0]
    assert [run.out for run in runs] == ["1\n", "3\n"]


def test_forks_end_one_by_one(start_warm: Start) -> None:
    waiting = "import time; print('ready', flush=True); time.sleep(600)"
    runs = [start_warm(sys.executable, "-c", waiting) for _ in range(3)]
    for run in runs:
        run.until_says("ready")
    runs[1].process.kill()
    assert runs[1].end() == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        runs[0].end(limit_s=0)
    runs[0].interrupt()
    assert runs[0].process.returncode == -signal.SIGINT
    assert runs[0].err.rstrip().endswith("KeyboardInterrupt")
    assert runs[2].process.poll() is None


def test_what_a_fork_has_started_goes_with_it(start_warm: Start) -> None:
    family = "import subprocess; print('ready', flush=True); subprocess.run(['sleep', '600'])"
    run = start_warm(sys.executable, "-c", family)
    run.until(run.family)
    children = run.family()
    run.kill()
    assert run.process.poll() == -signal.SIGKILL
    assert all_gone(children)
