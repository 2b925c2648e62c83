"""Output that goes to a full disk."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from processes import ENOUGH_S, SHOAL, clean_environment


@pytest.mark.parametrize("words", [("--version",), ("run", "hello.py"), ("train", "--help")])
def test_what_cannot_be_written_is_told_once(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "hello.py").write_text("print('hello')")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*SHOAL, *words],
            cwd=tmp_path,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=ENOUGH_S,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "shoal: what this command says cannot be written: No space left on device. Free some space "
        "where its output goes, or send it elsewhere.\n"
    )
