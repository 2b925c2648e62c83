"""The logs of ranks, in a folder that the leader's script writes to as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.launch.hosts import Host
from shoal.launch.messages import RankTask
from shoal.launch.on_hosts import Watcher, run_on_hosts

TAMPER = """
import pathlib, sys
print("said first", flush=True)
if sys.argv[1]:
    pathlib.Path(sys.argv[1]).write_text("mine")
"""


@pytest.mark.parametrize("is_spoilt", [True, False])
def test_a_log_that_the_script_overwrites_is_told_of(tmp_path: Path, is_spoilt: bool) -> None:
    run = tmp_path / "run"
    run.mkdir()
    told: list[str] = []
    words = ["-c", TAMPER, str(run / "logs/rank0.log") if is_spoilt else ""]
    cause = run_on_hosts(
        [Host(name="localhost")],
        run,
        lambda sites, ways: [RankTask(rank=0, arguments=words, environment={})],
        Watcher(lambda host, rank, stream, text: None, tell=told.append),
        project=tmp_path,
        sync=False,
        threads=1,
    )
    assert cause is None
    if is_spoilt:
        (text,) = told
        assert text.startswith(f"{run / 'logs/rank0.log'} is not what its rank said")
    else:
        assert told == []
        assert (run / "logs/rank0.log").read_text() == "said first\n"
