"""What ranks leave: their logs, written here as they speak, and their results, fetched at the end.

What hosts left goes into a folder of each; from there, what the leader left into the run folder.
"""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from shoal.closing import Closing
from shoal.errors import RunFailed, ShoalError, StorageError
from shoal.launch.addresses import Site
from shoal.launch.agents import Agents
from shoal.launch.copying import Copy, can_rsync, copy_all
from shoal.launch.hosts import Host
from shoal.launch.messages import Clean
from shoal.report.run_folder import storage_errors


class Logs(Closing):
    """A file for each rank, with the bytes that it wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, IO[bytes]] = {}
        self._has_failed = False
        self._sizes: dict[int, int] = {}
        """What was written, by rank."""

    def begin(self, ranks: Sequence[int]) -> None:
        """One that says nothing has a file too."""
        with storage_errors(self._folder):
            self._folder.mkdir(exist_ok=True)
        self._sizes = dict.fromkeys(ranks, 0)
        for rank in ranks:
            with storage_errors(self._path(rank)):
                self._path(rank).touch()

    def write(self, rank: int, data: bytes) -> None:
        """A failure is raised once; what ranks say while they are ended for it is not written."""
        if self._has_failed:
            return
        try:
            with storage_errors(self._path(rank)):
                if rank not in self._files:
                    self._files[rank] = self._path(rank).open("ab", buffering=0)
                while data:  # a disk that fills up takes a part, and raises only the next time
                    taken = self._files[rank].write(data)
                    self._sizes[rank] += taken
                    data = data[taken:]
        except StorageError:
            self._has_failed = True
            raise

    def spoilt(self) -> list[str]:
        """What is to be told of those that somebody else has written to, such as a script that
        leads on this host: it has the run folder for its own."""
        if self._has_failed:
            return []
        others = [self._path(n) for n, size in self._sizes.items() if _size(self._path(n)) != size]
        return [
            f"{path} is not what its rank said: something else has written there, or removed it. "
            f"In the run folder the name {self._folder.name} is taken; let your script use another."
            for path in others
        ]

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class Results(Closing):
    """On the hosts where they are not here already."""

    def __init__(
        self, sites: Sequence[Site], run_folder: Path, *, may_be_missed: bool = True
    ) -> None:
        """may_be_missed: somebody wants to know where those are that were not fetched."""
        self._sites = sites
        self._run_folder = run_folder
        self._may_be_missed = may_be_missed
        self._own = [Path(site.results) for site in sites[1:] if site.is_here]
        for folder in self._own:  # ranks of this host find it there, and write into it
            with storage_errors(folder):
                folder.mkdir(exist_ok=True)

    def stay(self, among: Container[str] | None = None) -> list[str]:
        """What is to be told of those that nobody has looked at; among: the names of hosts."""
        others = [s for s in self._sites if not s.is_here]
        places = [_place(s) for s in others if among is None or s.host.name in among]
        if not places or not self._may_be_missed:
            return []
        return [f"what ranks left, if anything, stays there: {', '.join(places)}"]

    def fetch(self, agents: Agents, limit_s: float) -> list[str]:
        """What there is, from all that are still with us, which may remove it then. Returns what
        went wrong, and where it lies."""
        wanted = [site for site in self._sites if site.host in agents.with_results]
        faults = self.stay(agents.lost)
        failed: list[Host] = []

        def stays(host: Host, there: str, error: ShoalError) -> None:
            failed.append(host)
            faults.append(f"{error}\nThe results stay there: {host.name}:{there}")

        def on_failure(copy: Copy, error: RunFailed) -> None:
            stays(copy.host, copy.there, error)

        copies = []
        for site in wanted:
            try:
                copies.append(self._copy(site))
            except StorageError as error:
                stays(site.host, site.results, error)
        try:
            copy_all(copies, limit_s, on_failure)
        finally:
            self._lift()
        agents.tell([site.host for site in self._sites if site.host not in failed], Clean())
        return faults

    def _copy(self, site: Site) -> Copy:
        here = self._run_folder / site.host.name
        with storage_errors(here):
            here.mkdir(exist_ok=True)
        by_rsync = site.hello.has_rsync and can_rsync()
        return Copy(site.host, here, site.results, by_rsync, site.run, is_back=True)

    def _lift(self) -> None:
        """What the leader left. What would lie on something of ours, such as the ranks' logs, or of
        another host's, stays in the folder of its host."""
        leader = self._sites[0]
        folder = self._run_folder / leader.host.name
        if leader.is_here or not folder.is_dir():
            return
        for path in list(folder.iterdir()):
            target = self._run_folder / path.name
            with suppress(OSError):  # a folder that may not be written to cannot be moved
                if not os.path.lexists(target):
                    path.rename(target)
        with suppress(OSError):  # something has stayed
            folder.rmdir()

    def close(self) -> None:
        """A folder that nothing was put into is removed."""
        for folder in self._own:
            with suppress(OSError):  # something is in it
                folder.rmdir()


def _place(site: Site) -> str:
    return f"{site.host.name}:{site.results}"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
