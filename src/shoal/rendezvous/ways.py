"""Where to meet: from `--init` or the environment to one `Way`. Pure: the environment is passed in.

nothing set                         alone, a crew of one
--init tcp://host:port              rank 0 listens there, the others connect
--init file:///shared/path          a file that every rank can reach
RANK WORLD_SIZE MASTER_ADDR ..      env://, as torchrun and `shoal run` set them
SLURM_PROCID SLURM_STEP_NUM_TASKS   a step started by srun
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from shoal.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Way:
    """One rank's directions to the meeting."""

    kind: Literal["alone", "tcp", "file"] = "alone"
    rank: int = 0
    size: int = 1
    host: str = ""
    port: int = 0
    path: str = ""
    local_rank: int = 0
    """This rank's number among those on its host."""
    local_size: int = 1
    store_is_hosted: bool = False
    """torchrun's agent keeps the store: rank 0 must not listen, only connect."""
    speaks: bool = True
    """Whether this rank shows progress: of ranks whose output goes to one place, one does."""
    attempt: str = "0"
    """Keeps the keys of one attempt apart from the next in a store that outlives both."""

    @property
    def place(self) -> str:
        if self.kind == "tcp":
            host = f"[{self.host}]" if ":" in self.host else self.host
            return f"tcp://{host}:{self.port}"
        return f"file://{self.path}" if self.kind == "file" else "alone"


def find_way(
    init: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Way:
    """What the user typed comes first, then RANK and its like, then Slurm's, then alone."""
    env = os.environ if environment is None else environment
    if init is None or init == "env://":
        if init is None and rank is None and world_size is None:
            if env.get("RANK") or env.get("WORLD_SIZE"):
                return _from_environment(env)
            if env.get("SLURM_PROCID") and env.get("SLURM_STEP_NUM_TASKS"):
                return _from_slurm(env)
            return Way()
        merged = dict(env)
        if rank is not None:
            merged["RANK"] = str(rank)
        if world_size is not None:
            merged["WORLD_SIZE"] = str(world_size)
        return _from_environment(merged)
    return _from_url(init, rank, world_size, env)


def variables_of(way: Way) -> dict[str, str]:
    """The reverse: the variables that send a process on `way`."""
    return {
        "RANK": str(way.rank),
        "WORLD_SIZE": str(way.size),
        "LOCAL_RANK": str(way.local_rank),
        "LOCAL_WORLD_SIZE": str(way.local_size),
        "MASTER_ADDR": way.host,
        "MASTER_PORT": str(way.port),
    }


INTERFACE_VARIABLE, DEVICE_VARIABLE = "SHOAL_INTERFACE", "SHOAL_DEVICE"
TORCH_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def variables_of_choices(interface: str | None, device: str | None) -> dict[str, str]:
    """What a hosts.toml chooses for the ranks of a host, told to any script: `shoal.join()` takes
    both, torch.distributed the interface."""
    variables = {}
    if interface:
        variables = dict.fromkeys((INTERFACE_VARIABLE, *TORCH_INTERFACE_VARIABLES), interface)
    if device:
        variables[DEVICE_VARIABLE] = device
    return variables


def choices_of_environment() -> tuple[str | None, str | None]:
    """The reverse: interface and device, where a launcher has chosen them."""
    return os.environ.get(INTERFACE_VARIABLE), os.environ.get(DEVICE_VARIABLE)


def inherited_environment(**changes: str) -> dict[str, str]:
    """This process's environment, with changes, for a process that it starts."""
    return {**os.environ, **changes}


def ends_of_ssh(environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """In a process that ssh started: the caller's address, and the one it called. Else empty."""
    env = os.environ if environment is None else environment
    parts = env.get("SSH_CONNECTION", "").split()
    return (parts[0], parts[2]) if len(parts) == 4 else ("", "")


def quiet_torch() -> None:
    """Before torch is imported: keep its C++ side from warning, unless the user set a level.

    DDP, told to bear with unused parameters, else warns in every run that has none.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _from_url(url: str, rank: int | None, size: int | None, env: Mapping[str, str]) -> Way:
    faults: list[str] = []
    path = url.removeprefix("file://")  # not urlsplit's, which cuts names at '?' and '#'
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise SettingsError([f"--init {url}: {error}."]) from error
    port = None
    if parts.scheme == "tcp":
        try:
            port = parts.port or 0
        except ValueError as error:
            faults.append(f"--init {url}: {error}.")
        if not parts.hostname or port == 0:
            faults.append(f"--init {url}: expected tcp://HOST:PORT, as in tcp://192.168.0.1:23456.")
        elif parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
            faults.append(
                f"--init {url}: expected nothing but tcp://HOST:PORT. The rank and the world size "
                "are given by --rank and --world-size."
            )
        else:
            faults += _check_host(f"--init {url}", parts.hostname)
    elif parts.scheme == "file":
        if not url.startswith("file:///") or path.strip("/") == "":
            faults.append(f"--init {url}: expected three slashes, as in file:///mnt/shared/run1.")
    else:
        faults.append(f"--init {url}: expected tcp://HOST:PORT, file:///PATH or env://.")
    if rank is None:
        rank = _number(env, "RANK", faults)
    if size is None:
        size = _number(env, "WORLD_SIZE", faults)
    local_rank = _number(env, "LOCAL_RANK", faults) or 0
    local_size = _number(env, "LOCAL_WORLD_SIZE", faults) or 1
    if rank is None and not env.get("RANK"):
        faults.append(f"--init {url} needs --rank: which rank this process is, counted from 0.")
    if size is None and not env.get("WORLD_SIZE"):
        faults.append(f"--init {url} needs --world-size: how many ranks there are in all.")
    faults += _check_rank(rank, size)
    if faults or rank is None or size is None:
        raise SettingsError(faults)
    if size == 1:
        return Way()
    if parts.scheme == "file":
        return Way(
            kind="file", rank=rank, size=size, path=path,
            local_rank=local_rank, local_size=local_size,
        )  # fmt: skip
    return Way(
        kind="tcp", rank=rank, size=size, host=parts.hostname or "", port=port or 0,
        local_rank=local_rank, local_size=local_size,
    )  # fmt: skip


def _from_environment(env: Mapping[str, str]) -> Way:
    faults: list[str] = []
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not env.get(name)]
    alone = env.get("WORLD_SIZE") == "1" and env.get("RANK", "") in ("", "0")
    if alone and "MASTER_ADDR" in missing:
        return Way()
    if missing:
        given = ", ".join(f"{name}={env[name]}" for name in needed if env.get(name))
        faults.append(
            f"Meeting by env:// needs {', '.join(needed)}; missing: {', '.join(missing)}"
            + (f" (given: {given})." if given else ".")
            + " Set them, or give --init tcp://HOST:PORT --rank R --world-size N."
        )
    rank = _number(env, "RANK", faults)
    size = _number(env, "WORLD_SIZE", faults)
    port = _port(env, faults)
    faults += _check_host("MASTER_ADDR", env.get("MASTER_ADDR", ""))
    faults += _check_rank(rank, size)
    local_rank = _number(env, "LOCAL_RANK", faults)
    local_size = _number(env, "LOCAL_WORLD_SIZE", faults)
    if faults or rank is None or size is None or port is None:
        raise SettingsError(faults)
    if size == 1:
        return Way(local_rank=local_rank or 0, local_size=local_size or 1)
    return Way(
        kind="tcp",
        rank=rank,
        size=size,
        host=env["MASTER_ADDR"],
        port=port,
        local_rank=local_rank or 0,
        local_size=local_size or 1,
        store_is_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        speaks=not local_rank,
        attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _from_slurm(env: Mapping[str, str]) -> Way:
    """A step of srun: the first node of the step leads, on a port derived from the job's number."""
    faults: list[str] = []
    rank = _number(env, "SLURM_PROCID", faults)
    size = _number(env, "SLURM_STEP_NUM_TASKS", faults)
    local_rank = _number(env, "SLURM_LOCALID", faults)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    host = env.get("MASTER_ADDR") or first_node(nodes)
    job, step = (
        int(re.sub(r"\D", "", env.get(name, "")) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    port = _port(env, faults)
    if not host and size != 1:
        faults.append("Slurm's SLURM_STEP_NODELIST is empty: set MASTER_ADDR to the first node.")
    faults += _check_rank(rank, size)
    if faults or rank is None or size is None:
        raise SettingsError(faults)
    if size == 1:
        return Way()
    return Way(
        kind="tcp",
        rank=rank,
        size=size,
        host=host,
        # Below the ports that Linux gives to outgoing connections; another for the job's next step.
        port=port or 20_000 + (job + step) % 12_000,
        local_rank=local_rank or 0,
        local_size=first_count(env.get("SLURM_STEP_TASKS_PER_NODE", "1")),
        speaks=rank == 0,
    )


def first_node(nodelist: str) -> str:
    """The first host of Slurm's compressed list: `gpu[03-05,9],login` gives `gpu03`."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)  # to the first comma outside brackets
    first = match.group() if match else ""
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def first_count(tasks_per_node: str) -> int:
    """The first number of Slurm's `4(x2),3`."""
    match = re.match(r"\d+", tasks_per_node)
    return int(match.group()) if match else 1


def _number(env: Mapping[str, str], name: str, faults: list[str]) -> int | None:
    """None where it is not set, or is empty, or (with a fault) is no number."""
    if not env.get(name):
        return None
    try:
        return int(env[name])
    except ValueError:
        faults.append(f"{name}={env[name]}: expected a whole number.")
        return None


def _port(env: Mapping[str, str], faults: list[str]) -> int | None:
    port = _number(env, "MASTER_PORT", faults)
    if port is not None and not 0 < port < 2**16:
        faults.append(f"MASTER_PORT={port}: a port is between 1 and 65535.")
    return port


def _check_host(where: str, host: str) -> list[str]:
    if host not in ("0.0.0.0", "::"):
        return []
    return [
        f"{where}: {host} is no address that others can connect to. "
        "Give the leader's own address on the network that the ranks share."
    ]


def _check_rank(rank: int | None, size: int | None) -> list[str]:
    if size is not None and size < 1:
        return [f"--world-size {size}: must be at least 1."]
    if rank is not None and (rank < 0 or (size is not None and rank >= size)):
        if size is None:
            return [f"--rank {rank}: must be at least 0."]
        top = f"{size - 1} (--world-size {size}, counted from 0)"
        return [f"--rank {rank}: must be between 0 and {top}."]
    return []
