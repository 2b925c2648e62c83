"""The doctor's part in an agent: what this host is like, and what the ways to others are like."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from shoal.errors import MeetingError
from shoal.launch.fingerprint import fingerprint
from shoal.launch.messages import (
    Address,
    Clock,
    Condition,
    Examine,
    FindAddress,
    Listen,
    Measure,
    Probe,
    Report,
    TellTime,
)
from shoal.launch.room import base_of, room_in
from shoal.launch.trial import listen, measure
from shoal.network import (
    address_of,
    address_towards,
    describe_interfaces,
    interface_with,
    interfaces,
    outward_address,
    resolve,
)

RESOLVE_S = 5.0
"""For all names together: a name server that does not answer takes longer."""
FIREWALLS = ("ufw", "firewall-cmd", "nft", "iptables")
_TOOL_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"


def answer(order: Probe) -> Report:
    match order:
        case TellTime():
            return Clock(now_s=time.time())
        case FindAddress():
            return _find_address(order)
        case Listen():
            return listen(order)
        case Measure():
            return measure(order)
        case Examine():
            return _examine(order)


def _find_address(order: FindAddress) -> Address:
    try:
        if order.address is not None:
            address = resolve(order.address)
        elif order.interface is not None:
            address = address_of(order.interface)
        elif order.towards is not None:
            address = address_towards(resolve(order.towards))
        else:
            address = outward_address()
    except MeetingError as error:
        return Address(fault=str(error))
    interface = interface_with(address)
    stats = psutil.net_if_stats().get(interface)
    return Address(
        address=address,
        interface=interface or "",
        mtu=stats.mtu if stats else 0,
        all_here=describe_interfaces(),
    )


def _examine(order: Examine) -> Condition:
    memory = psutil.virtual_memory()
    own_name = socket.gethostname()
    free_bytes, folder_fault = room_in(base_of(order.folder))
    return Condition(
        own_name=own_name,
        names=_resolve_all({own_name, *order.names}),
        addresses=interfaces(),
        memory_bytes=memory.total,
        free_memory_bytes=memory.available,
        gpus=_gpus(),
        free_disk_bytes=free_bytes,
        folder_fault=folder_fault,
        firewalls=[tool for tool in FIREWALLS if shutil.which(tool, path=_TOOL_PATH)],
        code=None if order.project is None else fingerprint(Path(order.project)),
    )


def _gpus() -> int:
    """Without torch, which takes long to import."""
    cards = Path("/proc/driver/nvidia/gpus")
    if cards.is_dir():
        return len(list(cards.iterdir()))
    return 1 if shutil.which("nvidia-smi") else 0


def _resolve_all(names: set[str]) -> dict[str, str]:
    """What each stands for; empty where it is not known, or not in time."""
    found = dict.fromkeys(sorted(names), "")

    def look_up(name: str) -> None:
        try:
            found[name] = resolve(name)
        except MeetingError:
            found[name] = ""

    _in_time([threading.Thread(target=look_up, args=(n,), daemon=True) for n in list(found)])
    return dict(found)


def _in_time(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + RESOLVE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
