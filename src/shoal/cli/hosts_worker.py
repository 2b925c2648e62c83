"""`shoal worker --hosts`: workers on other hosts, with keys for them and for the boss here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from shoal.cli.hosts_run import begin_line, owners, show, tell
from shoal.errors import SettingsError
from shoal.launch.addresses import Site, address_here
from shoal.launch.hosts import Host
from shoal.launch.local import Interrupted
from shoal.launch.messages import RankTask
from shoal.launch.on_hosts import Watcher, run_on_hosts
from shoal.launch.outcome import describe
from shoal.rendezvous.ways import Way
from shoal.report.run_folder import folder_while_needed
from shoal.report.waiting import waiting_line
from shoal.wire.keys import (
    authorized_meanwhile,
    default_authorized_keys_path,
    default_key_path,
    new_pair,
    own_name,
    read_pair,
    write_pair,
)

INSECURE = (
    "--insecure: these workers have no keys, and nothing that they and their boss say is encrypted:"
    " whoever is on the network may read it, or take either side's place. The boss must be made "
    "with insecure=True."
)


def workers_on_hosts(
    hosts: list[Host],
    boss: str,
    options: list[str],
    *,
    device: str,
    threads: int | None,
    insecure: bool,
    sync: bool,
    out: str = "runs",
) -> None:
    """One on every slot, until Ctrl-C. boss: HOST:PORT; or :PORT, of a boss on this host.

    options: more words for each `shoal worker`.
    """
    if not boss.rpartition(":")[2].isdecimal():
        raise SettingsError([f"--boss {boss}: expected HOST:PORT; or :PORT, for a boss here."])
    with (
        folder_while_needed(out, "workers") as folder,
        _keys(insecure) as (secret_files, words),
    ):

        def make_tasks(sites: list[Site], ways: list[Way]) -> list[RankTask]:
            where = (
                f"{address_here([site.hello for site in sites])}{boss}"
                if boss.startswith(":")
                else boss
            )
            arguments = ["-m", "shoal", "worker", "--boss", where, *words, *options]
            devices = [site.host.device or device for site in owners(sites)]
            return [
                RankTask(rank=n, arguments=[*arguments, f"--device={name}"], environment={})
                for n, name in enumerate(devices)
            ]

        watcher = Watcher(show, notify=waiting_line(sys.stderr), tell=tell, begin_line=begin_line)
        try:
            cause = run_on_hosts(
                hosts, folder, make_tasks, watcher,
                project=Path.cwd(), sync=sync, threads=threads, secret_files=secret_files,
                has_results=False,
            )  # fmt: skip
        except Interrupted as interrupted:
            raise typer.Exit(interrupted.exit_code) from None
    if cause is not None:
        print(f"shoal: {describe(cause)}", file=sys.stderr)
        raise typer.Exit(cause.exit_code)


@contextmanager
def _keys(insecure: bool) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Secret files for the workers, and what must be said to them.

    They share a new key, which the boss on this host trusts for as long as they run; its own key,
    made if there is none, is the only other one that they trust.
    """
    if insecure:
        tell(INSECURE)
        yield {}, ["--insecure"]
        return
    path = default_key_path()
    if not path.exists():
        write_pair(path, new_pair(), own_name())
    boss, workers = read_pair(path), new_pair()
    files = {"key": f"{workers.secret}\n", "authorized_keys": f"{boss.public} boss\n"}
    with authorized_meanwhile(default_authorized_keys_path(), workers.public, "workers"):
        yield files, ["--boss-key", "boss"]
