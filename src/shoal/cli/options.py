"""Options that several commands have, said once."""

from __future__ import annotations

from typing import Annotated

import typer

Hosts = Annotated[
    str | None,
    typer.Option(
        help="Start ranks on these hosts, over ssh: laptop,desktop:2 or the path of a "
        "hosts.toml. The first one leads."
    ),
]
NoSync = Annotated[
    bool,
    typer.Option("--no-sync", help="With --hosts: this folder is on all of them already."),
]


def no_sync_faults(no_sync: bool, hosts: str | None) -> list[str]:
    if no_sync and hosts is None:
        return ["--no-sync: is about --hosts; without it nothing is copied."]
    return []
