"""All that this process's children start: found and ended, even in sessions of their own.

On Linux a process that outlives its parent is handed to whoever offers to adopt it, else to the
first process of the system. We offer, so no rank's child gets away from us; in return we must take
note of the end of each that we adopted. Elsewhere only those are found whose parents are alive.
Should we be killed ourselves, a mark in their environment tells whose they were.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from contextlib import suppress

import psutil

KILL_S = 2.0
"""For a family that grows while it is being ended."""
RUN_VARIABLE = "SHOAL_RUN"
"""In the environment of a run's ranks, and so of what they start: its name."""
_IS_LINUX = sys.platform.startswith("linux")


class Descendants:
    """Those that come from now on."""

    def __init__(self) -> None:
        if _IS_LINUX:
            set_child_subreaper = 36
            ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1)
        self._own = psutil.Process()
        self._others = {child.pid for child in self._own.children()}
        """Children that were there before: they are none of our concern."""

    def kill(self) -> None:
        """At once, until there are none."""
        deadline = time.monotonic() + KILL_S
        while (alive := self._alive()) and time.monotonic() < deadline:
            for process in alive:
                with suppress(psutil.Error):  # it has just gone, or is another user's
                    process.kill()

    def _alive(self) -> list[psutil.Process]:
        found = []
        for child in self._own.children():
            if child.pid not in self._others:
                with suppress(psutil.NoSuchProcess):
                    found += [child, *child.children(recursive=True)]
        return [process for process in found if _is_alive(process)]

    def reap(self, others: set[int]) -> None:
        """Take note of the end of adopted ones; `others` have someone else who does."""
        if not _IS_LINUX:
            return
        with suppress(ChildProcessError):  # there are no children at all
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in others | self._others:
                    return  # its turn comes first
                os.waitpid(ended.si_pid, 0)


def kill_marked(run: str) -> int:
    """Where nobody is left whose descendants they are: those that carry the mark of this run, as
    far as they are this user's. How many there were."""
    ended: set[int] = set()
    deadline = time.monotonic() + KILL_S
    while (alive := _marked(run)) and time.monotonic() < deadline:
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
                ended.add(process.pid)
    return len(ended)


def kill_program(pid: int, word: str) -> None:
    """If this process still is one whose command has that word in it."""
    with suppress(psutil.Error):  # it has gone, or is another user's
        process = psutil.Process(pid)
        if any(word in part for part in process.cmdline()):
            process.kill()
            process.wait(KILL_S)


def _marked(run: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has just gone, or is another user's
            if process.environ().get(RUN_VARIABLE) == run and _is_alive(process):
                found.append(process)
    return found


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
