"""`shoal train`: a model from the zoo, or the user's own, on local ranks or as one rank of many."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shoal.cli.ending import exit_now
from shoal.cli.hosts_run import train_on_hosts
from shoal.cli.options import Hosts, NoSync, no_sync_faults
from shoal.cli.order import RankOrder
from shoal.errors import EXIT_FAILED, EXIT_INTERRUPTED, SettingsError
from shoal.launch.agents import is_this_host
from shoal.launch.hosts import Host, read_hosts
from shoal.launch.local import Interrupted, Listener, RankCommand, Stream, run_ranks
from shoal.launch.outcome import RankEnd, describe, end_in
from shoal.launch.output import text_of
from shoal.network import describe_interfaces, interfaces, reserve_port
from shoal.rendezvous.ways import Way, find_way, inherited_environment, quiet_torch
from shoal.report import events
from shoal.report.download_bar import DownloadBar
from shoal.report.terminal import Terminal, own_stdout
from shoal.settings import (
    SCHEDULES,
    SYNCS,
    TrainSettings,
    cache_dir,
    default_microbatches,
    threads_each,
    whole_batch_note,
)
from shoal.train.check import check
from shoal.train.data import catalog
from shoal.train.models.catalog import MODELS

DEFAULTS = TrainSettings()


def train(
    workers: Annotated[
        int | None, typer.Option(help="Ranks to start on this host. Default: 1.")
    ] = None,
    sync: Annotated[
        str | None,
        typer.Option(
            help=f"How replicas are kept equal: {', '.join(SYNCS)}. Default: {DEFAULTS.sync}; "
            "with --transport zmq and no --stages: ring."
        ),
    ] = None,
    transport: Annotated[
        str,
        typer.Option(
            help="What carries messages from rank to rank: dist (torch.distributed) or zmq."
        ),
    ] = DEFAULTS.transport,
    stages: Annotated[
        int, typer.Option(help="Cut the model into so many, each on a rank of its own.")
    ] = DEFAULTS.stages,
    boss: Annotated[
        bool,
        typer.Option(
            "--boss",
            help="One process drives the model, whose stages are on --workers of this host.",
        ),
    ] = False,
    schedule: Annotated[
        str | None,
        typer.Option(
            help=f"In which order stages work: {', '.join(SCHEDULES)}. Default: {SCHEDULES[-1]}."
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            help="Cut each batch into so many. Default: twice the stages; sequential: always 1."
        ),
    ] = None,
    cut: Annotated[
        list[str] | None,
        typer.Option(
            help="A module of the model that a stage begins with; once for each stage but the "
            "first. Default: where the slowest stage is fastest, by a short profile."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="Secret key for zmq between machines. Default: that of `shoal keygen`."),
    ] = None,
    authorized_keys: Annotated[
        str | None, typer.Option(help="Public keys that zmq trusts. Default: beside the key.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let zmq go between machines without keys.")
    ] = False,
    model: Annotated[
        str, typer.Option(help=f"{', '.join(MODELS)}, or package.module:factory.")
    ] = DEFAULTS.model,
    data: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(catalog.NAMES)}, or package.module:factory that returns "
            "(train, test) datasets."
        ),
    ] = DEFAULTS.data,
    data_dir: Annotated[
        str | None, typer.Option(help="Where the data files are. Default: the cache.")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="The global batch, shared out over the ranks.")
    ] = DEFAULTS.batch_size,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = DEFAULTS.epochs,
    optimizer: Annotated[str, typer.Option(help="sgd, adam or adamw.")] = DEFAULTS.optimizer,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = DEFAULTS.lr,
    momentum: Annotated[float, typer.Option(help="Of sgd.")] = DEFAULTS.momentum,
    seed: Annotated[
        int, typer.Option(help="Decides initial weights and the order of samples.")
    ] = DEFAULTS.seed,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = DEFAULTS.device,
    threads: Annotated[
        int | None, typer.Option(help="Compute threads of each rank. Default: cores / workers.")
    ] = None,
    out: Annotated[str, typer.Option(help="Run folders are made in here.")] = DEFAULTS.out,
    name: Annotated[str | None, typer.Option(help="Name of the run. Default: the model's.")] = None,
    log_every: Annotated[
        int, typer.Option(help="Steps between two lines of metrics.jsonl.")
    ] = DEFAULTS.log_every,
    hosts: Hosts = None,
    no_sync: NoSync = False,
    init: Annotated[
        str | None,
        typer.Option(
            help="Where ranks of several machines meet: tcp://HOST:PORT, file:///PATH or env://."
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Which rank this is, from 0. With --workers: the first.")
    ] = None,
    world_size: Annotated[int | None, typer.Option(help="How many ranks there are in all.")] = None,
    interface: Annotated[
        str | None,
        typer.Option(help="Network interface. Default: the one on the route to the leader."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Longest wait for another rank, in seconds.")
    ] = DEFAULTS.timeout_s,
    verify: Annotated[
        bool, typer.Option(help="Do not train: compare a few steps with one process.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")
    ] = False,
    debug: Annotated[bool, typer.Option(help="Show tracebacks of shoal's own errors.")] = False,
) -> None:
    """Train a model on ranks of this host, or as one rank among several machines.

    shoal train --workers 4 --sync ring

    shoal train --stages 2 --transport zmq

    shoal train --hosts laptop,desktop:2

    shoal train --init tcp://192.168.0.1:23456 --rank 0 --world-size 2
    """
    given_workers = workers
    if boss:
        stages, workers, schedule = _of_boss(
            stages, workers, schedule, sync, [init, rank, world_size]
        )
        transport = "zmq"
    elif stages > 1:
        schedule = schedule or SCHEDULES[-1]
        if microbatches is None:
            microbatches = default_microbatches(schedule, stages)
        elsewhere = [hosts, init, rank, world_size]
        if all(each is None for each in elsewhere) and find_way().kind == "alone":
            workers = workers or stages
    if note := whole_batch_note("--microbatches", schedule, microbatches or 1):
        microbatches = 1
    settings = TrainSettings(
        model=model,
        data=data,
        data_dir=None if data_dir is None else str(Path(data_dir).absolute()),
        sync=sync or ("ring" if transport == "zmq" and stages == 1 else DEFAULTS.sync),
        transport=transport,
        stages=stages,
        boss=boss,
        schedule=schedule,
        microbatches=1 if microbatches is None else microbatches,
        cuts=cut and [name for each in cut for name in each.split(",")],
        key=key,
        authorized_keys=authorized_keys,
        insecure=insecure,
        batch_size=batch_size,
        epochs=epochs,
        optimizer=optimizer,
        lr=lr,
        momentum=momentum,
        seed=seed,
        device=device,
        threads=threads,
        out=out,
        name=name,
        log_every=log_every,
        verify=verify,
        timeout_s=timeout,
        debug=debug,
    )
    if hosts is not None:
        others = {"workers": given_workers, "init": init, "rank": rank, "world-size": world_size}
        others |= {"interface": interface, "boss": boss or None}
        where = _plan_hosts(settings, hosts, others)
        with own_stdout(reserve=as_json) as stdout, Terminal(as_json, out=stdout) as terminal:
            if note:
                terminal.note(note)
            code = train_on_hosts(where, settings, terminal, sync=not no_sync)
            if terminal.verdict is not None and not terminal.verdict.passed:
                code = EXIT_FAILED
        raise typer.Exit(code)
    with own_stdout(reserve=as_json) as stdout:
        more = no_sync_faults(no_sync, hosts)
        ways = _plan(settings, workers, init, rank, world_size, interface, more)
        _prepare_data(settings)
        quiet_torch()
        with Terminal(as_json, quiet=not ways[0].speaks, out=stdout) as terminal:
            if note and ways[0].speaks:
                terminal.note(note)
            if len(ways) == 1 and workers is None:
                # Brings torch, which a launcher does not need.
                from shoal.train.rank import run_rank

                code = run_rank(settings, ways[0], interface, terminal.handle)
                if code == EXIT_INTERRUPTED:
                    terminal.interrupted()
                if code != 0:
                    terminal.close()
                    exit_now(code)
            else:
                code = _launch(settings, ways, interface, terminal)
            if terminal.verdict is not None and not terminal.verdict.passed:
                code = EXIT_FAILED
    raise typer.Exit(code)


def _of_boss(
    stages: int,
    workers: int | None,
    schedule: str | None,
    sync: str | None,
    elsewhere: list[object],
) -> tuple[int, int, str]:
    """Stages, workers and schedule of a boss; every worker has one stage."""
    faults = []
    if any(each is not None for each in elsewhere):
        faults.append(
            "--boss starts its workers on this host; for other hosts run shoal worker there, and a "
            "script with shoal.Boss here. Leave out --init, --rank and --world-size."
        )
    if sync is not None:
        faults.append("--sync: is about replicas, and a boss has one copy of the model.")
    if workers is not None and workers < 1:
        faults.append(f"--workers {workers}: must be at least 1.")
    elif stages not in (1, workers or stages):
        faults.append(f"--stages {stages}: with --boss there are as many stages as --workers.")
    if faults:
        raise SettingsError(faults)
    count = workers or (stages if stages > 1 else 2)
    return count, count, schedule or "gpipe"


def _plan_hosts(settings: TrainSettings, text: str, others: Mapping[str, object]) -> list[Host]:
    """The hosts of a run; raises with every fault together."""
    faults = [
        f"--{name} cannot be used with --hosts, which says where ranks are started."
        for name, value in others.items()
        if value is not None
    ]
    hosts: list[Host] = []
    try:
        hosts = read_hosts(text)
    except SettingsError as error:
        faults += error.faults
    here = next((host for host in hosts if is_this_host(host)), None)
    if here is not None and here.device is not None:
        settings = msgspec.structs.replace(settings, device=here.device)
    faults += check(settings, sum(host.slots for host in hosts) or 1, is_elsewhere=here is None)
    if faults:
        raise SettingsError(faults)
    return hosts


def _plan(
    settings: TrainSettings,
    workers: int | None,
    init: str | None,
    rank: int | None,
    world_size: int | None,
    interface: str | None,
    more: list[str],
) -> list[Way]:
    """The ranks of this host; raises with every fault of the settings and of the way together, and
    with those that are known already."""
    faults = list(more)
    ways: list[Way] = []
    local = workers is not None and init is None and rank is None and world_size is None
    if workers is not None and workers < 1:
        faults.append(f"--workers {workers}: must be at least 1.")
    try:
        if local:
            found = find_way()
            if found.kind != "alone":
                faults.append(
                    f"--workers {workers} starts ranks, but RANK, WORLD_SIZE or Slurm's variables "
                    f"say that this process is rank {found.rank} of {found.size} already. Leave "
                    "--workers out, or unset them."
                )
            ways = _local_ways(max(workers or 1, 1))
        else:
            first = find_way(init, rank, world_size)
            ways = _several(first, workers or 1)
    except SettingsError as error:
        faults += error.faults
    num_ranks = ways[0].size if ways else (world_size or workers or 1)
    if ways and ways[0].kind == "file" and Path(ways[0].path).is_dir():
        faults.append(
            f"--init file://{ways[0].path}: is a folder. Give the path of a file that does not "
            f"exist yet, for example file://{Path(ways[0].path) / 'meeting'}."
        )
    if interface is not None and interface not in interfaces():
        faults.append(
            f"--interface {interface}: there is none of this name. This host has: "
            f"{describe_interfaces()}."
        )
    faults += check(settings, num_ranks, keeps_folder=not ways or ways[0].rank == 0)
    if faults:
        raise SettingsError(faults)
    return ways


def _local_ways(workers: int) -> list[Way]:
    port = reserve_port()
    return [
        Way(
            kind="tcp", rank=rank, size=workers, host="127.0.0.1", port=port,
            local_rank=rank, local_size=workers,
        )
        for rank in range(workers)
    ]  # fmt: skip


def _several(first: Way, workers: int) -> list[Way]:
    """With --workers beside --init: this host has ranks `first`, `first` + 1, and so on."""
    if workers == 1:
        return [first]
    if first.rank + workers > first.size:
        raise SettingsError(
            [
                f"--rank {first.rank} --workers {workers}: this host would have ranks "
                f"{first.rank} to {first.rank + workers - 1}, but --world-size {first.size} ends "
                f"at {first.size - 1}."
            ]
        )
    return [
        dataclasses.replace(first, rank=first.rank + i, local_rank=i, local_size=workers)
        for i in range(workers)
    ]


def _prepare_data(settings: TrainSettings) -> None:
    """Fetch what is missing once, here, and not in every rank."""
    data_dir = None if settings.data_dir is None else Path(settings.data_dir)
    with DownloadBar() as bar:
        catalog.prepare(settings.data, data_dir, cache_dir(), bar.update)


def _launch(
    settings: TrainSettings,
    ways: list[Way],
    interface: str | None,
    terminal: Terminal,
) -> int:
    threads = settings.threads or threads_each(len(ways))
    env = inherited_environment(OMP_NUM_THREADS=str(threads))
    port = ways[0].port if settings.boss else 0
    commands = []
    for way in ways[:1] if settings.boss else ways:
        order = RankOrder(settings=settings, way=way, interface=interface, boss_port=port)
        argv = [sys.executable, "-m", "shoal.cli.rank", msgspec.json.encode(order).decode()]
        commands.append(RankCommand(rank=way.rank, argv=argv, environment=env))
    for number in range(1, len(ways) + 1) if settings.boss else ():
        argv = [sys.executable, "-m", "shoal", "worker", "--once", "--quiet"]
        argv += ["--boss", f"127.0.0.1:{port}", "--device", settings.device]
        commands.append(RankCommand(rank=number, argv=argv, environment=env))

    speaker = ways[0].rank

    def on_event(rank: int, line: bytes) -> RankEnd | None:
        end = end_in(rank, line)
        if end is None and rank == speaker:
            terminal.handle(events.decode(line))
        return end

    def on_line(rank: int, stream: Stream, line: bytes) -> None:
        terminal.log(f"rank {rank}", text_of(line))

    try:
        cause = run_ranks(commands, Listener(on_line=on_line, on_event=on_event))
    except Interrupted as interrupted:
        terminal.interrupted()
        return interrupted.exit_code
    if cause is not None:
        terminal.failure(describe(cause), cause.traceback)
        return cause.exit_code
    return 0
