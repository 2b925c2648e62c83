"""`shoal worker`: hold a stage of whatever model a boss brings."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shoal.boss.address import Address
from shoal.cli.options import NoSync, no_sync_faults
from shoal.errors import EXIT_INTERRUPTED, SettingsError
from shoal.launch.hosts import Host, read_hosts
from shoal.settings import DEVICES, boss_in_environment, unknown


def worker(
    boss: Annotated[
        str | None,
        typer.Option(
            help="Where the boss listens, HOST:PORT. Default: $MODEL_HOST and $MODEL_PORT."
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="End with the first boss, instead of waiting for more.")
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="A package of this machine whose modules a boss may use. Again for more."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(help="Compute threads. Default: all cores.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="This machine's secret key. Default: ~/.config/shoal/key.")
    ] = None,
    authorized_keys: Annotated[
        str | None,
        typer.Option(help="Keys of the boss and of other workers. Default: beside the key."),
    ] = None,
    boss_key: Annotated[
        str | None,
        typer.Option(help="The boss's public key, or its name, where several are authorized."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Go beyond this host without keys.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing but errors.")] = False,
    hosts: Annotated[
        str | None,
        typer.Option(
            help="Start workers on these hosts, over ssh: laptop,desktop:2 or the path of a "
            "hosts.toml; with keys for them and for a boss on this host. --boss :PORT is this host."
        ),
    ] = None,
    no_sync: NoSync = False,
) -> None:
    """Work for a boss: wait for it, hold the stage that it brings, and wait for the next one.

    Needs none of the boss's code for models that are made of torch's own layers.
    """
    address = boss or boss_in_environment()
    faults = unknown("--device", device, DEVICES) + no_sync_faults(no_sync, hosts)
    where: list[Host] = []
    if hosts is not None:
        own = {"key": key, "authorized-keys": authorized_keys, "boss-key": boss_key}
        faults += [
            f"--{name} cannot be used with --hosts, which makes keys for its workers."
            for name, value in own.items()
            if value is not None
        ]
        try:
            where = read_hosts(hosts)
        except SettingsError as error:
            faults += error.faults
    if not address:
        faults.append(
            "--boss: say where the boss listens, as HOST:PORT, or set MODEL_HOST and MODEL_PORT."
        )
    else:
        faults += _address_faults(address, is_here=hosts is not None)
    faults += [
        f"--allow {name}: must be the name of a package, without dots: all in it is allowed."
        for name in allow or []
        if not name.isidentifier()
    ]
    if threads is not None and threads < 1:
        faults.append(f"--threads {threads}: must be at least 1.")
    if faults:
        raise SettingsError(faults)
    if hosts is not None:
        from shoal.cli.hosts_worker import workers_on_hosts  # which brings zmq

        options = [word for name in allow or [] for word in ("--allow", name)]
        options += ["--once"] * once + ["--quiet"] * quiet
        workers_on_hosts(
            where,
            address,
            options,
            device=device,
            threads=threads,
            insecure=insecure,
            sync=not no_sync,
        )
        return
    # Imported here: the launcher, which shares this program, starts without torch.
    import torch

    from shoal.boss.applying import Employer
    from shoal.boss.worker import serve
    from shoal.crew import choose_device
    from shoal.interrupts import prompt_interrupts
    from shoal.pipeline.known import Allowed
    from shoal.report.waiting import waiting_line
    from shoal.wire.open_link import LinkSettings

    place = Address.read(address)
    if threads is not None:
        torch.set_num_threads(threads)
    employer = Employer(
        place.endpoint,
        place.host,
        LinkSettings(key=key, authorized_keys=authorized_keys, insecure=insecure),
        boss_key or "",
    )

    def tell(text: str) -> None:
        if not quiet:
            print(f"shoal worker: {text}", flush=True)

    def say_nothing(text: str) -> None:
        pass

    try:
        with prompt_interrupts():
            serve(
                employer,
                allowed=Allowed(frozenset(allow or [])),
                device=choose_device(device, 0),
                once=once,
                notify=say_nothing if quiet else waiting_line(sys.stderr),
                tell=tell,
            )
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _address_faults(address: str, *, is_here: bool) -> list[str]:
    """Before anything is started. is_here: it may be :PORT, of this host."""
    _, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and not 0 < int(port) < 2**16:
        return [f"--boss {address}: a port is between 1 and 65535."]
    if is_here and address.startswith(":"):
        return []
    try:
        Address.read(address)
    except SettingsError as error:
        return [f"--boss: {fault}" for fault in error.faults]
    return []
