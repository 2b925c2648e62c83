"""`shoal run` and `shoal train` with --hosts: what is started there, and how it is shown here."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec
import typer

from shoal.cli.order import RankOrder
from shoal.launch.addresses import Site
from shoal.launch.hosts import Host
from shoal.launch.local import EVENTS_FD, Interrupted
from shoal.launch.messages import RankTask
from shoal.launch.on_hosts import Watcher, run_on_hosts
from shoal.launch.outcome import describe, end_in
from shoal.launch.output import under
from shoal.rendezvous.ways import Way, variables_of, variables_of_choices
from shoal.report import events
from shoal.report.run_folder import folder_while_needed, note_folder
from shoal.report.terminal import Terminal
from shoal.report.waiting import waiting_line
from shoal.settings import TrainSettings
from shoal.wire.keys import new_pair

RESULTS_VARIABLE = "SHOAL_RESULTS"
"""Names a folder to a script: what it puts there comes back into the run folder."""


def run_script(
    hosts: list[Host],
    command: list[str],
    *,
    module: bool,
    threads: int | None,
    out: str,
    sync: bool,
) -> None:
    """A script on every slot of the hosts."""

    def make_tasks(sites: list[Site], ways: list[Way]) -> list[RankTask]:
        arguments = [*(["-m"] if module else []), *command]
        tasks = []
        for way, site in zip(ways, owners(sites), strict=True):
            own = {"TORCH_CPP_LOG_LEVEL": "ERROR", RESULTS_VARIABLE: site.results}
            choices = variables_of_choices(site.interface, site.host.device)
            environment = {**variables_of(way), **choices, **own}
            tasks.append(RankTask(rank=way.rank, arguments=arguments, environment=environment))
        return tasks

    def show(host: Host, rank: int, stream: str, text: str) -> None:
        print(under(f"[{host.name} {rank}] ", text), file=getattr(sys, stream), flush=True)

    watcher = Watcher(on_line=show, notify=waiting_line(sys.stderr), tell=tell)
    try:
        with folder_while_needed(out, name_of(command)) as folder:
            cause = run_on_hosts(
                hosts, folder, make_tasks, watcher,
                project=Path.cwd(), sync=sync, threads=threads, secret_files=keys_of_run(),
                uses_interfaces=True,
            )  # fmt: skip
    except Interrupted as interrupted:
        raise typer.Exit(interrupted.exit_code) from None
    if cause is not None:
        print(f"shoal: {describe(cause)}", file=sys.stderr)
        raise typer.Exit(cause.exit_code)


def name_of(command: list[str]) -> str:
    """Of a run, by its script or module."""
    return command[0].rpartition("/")[2].removesuffix(".py")


def train_on_hosts(
    hosts: list[Host], settings: TrainSettings, terminal: Terminal, *, sync: bool
) -> int:
    """A training run; returns the exit code."""
    with ExitStack() as stack:
        if settings.verify:  # nothing is kept of it
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        else:
            name = settings.name or settings.model.rpartition(":")[2]
            folder = stack.enter_context(folder_while_needed(settings.out, name))
        return _train(hosts, settings, terminal, folder, sync)


def _train(
    hosts: list[Host], settings: TrainSettings, terminal: Terminal, folder: Path, sync: bool
) -> int:
    keys = {} if settings.key or settings.insecure else keys_of_run()

    def make_tasks(sites: list[Site], ways: list[Way]) -> list[RankTask]:
        tasks = []
        for way, site in zip(ways, owners(sites), strict=True):
            own = msgspec.structs.replace(
                settings, folder=site.results, device=site.host.device or settings.device
            )
            order = RankOrder(settings=own, way=way, interface=site.interface)
            arguments = ["-m", "shoal.cli.rank", EVENTS_FD, msgspec.json.encode(order).decode()]
            quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
            tasks.append(RankTask(rank=way.rank, arguments=arguments, environment=quiet))
        return tasks

    def on_event(rank: int, line: bytes) -> None:
        if rank == 0 and end_in(rank, line) is None:
            terminal.handle(_seen_from_here(events.decode(line), folder))

    def on_line(host: Host, rank: int, stream: str, text: str) -> None:
        terminal.log(f"{host.name} {rank}", text)

    def notify(text: str) -> None:
        terminal.handle(events.Waiting(text=text))

    try:
        cause = run_on_hosts(
            hosts, folder, make_tasks, Watcher(on_line, on_event, notify, tell),
            project=Path.cwd(), sync=sync, threads=settings.threads, secret_files=keys,
            uses_interfaces=True,
        )  # fmt: skip
    except Interrupted as interrupted:
        return interrupted.exit_code
    if cause is not None:
        terminal.failure(describe(cause), cause.traceback)
        return cause.exit_code
    if not settings.verify:
        note_folder(folder)
    return 0


def tell(text: str) -> None:
    """Beside an error."""
    print(f"shoal: {text}", file=sys.stderr, flush=True)


def owners(sites: list[Site]) -> list[Site]:
    """By rank."""
    return [site for site in sites for _ in range(site.host.slots)]


def keys_of_run() -> dict[str, str]:
    """One key for all ranks of a run, which trust nobody else: no step by hand is needed."""
    return {"key": f"{new_pair().secret}\n", "authorized_keys": ""}


def _seen_from_here(event: events.Event, folder: Path) -> events.Event:
    """The run folder is here, wherever the leader was."""
    if not isinstance(event, events.Finished):
        return event
    summary = msgspec.structs.replace(event.summary, folder=str(folder))
    return msgspec.structs.replace(event, summary=summary)
