"""Processes that a rank forks: they have its links, and none of their threads."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import SHOAL

SOON_S = 60.0

SCRIPT = """
import os, sys, torch, shoal

with shoal.join(timeout_s=30) as crew:
    link, other = crew.link(sys.argv[1]), 1 - crew.rank
    link.isend(crew.rank, other).wait()
    link.recv(other)
    job = link.irecv(other)
    if crew.rank == 0:
        for number, use in enumerate([
            lambda: link.send(torch.ones(2_000_000), other),
            lambda: link.recv(other, timeout_s=1),
            lambda: job.wait(1),
            link.close,
            lambda: sys.exit(0),
        ]):
            child = os.fork()
            if not child:
                try:
                    use()
                except shoal.WireError as error:
                    assert "forked" in str(error)
                    os._exit(10 + number)
            assert child, "a child has come out of it alive"
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    link.isend(crew.rank, other)
    print("came:", job.wait(), flush=True)
"""


@pytest.mark.parametrize("transport", ["zmq", "dist"])
def test_a_forked_process_cannot_use_the_links_of_its_parent(
    start, tmp_path: Path, transport: str
) -> None:
    """It waited for ever, or what it said in its parent's name ended the other rank by SIGABRT.

    To close them, or to leave as the parent does, is nothing to it.
    """
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    run = start(*SHOAL, "run", "--workers", "2", "--threads", "1", str(path), transport)
    assert run.end(SOON_S) == 0, run.said
    said = [line.removeprefix("[0] ") for line in run.out.splitlines() if line.startswith("[0]")]
    assert said == ["10", "11", "12", "1", "0", "came: 1"], run.said
    assert "[1] came: 0" in run.out
