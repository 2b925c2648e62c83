"""Processes for tests: started for real, watched through files, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from warm import Fork, Host, Nursery

from shoal.network import reserve_port

SHOAL = (sys.executable, "-m", "shoal")

ENOUGH_S = 60.0
"""For what has to happen, however slow the machine."""
PROMPT_S = 3.0
"""Ctrl-C is promised in under a second; a machine that runs other tests may be slower."""


def until(condition: Callable[[], object], what: str, limit_s: float = ENOUGH_S) -> None:
    """Wait for a condition, never for seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"after {limit_s:g} s still not: {what}"
        time.sleep(0.02)


def clean_environment(**changes: str) -> dict[str, str]:
    """Without what would make a process believe that it is a rank."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in names and not key.startswith(("SLURM_", "LOCAL_", "TORCHELASTIC_"))
    }
    return {**kept, **changes}


class Running:
    """One process. What it says goes to files, which can be read while it runs."""

    def __init__(
        self,
        folder: Path,
        argv: Sequence[str],
        nursery: Nursery | None = None,
        host: Host | None = None,
        **environment: str,
    ) -> None:
        """nursery: has it started by a fork, without the imports, on any host: see warm.py."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._err = folder / "out", folder / "err"
        env = clean_environment(**environment)
        self.process: subprocess.Popen[bytes] | Fork
        with self._out.open("wb") as out, self._err.open("wb") as err:
            if nursery is not None:
                self.process = nursery.start(argv, env, folder, self._out, self._err, host)
                return
            assert host is None, "give its command as argv"
            self.process = subprocess.Popen(
                argv, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def said(self) -> str:
        return self.out + self.err

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition that needs this process to be alive."""

        def met() -> object:
            if (result := condition()) or self.process.poll() is None:
                return result
            raise AssertionError(f"ended with {self.process.returncode}: {self.said}")

        until(met, "what was waited for")

    def until_says(self, text: str) -> None:
        self.until(lambda: text in self.said)

    def family(self) -> list[psutil.Process]:
        """Every process that it started, directly or not."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, limit_s: float = ENOUGH_S) -> int:
        return self.process.wait(limit_s)

    def interrupt(self, signum: int = signal.SIGINT) -> float:
        """Ctrl-C; the seconds until it is gone."""
        begun = time.monotonic()
        self.process.send_signal(signum)
        self.end()
        return time.monotonic() - begun

    def kill(self) -> None:
        if self.process.poll() is None:
            with suppress(psutil.NoSuchProcess):  # it ends at this moment
                for child in self.family():
                    child.kill()
            self.process.kill()
        self.process.wait()


class Ranks:
    """Some ranks of a script, without a launcher, which would end them all when one ends badly."""

    def __init__(self, nursery: Nursery, folder: Path, size: int, *argv: str) -> None:
        """argv: the script and its arguments."""
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
        place |= {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        self.ranks = [
            Running(
                folder / f"rank{rank}", (sys.executable, *argv), nursery, RANK=str(rank), **place
            )
            for rank in range(size)
        ]

    def end(self, limit_s: float = ENOUGH_S) -> list[int]:
        """Their codes, by rank."""
        deadline = time.monotonic() + limit_s
        try:
            return [rank.end(max(0.0, deadline - time.monotonic())) for rank in self.ranks]
        finally:
            self.kill()

    @property
    def said(self) -> str:
        return "\n".join(rank.said for rank in self.ranks)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()


def all_gone(processes: Sequence[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
