"""Code to the hosts, results back: by rsync where both sides have it, else by tar through ssh."""

from __future__ import annotations

import glob
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import RunFailed
from shoal.launch.hosts import Host
from shoal.launch.local import die_with_parent
from shoal.launch.ssh import ssh_argv
from shoal.report.run_folder import RUN_FOLDERS

IGNORED = (
    ".git", ".hg", ".svn", ".venv", "venv", "__pycache__", "*.pyc", "*.egg-info", ".eggs",
    ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", "node_modules",
    ".ipynb_checkpoints", ".idea", ".vscode", ".DS_Store", "runs",
)  # fmt: skip
IGNORE_FILE = ".shoalignore"
"""In the project's folder: more names to leave out, one a line."""
LIMIT_S = 600.0


@dataclass(frozen=True)
class Copy:
    """From a folder here to one there, or back."""

    host: Host
    here: Path
    there: str
    by_rsync: bool
    is_back: bool = False
    out: Path | None = None
    """Where run folders are made: those of this run and of earlier ones stay at home."""


def ignored(folder: Path) -> list[str]:
    """Names that stay at home."""
    own = folder / IGNORE_FILE
    lines = own.read_text().splitlines() if own.is_file() else []
    return [*IGNORED, *(line.strip() for line in lines if line.strip() and line[0] != "#")]


def copy_all(copies: Sequence[Copy]) -> None:
    """At the same time. Raises with the host, and with what its copying said."""
    running = [(copy, _begin(copy)) for copy in copies]
    deadline = time.monotonic() + LIMIT_S
    try:
        for copy, process in running:
            try:
                _, said = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RunFailed(
                    f"{copy.host.name}: copying {copy.here} took more than {LIMIT_S:g} s. Is there "
                    f"something large in it? Names in {IGNORE_FILE} stay at home."
                ) from None
            if process.returncode != 0:
                text = said.decode(errors="replace").strip()
                raise RunFailed(f"{copy.host.name}: {_what(copy)} failed: {text}")
    finally:
        for _, process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def can_rsync() -> bool:
    return shutil.which("rsync") is not None


def _what(copy: Copy) -> str:
    return f"copying {copy.there} from it" if copy.is_back else f"copying {copy.here} to it"


def run_folders(copy: Copy) -> list[str]:
    """Where in the folder they are, as a pattern; none if they are elsewhere."""
    if copy.out is None or copy.is_back:
        return []
    out, here = copy.out.resolve(), copy.here.resolve()
    if not out.is_relative_to(here):
        return []
    parts = [glob.escape(part) for part in out.relative_to(here).parts]
    return ["/".join([*parts, RUN_FOLDERS])]


def _begin(copy: Copy) -> subprocess.Popen[bytes]:
    names = [] if copy.is_back else ignored(copy.here)
    if copy.by_rsync:
        return _popen(_rsync(copy, names))
    there = shlex.quote(copy.there)
    if copy.is_back:
        pack, unpack = ssh_argv(copy.host, f"tar -C {there} -cz ."), _unpack(copy.here)
    else:
        names += [f"./{pattern}" for pattern in run_folders(copy)]
        excluded = [f"--exclude={name}" for name in names]
        pack = ["tar", "-C", str(copy.here), *excluded, "-cz", "."]
        unpack = ssh_argv(copy.host, f"tar -C {there} -xz")
    line = f"{shlex.join(pack)} | {shlex.join(unpack)}"
    return _popen(["bash", "-o", "pipefail", "-c", line])


def _unpack(folder: Path) -> list[str]:
    return ["tar", "-C", str(folder), "--no-same-owner", "-xz"]


def _rsync(copy: Copy, names: list[str]) -> list[str]:
    ssh = shlex.join(ssh_argv(copy.host, "")[:-2])
    names += [f"/{pattern}" for pattern in run_folders(copy)]
    excluded = [f"--exclude={name}" for name in names]
    here, there = f"{copy.here}/", f"{copy.host.target}:{copy.there}/"
    ends = [there, here] if copy.is_back else [here, there]
    return ["rsync", "-rlptz", "-e", ssh, *excluded, *ends]


def _popen(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
        preexec_fn=die_with_parent(),
    )
