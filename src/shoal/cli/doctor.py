"""`shoal doctor`: are the hosts fit, and the ways between them?"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shoal.errors import EXIT_FAILED, SettingsError


def doctor(
    hosts: Annotated[
        str | None,
        typer.Option(
            help="Examine these hosts and every way between two of them, over ssh: "
            "laptop,desktop:2 or the path of a hosts.toml. Default: this host alone."
        ),
    ] = None,
    no_sync: Annotated[
        bool,
        typer.Option("--no-sync", help="This folder is on all hosts: compare its files as well."),
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="Try this port on every host, besides a free one.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Everything as one JSON object on standard output.")
    ] = False,
) -> None:
    """Check hosts and the network between them, and say what to do where something is wrong.

    The exit code is 1 if something is in the way of training.
    """
    import msgspec

    from shoal.cli.doctor_tables import show
    from shoal.doctor.examine import examine
    from shoal.doctor.verdicts import diagnose
    from shoal.launch.hosts import Host, read_hosts
    from shoal.launch.local import Interrupted
    from shoal.report.waiting import waiting_line

    if port is not None and not 0 < port < 2**16:
        raise SettingsError([f"--port {port}: a port is between 1 and 65535."])
    chosen = read_hosts(hosts) if hosts is not None else [Host(name=socket.gethostname())]
    notify = waiting_line(sys.stderr)
    project = Path.cwd() if no_sync else None
    try:
        facts = examine(chosen, project=project, fixed_port=port, notify=notify)
    except Interrupted as interrupted:
        raise typer.Exit(interrupted.exit_code) from None
    finally:
        notify("")
    diagnosis = diagnose(facts)
    if as_json:
        print(msgspec.json.encode(diagnosis).decode())
    else:
        show(diagnosis, Console(highlight=False, markup=False, emoji=False))
    if diagnosis.verdict == "bad":
        raise typer.Exit(EXIT_FAILED)
