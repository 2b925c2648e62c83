"""Code to the hosts, results back: by rsync where both sides have it, else by tar through ssh."""

from __future__ import annotations

import glob
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.closing import Closing
from shoal.errors import RunFailed
from shoal.launch.descendants import RUN_VARIABLE
from shoal.launch.hosts import Host
from shoal.launch.local import die_with_parent, signal_group
from shoal.launch.output import shown
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
POLL_S = 0.05
SAID_LINES = 20
"""Of what a copy that failed has said, the last ones are shown."""


@dataclass(frozen=True)
class Copy:
    """From a folder here to one there, or back."""

    host: Host
    here: Path
    there: str
    by_rsync: bool
    run: str
    """The name of the run's part there, by which the agent knows what to end with it."""
    is_back: bool = False
    out: Path | None = None
    """Where run folders are made: those of this run and of earlier ones stay at home."""


def ignored(folder: Path) -> list[str]:
    """What stays at home: names, wherever they are; after a "/", paths from the folder on."""
    own = folder / IGNORE_FILE
    lines = own.read_text(errors="surrogateescape").splitlines() if own.is_file() else []
    lines = [line.strip() for line in lines]
    return [*IGNORED, *(_pattern(line) for line in lines if line and line[0] not in "#!")]


def ignore_faults(folder: Path) -> list[str]:
    own = folder / IGNORE_FILE
    lines = own.read_text(errors="replace").splitlines() if own.is_file() else []
    return [
        f"{IGNORE_FILE}, line {number}: {line.strip()!r} would bring something back, which there "
        "is no way to say. Each line is a name or a path that stays at home."
        for number, line in enumerate(lines, start=1)
        if line.strip().startswith("!")
    ]


def _pattern(line: str) -> str:
    """As in a .gitignore: rsync, tar and fnmatch have each another idea of slashes."""
    line = line.rstrip("/").removeprefix("./")
    return f"/{line.lstrip('/')}" if "/" in line else line


def _raise(copy: Copy, error: RunFailed) -> None:
    raise error


def copy_all(
    copies: Sequence[Copy],
    limit_s: float = LIMIT_S,
    on_failure: Callable[[Copy, RunFailed], None] = _raise,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """At the same time. on_failure: is told of each that fails; else the first is raised.
    meanwhile: looks for reasons to give it all up, again and again."""
    with ExitStack() as stack:
        running = []
        for copy in copies:
            said = stack.enter_context(tempfile.TemporaryFile())
            running.append(stack.enter_context(_Running(copy, said)))
        deadline = time.monotonic() + limit_s
        while running:
            for each in [each for each in running if each.has_ended()]:
                running.remove(each)
                if error := each.failure():
                    on_failure(each.copy, error)
            meanwhile()
            if time.monotonic() > deadline:
                for each in running:
                    on_failure(each.copy, each.too_long(limit_s))
                return


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


class _Running(Closing):
    """A copy under way: one program, or two with a pipe between them."""

    def __init__(self, copy: Copy, said: IO[bytes]) -> None:
        """said: gets all that is said. A file: an ssh that stays to share its connection would
        hold a pipe open."""
        self.copy = copy
        self._said = said
        self._programs: list[subprocess.Popen[bytes]] = []
        try:
            programs = _programs(copy)
            for argv in programs:
                self._begin(argv, is_last=argv is programs[-1])
        except BaseException:
            self.close()
            raise
        for program in self._programs[:-1]:
            assert program.stdout is not None
            program.stdout.close()  # so that the first ends if the second does

    def _begin(self, argv: list[str], *, is_last: bool) -> None:
        try:
            program = subprocess.Popen(
                argv,
                stdin=self._programs[-1].stdout if self._programs else subprocess.DEVNULL,
                stdout=self._said if is_last else subprocess.PIPE,
                stderr=self._said,
                process_group=0,
                preexec_fn=die_with_parent(),
            )
        except OSError as error:
            raise RunFailed(
                f"{self.copy.host.name}: {_what(self.copy)} failed: {argv[0]}: {error.strerror}."
            ) from error
        self._programs.append(program)

    def has_ended(self) -> bool:
        """Waits a moment for it."""
        try:
            for program in self._programs:
                program.wait(POLL_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def failure(self) -> RunFailed | None:
        if all(program.returncode == 0 for program in self._programs):
            return None
        self._said.seek(0)
        lines = self._said.read().splitlines()[-SAID_LINES:]
        said = "".join(f"\n  {shown(line)}" for line in lines if line.strip())
        codes = ", ".join(str(program.returncode) for program in self._programs)
        said = said or f"\n  It said nothing (exit code {codes}). Is there room for it?"
        remedy = _remedy(said, self.copy)
        text = f"{self.copy.host.name}: {_what(self.copy)} failed.{said}"
        return RunFailed(f"{text}\n{remedy}" if remedy else text)

    def too_long(self, limit_s: float) -> RunFailed:
        text = f"{self.copy.host.name}: {_what(self.copy)} took more than {limit_s:g} s."
        remedy = f" Is there something large in it? Names in {IGNORE_FILE} stay at home."
        return RunFailed(text if self.copy.is_back else text + remedy)

    def close(self) -> None:
        for program in self._programs:
            signal_group(program.pid, signal.SIGKILL)
            program.wait()


def _remedy(said: str, copy: Copy) -> str:
    if "No space left" in said or "quota exceeded" in said:
        if copy.is_back:
            return f"There is no room for it here, in {copy.here}."
        return (
            f"There is no room for it there, in {copy.there}. Free some, or leave out what is "
            f"large by its name in {IGNORE_FILE}, or give another folder: "
            + copy.host.advise('folder = "PATH"')
        )
    if "is your shell clean" in said or "not look like a tar archive" in said:
        return (
            f"Something there prints a line at every login, in ~/.bashrc perhaps, and spoils what "
            f"is copied. `ssh {copy.host.target} true` must print nothing."
        )
    if "Permission denied (13)" in said or "Cannot open: Permission denied" in said:
        if copy.is_back:
            return f"Not all of it may be read there. Let yourself: chmod -R u+rX {copy.there}"
        return f"What you may not read stays at home if its name is in {IGNORE_FILE}."
    if "not found" in said or "Cannot exec" in said:
        return "rsync on both sides is needed, or tar on both."
    return ""


def _programs(copy: Copy) -> list[list[str]]:
    names = [] if copy.is_back else ignored(copy.here)
    names += [f"/{pattern}" for pattern in run_folders(copy)]
    uses_rsync = copy.by_rsync and ":" not in copy.host.target  # which it would take for the path
    if not uses_rsync:  # to tar, the folder that is copied is "./"
        names = [f".{name}" if name.startswith("/") else name for name in names]
    excluded = [f"--exclude={name}" for name in names]
    if uses_rsync:
        return [_rsync(copy, excluded)]
    tar = f"{_marked(copy)} tar -C {shlex.quote(copy.there)}"
    if copy.is_back:
        unpack = ["tar", "-C", str(copy.here), "--no-same-owner", "-x"]
        return [_compressed(ssh_argv(copy.host, f"{tar} -c .")), unpack]
    pack = ["tar", "-C", str(copy.here), *excluded, "-c", "."]
    return [pack, _compressed(ssh_argv(copy.host, f"{tar} -x"))]


def _compressed(ssh: list[str]) -> list[str]:
    """By ssh: tar would need a gzip for it, on both sides."""
    return [ssh[0], "-C", *ssh[1:]]


def _rsync(copy: Copy, excluded: list[str]) -> list[str]:
    ssh = shlex.join(ssh_argv(copy.host, "")[:-2])
    here, there = f"{copy.here}/", f"{copy.host.target}:{copy.there}/"
    ends = [there, here] if copy.is_back else [here, there]
    at_host = ["--rsync-path", f"{_marked(copy)} rsync"]
    # Results of the same size and second may be others: what came last counts, as with tar.
    all_of_it = ["--ignore-times"] if copy.is_back else []
    return ["rsync", "-rlptz", *all_of_it, "-e", ssh, *at_host, *excluded, *ends]


def _marked(copy: Copy) -> str:
    """What the program there is to begin with: sshd may keep it long after the cable was cut."""
    return f"env {shlex.quote(f'{RUN_VARIABLE}={copy.run}')}"
