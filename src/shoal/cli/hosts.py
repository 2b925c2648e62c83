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
from shoal.report.run_folder import storage_errors
from shoal.settings import unknown

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
    faults = []
    if out.exists() and not force:
        faults.append(f"{out} is there already. Say --force to write over it, or --out.")
    if not out.parent.is_dir():
        faults.append(f"--out {out}: there is no folder {out.parent}.")
    hosts: list[Host] = []
    try:
        hosts = read_hosts(",".join(names))
    except SettingsError as error:
        faults += error.faults
    if faults:
        raise SettingsError(faults)
    with Agents(hosts, keep_going=True) as agents:
        hellos = agents.arrivals()
        lost = [loss.text for loss in agents.lost.values()]
    if lost:
        raise RunFailed("\n".join([*lost, f"{out} was not written."]))
    with storage_errors(out):
        out.write_text("\n".join(_table(host, hellos[host.name]) for host in hosts))
    typer.echo(f"{out}: {', '.join(host.name for host in hosts)}. The first one leads.")


@hosts_app.command()
def install(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOST...]", help="As you type them for ssh; with --hosts: which of its hosts."
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(help="The path of a hosts.toml. Without HOST: on all hosts of it."),
    ] = None,
    pip: Annotated[
        str, typer.Option(help="More words for pip there, for example --pip '--index-url URL'.")
    ] = "",
) -> None:
    """Install this version of shoal, with the torch that is here, in a venv on each host; or for
    the python that the hosts.toml gives.

    shoal hosts install desktop

    shoal hosts install desktop --hosts hosts.toml
    """
    try:
        words = shlex.split(pip)
    except ValueError as error:
        raise SettingsError(
            [f"--pip {pip}: {error}. Close what you opened, as for a shell."]
        ) from error
    install_on(_chosen(names or [], hosts), words, typer.echo)


def _chosen(names: list[str], hosts: str | None) -> list[Host]:
    if hosts is None:
        if not names:
            raise SettingsError(["say on which hosts: HOST..., or --hosts hosts.toml."])
        return read_hosts(",".join(names))
    found = {host.name: host for host in read_hosts(hosts)}
    faults = [f for name in names for f in unknown(f"--hosts {hosts}: host", name, found)]
    if faults:
        raise SettingsError(faults)
    return [found[name] for name in names] or list(found.values())


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
