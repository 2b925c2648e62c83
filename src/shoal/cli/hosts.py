"""`shoal hosts init` and `shoal hosts install`: make hosts ready for --hosts."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from shoal.errors import RunFailed, SettingsError
from shoal.launch.agents import Agents
from shoal.launch.hosts import Host, read_hosts
from shoal.launch.installing import install as install_on
from shoal.launch.messages import Here

hosts_app = typer.Typer(
    name="hosts",
    help="Make other machines ready for --hosts.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Names = Annotated[list[str], typer.Argument(metavar="HOST...", help="As you type them for ssh.")]


@hosts_app.command()
def init(
    names: Names,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("hosts.toml"),
    force: Annotated[bool, typer.Option("--force", help="Write over a file.")] = False,
) -> None:
    """Ask each host what it is, and write a hosts.toml.

    shoal hosts init laptop desktop
    """
    if out.exists() and not force:
        raise SettingsError([f"{out} is there already. Say --force to write over it, or --out."])
    hosts = read_hosts(",".join(names))
    with Agents(hosts, keep_going=True) as agents:
        hellos = agents.arrivals()
        lost = [loss.text for loss in agents.lost.values()]
    if lost:
        raise RunFailed("\n".join([*lost, f"{out} was not written."]))
    out.write_text("\n".join(_table(host, hellos[host.name]) for host in hosts))
    typer.echo(f"{out}: {', '.join(host.name for host in hosts)}. The first one leads.")


@hosts_app.command()
def install(
    names: Names,
    pip: Annotated[
        str, typer.Option(help="More words for pip there, for example --pip '--index-url URL'.")
    ] = "",
) -> None:
    """Install this version of shoal, with the torch that is here, in a venv on each host.

    shoal hosts install desktop
    """
    install_on(read_hosts(",".join(names)), shlex.split(pip), typer.echo)


def _table(host: Host, hello: Here) -> str:
    lines = [f"[hosts.{_key(host.name)}]  # {hello.cores} cores, torch {hello.torch}"]
    if host.target != host.name:
        lines.append(f'ssh = "{host.target}"')
    if hello.seen_as:
        lines.append(f'address = "{hello.seen_as}"')
    lines.append(f"slots = {host.slots}")
    lines.append(f'python = "{hello.python}"')
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return f'"{name}"' if "." in name else name
