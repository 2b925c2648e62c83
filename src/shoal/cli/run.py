"""`shoal run`: any script on several ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.hosts_run import RESULTS_VARIABLE, name_of, run_script, tell
from shoal.cli.options import Hosts, NoSync, no_sync_faults
from shoal.errors import SettingsError
from shoal.launch.agents import is_this_host
from shoal.launch.hosts import read_hosts
from shoal.launch.local import Interrupted, Listener, RankCommand, Stream, run_ranks
from shoal.launch.missed import Missed
from shoal.launch.outcome import RankEnd, describe, end_in
from shoal.launch.output import text_of, under
from shoal.launch.scripts import as_copied
from shoal.network import reserve_port
from shoal.rendezvous.ways import Way, inherited_environment, variables_of
from shoal.report import run_folder
from shoal.settings import THREADS_VARIABLE, threads_each, threads_in_environment


def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its own arguments."),
    ],
    workers: Annotated[
        int | None, typer.Option(help="How many ranks to start on this host. Default: 2.")
    ] = None,
    hosts: Hosts = None,
    no_sync: NoSync = False,
    out: Annotated[
        str,
        typer.Option(help="Run folders are made in here; one that nothing is put into is removed."),
    ] = "runs",
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module, as with python -m.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Compute threads of each rank. Default: $OMP_NUM_THREADS, "
            "else its host's cores / ranks there."
        ),
    ] = None,
) -> None:
    """Start a script on several ranks of this host, or of several hosts, with RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT, LOCAL_RANK and LOCAL_WORLD_SIZE set.

    shoal.join() in the script finds them, and so does torch.distributed with env://. What the
    script puts into the folder $SHOAL_RESULTS is kept in the run folder.
    """
    faults = no_sync_faults(no_sync, hosts)
    where = []
    if hosts is not None and workers is not None:
        faults.append("--workers cannot be used with --hosts, which says how many are started.")
    if hosts is not None:
        try:
            where = read_hosts(hosts)
        except SettingsError as error:
            faults += error.faults
    workers = 2 if workers is None else workers
    if workers < 1:
        faults.append(f"--workers {workers}: must be at least 1.")
    if threads is not None and threads < 1:
        faults.append(f"--threads {threads}: must be at least 1.")
    faults += run_folder.faults(out)
    if not module and not Path(command[0]).is_file():
        faults.append(f"{command[0]}: there is no such script (a module needs -m before it).")
    elif not module and not no_sync and not all(is_this_host(host) for host in where):
        copied = as_copied(command[0], Path.cwd())
        if copied is None:
            faults.append(
                f"{command[0]}: is outside of {Path.cwd()}, and only the current folder travels to "
                "the hosts. Start from a folder that holds it; or say --no-sync, where all hosts "
                "have both at the same path."
            )
        else:
            command = [copied, *command[1:]]
    if faults:
        raise SettingsError(faults)
    if where:
        run_script(where, command, module=module, threads=threads, out=out, sync=not no_sync)
        return
    with run_folder.folder_while_needed(out, name_of(command)) as folder:
        _run_here(command, folder, workers=workers, module=module, threads=threads)


def _run_here(
    command: list[str], folder: Path, *, workers: int, module: bool, threads: int | None
) -> None:
    port = reserve_port()
    commands = []
    for rank in range(workers):
        way = Way(
            kind="tcp", rank=rank, size=workers, host="127.0.0.1", port=port,
            local_rank=rank, local_size=workers,
        )  # fmt: skip
        env = inherited_environment(**variables_of(way), PYTHONUNBUFFERED="1")
        env[RESULTS_VARIABLE] = str(folder.absolute())
        env[THREADS_VARIABLE] = str(threads or threads_in_environment() or threads_each(workers))
        env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings name nobody and nothing
        argv = [sys.executable, *(["-m"] if module else []), *command]
        commands.append(RankCommand(rank=rank, argv=argv, environment=env))

    def show(rank: int, stream: Stream, line: bytes) -> None:
        prefix = f"[{rank}] " if workers > 1 else ""
        print(under(prefix, text_of(line)), file=getattr(sys, stream), flush=True)

    missed = Missed(tell)

    def on_event(rank: int, line: bytes) -> RankEnd | None:
        missed.note_event(rank, line)
        return end_in(rank, line)

    def on_end(end: RankEnd) -> None:
        if end.return_code == 0:  # else the run is over
            missed.note_end(end.rank, end.host)

    try:
        cause = run_ranks(commands, Listener(on_line=show, on_event=on_event, on_end=on_end))
    except Interrupted as interrupted:
        print("shoal: interrupted.", file=sys.stderr)
        raise typer.Exit(interrupted.exit_code) from None
    if cause is not None:
        print(f"shoal: {describe(cause)}", file=sys.stderr)
        raise typer.Exit(cause.exit_code)
