"""A run on several hosts, from one of them: agents, code, ranks, logs, results.

agents up, versions equal  ->  code there  ->  ranks run  ->  results back  ->  folders removed

Results come back however the ranks ended. Folders are removed by the agents, when they leave.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from shoal.errors import RunFailed, SettingsError, StorageError
from shoal.launch.addresses import Site, meeting_address, with_interfaces
from shoal.launch.agents import Agents
from shoal.launch.copying import LIMIT_S, Copy, can_rsync, copy_all, ignore_faults
from shoal.launch.hosts import Host
from shoal.launch.local import Interrupted, stop_signals
from shoal.launch.messages import (
    Ended,
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
from shoal.launch.output import shown
from shoal.launch.results import Logs, Results
from shoal.launch.sweeping import sweep
from shoal.rendezvous.ways import Way
from shoal.settings import threads_in_environment

NEEDED_BYTES = 100 * 2**20
"""On a host's disk, for code and results."""
RESCUE_S = 30.0
"""How long results may take to come back after an error, or after Ctrl-C."""


@dataclass(frozen=True)
class Watcher:
    """Whoever shows what the ranks do."""

    on_line: Callable[[Host, int, str, str], None]
    """Host, rank, stream, text."""
    on_event: Callable[[int, bytes], None] = lambda rank, line: None
    notify: Callable[[str], None] = lambda text: None
    """What is being waited for."""
    tell: Callable[[str], None] = lambda text: None
    """What is to be known beside the error that a run ends with."""
    begin_line: Callable[[], None] = lambda: None
    """Before that, where one was cut in its middle."""
    on_end: Callable[[Host, int], None] = lambda host, rank: None
    """Of a rank, with exit code 0."""


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
    has_results: bool = True,
) -> RankEnd | None:
    """All of it. Returns the rank to blame, or None if all went well.

    run_folder: gets each rank's log, and the results of the leader.
    make_tasks: of each rank, when sites and ways are known.
    uses_interfaces: ranks are told which is theirs, so what hosts.toml says of them must be true.
    has_results: ranks may leave some, and whoever waits for them is told where they stayed.
    """
    if sync and (faults := ignore_faults(project)):
        raise SettingsError(faults)
    # The logs are closed last: agents that leave have last words.
    with stop_signals(), Logs(run_folder / "logs") as logs, Agents(hosts) as agents:
        run = f"{run_folder.name}-{secrets.token_hex(4)}"
        # With their names, since hosts may share the folder that runs are in.
        runs = {host.name: f"{run}-{host.name}" for host in hosts}
        tidy = partial(sweep, hosts, runs, agents.lost, watcher.notify)
        try:
            try:
                watcher.notify(f"waiting for {', '.join(host.name for host in hosts)}.")
                sites = _prepare(agents, hosts, runs, run_folder, project, sync, watcher.notify)
                if uses_interfaces:
                    sites = with_interfaces(agents, sites)
            finally:
                watcher.notify("")
            ways = _ways(agents, sites)
        except RunFailed:
            try:
                told = tidy()
            except Interrupted:  # what went wrong is told all the same
                told = tidy(gives_up=True)
            for text in told:
                watcher.tell(text)
            raise
        tasks = make_tasks(sites, ways)
        wanted = str(threads) if threads else threads_in_environment()
        starts = []
        for site in sites:
            own = [task for task in tasks if _host_of(hosts, task.rank) is site.host]
            starts.append(
                Start(
                    folder=site.folder, ranks=own, threads=wanted, run=site.run,
                    secrets=secret_files or {},
                )
            )  # fmt: skip
        logs.begin([task.rank for task in tasks])
        with Results(sites, run_folder, may_be_missed=has_results) as results:
            return _run(agents, starts, tidy, results, logs, watcher)


class _Tidy(Protocol):
    def __call__(self, *, gives_up: bool = False) -> list[str]: ...


def _run(
    agents: Agents,
    starts: Sequence[Start],
    tidy: _Tidy,
    results: Results,
    logs: Logs,
    watcher: Watcher,
) -> RankEnd | None:
    is_ending = is_showing = False
    hidden: dict[int, list[tuple[Host, Line]]] = {}

    def show(host: Host, line: Line) -> None:
        nonlocal is_showing
        is_showing = True
        watcher.on_line(host, line.rank, line.stream, shown(line.data))
        is_showing = False

    def keep(line: Line) -> None:
        try:
            logs.write(line.rank, line.data)
        except StorageError:
            if not is_ending:  # else there is more to be told of, or nothing any more
                raise

    def on_report(host: Host, report: Line | Said | Ended) -> None:
        if is_ending:  # the terminal may be gone, or held up: what is left to do needs none
            return
        if isinstance(report, Said):
            watcher.on_event(report.rank, report.event.encode())
        elif isinstance(report, Ended):
            watcher.on_end(host, report.rank)
        elif report.is_shown:
            show(host, report)
        else:
            hidden.setdefault(report.rank, []).append((host, report))

    try:
        cause = agents.run(starts, on_report, keep)
        if cause is not None:  # the agents leave it to us whose traceback is shown
            for host, line in hidden.get(cause.rank, []):
                show(host, line)
        faults = tidy() + results.fetch(agents, LIMIT_S)
    except BaseException:
        is_ending = True
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which may follow an error of the terminal
        with suppress(OSError):
            told = _rescue(agents, tidy, results) + logs.spoilt()
            if is_showing:
                watcher.begin_line()
            for text in told:
                watcher.tell(text)
        raise
    is_ending = True
    for text in logs.spoilt():
        watcher.tell(text)
    if cause is None and faults:
        raise RunFailed("\n".join(faults))
    for text in faults:
        watcher.tell(text)
    return cause


def _rescue(agents: Agents, tidy: _Tidy, results: Results) -> list[str]:
    """After an error, or after Ctrl-C; a second one ends it at once. What is to be told of it."""
    told = None
    try:
        with stop_signals((signal.SIGINT, signal.SIGTERM)):
            agents.stop()
            told = tidy()
            return told + results.fetch(agents, RESCUE_S)
    except Interrupted:
        told = tidy(gives_up=True) if told is None else told
        return told + results.stay()


def _prepare(
    agents: Agents,
    hosts: Sequence[Host],
    runs: Mapping[str, str],
    run_folder: Path,
    project: Path,
    sync: bool,
    notify: Callable[[str], None],
) -> list[Site]:
    hellos = agents.hellos()
    others = [host for host in hosts if not agents.is_here(host)]
    orders = {
        host.name: Prepare(
            run=runs[host.name],
            folder=host.folder,
            needed_bytes=NEEDED_BYTES,
            project=None if sync else str(project),
            advice=host.advise('folder = "PATH"'),
        )
        for host in others
    }
    made = agents.ask_each(orders, Prepared)
    sites, copies = [], []
    for host in hosts:
        hello = hellos[host.name]
        if host not in others:
            own = run_folder if host is hosts[0] else run_folder / host.name
            results = str(own.absolute())
            sites.append(Site(host, hello, True, str(project), results, runs[host.name]))
            continue
        folders = made[host.name]
        by_rsync = hello.has_rsync and can_rsync()
        if sync:
            code, run = folders.code, runs[host.name]
            copies.append(Copy(host, project, code, by_rsync, run, out=run_folder.parent))
        place = folders.code if sync else str(project)
        sites.append(Site(host, hello, False, place, folders.results, runs[host.name]))
    if copies:
        notify(f"copying {project} to {', '.join(copy.host.name for copy in copies)}.")
    copy_all(copies, meanwhile=agents.look)  # a copy may take long, and be in vain
    return sites


def _ways(agents: Agents, sites: Sequence[Site]) -> list[Way]:
    leader = sites[0]
    size = sum(site.host.slots for site in sites)
    port = agents.ask(leader.host, FindPort(), Port).port
    if size == 1:  # a script of torch's own wants to be told where to meet, even then
        return [Way(host="127.0.0.1", port=port)]
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
    return ways


def _host_of(hosts: Sequence[Host], rank: int) -> Host:
    for host in hosts:
        if rank < host.slots:
            return host
        rank -= host.slots
    raise IndexError(rank)
