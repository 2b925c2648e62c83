"""`shoal status`: how a boss and its workers are doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from shoal.boss.calls import Status


def status(
    boss: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the boss listens.")],
    key: Annotated[str | None, typer.Option(help="This machine's secret key.")] = None,
    authorized_keys: Annotated[str | None, typer.Option(help="Keys that are trusted.")] = None,
    boss_key: Annotated[
        str | None, typer.Option(help="The boss's public key, or its name.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without keys.")] = False,
) -> None:
    """Show a boss's workers: host, stage, device, memory, step, last seen."""
    from shoal.boss.address import Address
    from shoal.boss.applying import ask
    from shoal.wire.open_link import LinkSettings

    settings = LinkSettings(key=key, authorized_keys=authorized_keys, insecure=insecure)
    show(ask(Address.read(boss).endpoint, settings, boss_key or ""), Console())


def show(found: Status, console: Console) -> None:
    console.print(
        f"{found.script} (pid {found.pid} of {found.user} on {found.host}), step {found.step}, "
        f"{len(found.workers)} of {found.wanted} workers",
        highlight=False,
    )
    if not found.workers:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("worker", "host", "pid", "stage", "modules", "device"):
        table.add_column(name)
    for name in ("memory", "step", "last seen"):
        table.add_column(name, justify="right")
    for each in found.workers:
        table.add_row(
            str(each.rank),
            each.host,
            str(each.pid),
            "–" if each.stage is None else str(each.stage),
            ", ".join(each.modules) or "–",
            each.device,
            f"{each.memory_bytes / 2**20:.0f} MiB" if each.memory_bytes else "–",
            str(each.step),
            "lost" if each.is_lost else f"{each.last_seen_s:.0f} s ago" + ", busy" * each.is_busy,
        )
    console.print(table)
