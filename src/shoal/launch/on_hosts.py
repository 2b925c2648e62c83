"""A run on several hosts, from one of them: agents, code, ranks, logs, results.

agents up, versions equal  ->  code there  ->  ranks run  ->  results back  ->  folders removed
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.launch.addresses import Site, meeting_address, with_interfaces
from shoal.launch.agents import Agents
from shoal.launch.copying import Copy, can_rsync, copy_all
from shoal.launch.hosts import Host
from shoal.launch.local import stop_signals
from shoal.launch.messages import (
    Clean,
    FindPort,
    Line,
    Port,
    Prepare,
    Prepared,
    RankTask,
    Said,
    Start,
)
from shoal.launch.outcome import RankEnd
from shoal.rendezvous.ways import Way

NEEDED_BYTES = 100 * 2**20
"""On a host's disk, for code and results."""


@dataclass(frozen=True)
class Watcher:
    """Whoever shows what the ranks do."""

    on_line: Callable[[Host, int, str, str], None]
    """Host, rank, stream, text."""
    on_event: Callable[[int, bytes], None] = lambda rank, line: None
    notify: Callable[[str], None] = lambda text: None
    """What is being waited for."""


def run_on_hosts(
    hosts: Sequence[Host],
    run_folder: Path,
    make_tasks: Callable[[list[Site], list[Way]], list[RankTask]],
    watcher: Watcher,
    *,
    project: Path,
    sync: bool,
    threads: int | None,
    secret_files: dict[str, str] | None = None,
    uses_interfaces: bool = False,
) -> RankEnd | None:
    """All of it. Returns the rank to blame, or None if all went well.

    run_folder: gets each rank's log, and the results of the leader.
    make_tasks: of each rank, when sites and ways are known.
    uses_interfaces: ranks are told which is theirs, so what hosts.toml says of them must be true.
    """
    with stop_signals(), ExitStack() as stack:
        agents = stack.enter_context(Agents(hosts))
        watcher.notify(f"waiting for {', '.join(host.name for host in hosts)}.")
        sites = _prepare(agents, hosts, run_folder, project, sync)
        if uses_interfaces:
            sites = with_interfaces(agents, sites)
        watcher.notify("")
        ways = _ways(agents, sites)
        tasks = make_tasks(sites, ways)
        starts = []
        for site in sites:
            own = [task for task in tasks if _host_of(hosts, task.rank) is site.host]
            starts.append(
                Start(folder=site.folder, ranks=own, threads=threads, secrets=secret_files or {})
            )
        logs = _Logs(run_folder / "logs", stack)

        def on_report(host: Host, report: Line | Said) -> None:
            if isinstance(report, Said):
                watcher.on_event(report.rank, report.event.encode())
                return
            logs.write(report.rank, report.text)
            watcher.on_line(host, report.rank, report.stream, report.text)

        cause = agents.run(starts, on_report)
        _fetch(sites, agents.with_results, run_folder)
        agents.tell_all(Clean())
        return cause


def _prepare(
    agents: Agents, hosts: Sequence[Host], run_folder: Path, project: Path, sync: bool
) -> list[Site]:
    hellos = agents.hellos()
    others = [host for host in hosts if not agents.is_here(host)]
    run = f"{run_folder.name}-{secrets.token_hex(4)}"
    orders = {
        host.name: Prepare(run=run, folder=host.folder, needed_bytes=NEEDED_BYTES)
        for host in others
    }
    made = agents.ask_each(orders, Prepared)
    sites, copies = [], []
    for host in hosts:
        hello = hellos[host.name]
        if host not in others:
            sites.append(Site(host, hello, True, str(project), str(run_folder.absolute())))
            continue
        folders = made[host.name]
        by_rsync = hello.has_rsync and can_rsync()
        if sync:
            copies.append(Copy(host, project, folders.code, by_rsync, out=run_folder.parent))
        place = folders.code if sync else str(project)
        sites.append(Site(host, hello, False, place, folders.results))
    copy_all(copies)
    return sites


def _ways(agents: Agents, sites: Sequence[Site]) -> list[Way]:
    leader = sites[0]
    size = sum(site.host.slots for site in sites)
    port = agents.ask(leader.host, FindPort(), Port).port
    address = meeting_address(leader, sites)
    ways: list[Way] = []
    for site in sites:
        for slot in range(site.host.slots):
            ways.append(
                Way(
                    kind="tcp", rank=len(ways), size=size, host=address, port=port,
                    local_rank=slot, local_size=site.host.slots,
                )
            )  # fmt: skip
    return ways if size > 1 else [Way()]


def _host_of(hosts: Sequence[Host], rank: int) -> Host:
    for host in hosts:
        if rank < host.slots:
            return host
        rank -= host.slots
    raise IndexError(rank)


def _fetch(sites: Sequence[Site], wanted: Sequence[Host], run_folder: Path) -> None:
    """What the leader left goes right into the run folder, what others left into one of theirs."""
    copies = []
    for site in sites:
        if site.host in wanted:
            here = run_folder if site is sites[0] else run_folder / site.host.name
            here.mkdir(exist_ok=True)
            by_rsync = site.hello.has_rsync and can_rsync()
            copies.append(Copy(site.host, here, site.results, by_rsync, is_back=True))
    copy_all(copies)


class _Logs:
    """A file for each rank, made when it first says something."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._files: dict[int, IO[str]] = {}

    def write(self, rank: int, text: str) -> None:
        if rank not in self._files:
            self._folder.mkdir(exist_ok=True)
            path = self._folder / f"rank{rank}.log"
            self._files[rank] = self._stack.enter_context(path.open("w", buffering=1))
        self._files[rank].write(f"{text}\n")
