"""`shoal run` and `shoal train` with --hosts: what is started there, and how it is shown here."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import typer

from shoal.cli.order import RankOrder
from shoal.errors import RunFailed
from shoal.launch.addresses import Site
from shoal.launch.hosts import Host
from shoal.launch.local import Interrupted
from shoal.launch.messages import RankTask
from shoal.launch.missed import Missed
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

    missed = Missed(tell)
    watcher = Watcher(
        show, missed.note_event, waiting_line(sys.stderr), tell, begin_line,
        on_end=lambda host, rank: missed.note_end(rank, host.name),
    )  # fmt: skip
    try:
        with folder_while_needed(out, name_of(command)) as folder, _told_where(folder):
            cause = run_on_hosts(
                hosts, folder, make_tasks, watcher,
                project=Path.cwd(), sync=sync, threads=threads, secret_files=keys_of_run(),
                uses_interfaces=True,
            )  # fmt: skip
    except Interrupted as interrupted:
        raise typer.Exit(interrupted.exit_code) from None
    if cause is not None:
        print(f"shoal: {describe(cause)}", file=sys.stderr)
        _tell_where(folder)
        raise typer.Exit(cause.exit_code)


def name_of(command: list[str]) -> str:
    """Of a run, by its script or module."""
    return command[0].rpartition("/")[2].removesuffix(".py")


def train_on_hosts(
    hosts: list[Host], settings: TrainSettings, terminal: Terminal, *, sync: bool
) -> int:
    """A training run; returns the exit code."""
    try:
        return _train_in_folder(hosts, settings, terminal, sync)
    except Interrupted as interrupted:
        return interrupted.exit_code


def _train_in_folder(
    hosts: list[Host], settings: TrainSettings, terminal: Terminal, sync: bool
) -> int:
    with ExitStack() as stack:
        if settings.verify:  # nothing is kept of it
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        else:
            name = settings.name or settings.model.rpartition(":")[2]
            folder = stack.enter_context(folder_while_needed(settings.out, name))
            stack.enter_context(_told_where(folder))
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
            arguments = ["-m", "shoal.cli.rank", msgspec.json.encode(order).decode()]
            quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
            tasks.append(RankTask(rank=way.rank, arguments=arguments, environment=quiet))
        return tasks

    finished: list[events.Event] = []

    def on_event(rank: int, line: bytes) -> None:
        if rank != 0 or end_in(rank, line) is not None:
            return
        event = events.decode(line)
        if isinstance(event, events.Finished):  # it says what is kept here, which is to come yet
            finished.append(_seen_from_here(event, folder))
        else:
            terminal.handle(event)

    def on_line(host: Host, rank: int, stream: str, text: str) -> None:
        terminal.log(f"{host.name} {rank}", text)

    def notify(text: str) -> None:
        terminal.handle(events.Waiting(text=text))

    cause = run_on_hosts(
        hosts, folder, make_tasks, Watcher(on_line, on_event, notify, tell, begin_line),
        project=Path.cwd(), sync=sync, threads=settings.threads, secret_files=keys,
        uses_interfaces=True,
    )  # fmt: skip
    if cause is not None:
        terminal.failure(describe(cause), cause.traceback)
        return cause.exit_code
    if not settings.verify:
        note_folder(folder)
    for event in finished:
        terminal.handle(event)
    return 0


def show(host: Host, rank: int, stream: str, text: str) -> None:
    """A line of a rank's, in one piece: where a signal cuts it off, none is left without its end,
    to come out when this program has said its last."""
    line = under(f"[{host.name} {rank}] ", text)
    print(f"{line}\n", end="", file=getattr(sys, stream), flush=True)


def begin_line() -> None:
    print(file=sys.stderr, flush=True)


def tell(text: str) -> None:
    """Beside an error, or what may become one."""
    print(f"shoal: {text}", file=sys.stderr, flush=True)


@contextmanager
def _told_where(folder: Path) -> Iterator[None]:
    try:
        yield
    except (Interrupted, RunFailed):
        _tell_where(folder)
        raise


def _tell_where(folder: Path) -> None:
    """What there is of a run that did not come to its end, if it had begun."""
    with suppress(OSError):  # the terminal may be gone
        if any(folder.iterdir()):
            tell(f"what there is of this run is in {folder}")


def owners(sites: list[Site]) -> list[Site]:
    """By rank."""
    return [site for site in sites for _ in range(site.host.slots)]


def keys_of_run() -> dict[str, str]:
    """One key for all ranks of a run, which trust nobody else: no step by hand is needed."""
    return {"key": f"{new_pair().secret}\n", "authorized_keys": ""}


def _seen_from_here(event: events.Finished, folder: Path) -> events.Finished:
    """The run folder is here, wherever the leader was."""
    summary = msgspec.structs.replace(event.summary, folder=str(folder))
    return msgspec.structs.replace(event, summary=summary)
