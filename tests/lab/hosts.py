"""Hosts for the tests: network namespaces of this machine, joined by a cable (a veth pair).

    laptop                        desktop
    eth0 10.77.0.1/24 ========== eth0 10.77.0.2/24        each with a loopback of its own

To sockets, and so to gloo, these are two machines; they share the file system. Needs root and `ip`.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from processes import until

_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """One machine: a network namespace and a host name."""

    namespace: str
    name: str
    address: str
    interface: str = "eth0"

    def command(self, *argv: str) -> list[str]:
        """`argv` as it is run on this host; the process that results is `argv`'s own."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return ["ip", "netns", "exec", self.namespace, *named, *argv]

    def cut_off(self) -> None:
        """Pull the cable out."""
        _ip("-n", self.namespace, "link", "set", self.interface, "down")


def why_not() -> str | None:
    """Why there can be no hosts here, or None."""
    missing = [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (apt: iproute2, util-linux, hostname)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """`laptop` and `desktop`, gone again afterwards whatever happens."""
    remove_leftovers()
    unique = unique_name()
    laptop = Host(f"{unique}-a", "laptop", "10.77.0.1")
    desktop = Host(f"{unique}-b", "desktop", "10.77.0.2")
    with ExitStack() as stack:
        for host in (laptop, desktop):
            stack.enter_context(namespace(host.namespace))
        cable = ["type", "veth", "peer", "name", desktop.interface, "netns", desktop.namespace]
        _ip("-n", laptop.namespace, "link", "add", laptop.interface, *cable)
        for host in (laptop, desktop):
            inside = ("-n", host.namespace)
            _ip(*inside, "address", "add", f"{host.address}/24", "dev", host.interface)
            _ip(*inside, "link", "set", host.interface, "up")
            _ip(*inside, "link", "set", "lo", "up")
        for host in (laptop, desktop):
            until_up(host)
        yield laptop, desktop


def until_up(host: Host) -> None:
    """The kernel notices a new cable in its own time."""
    show = ("-n", host.namespace, "-o", "link", "show", host.interface)
    until(lambda: "state UP" in _ip(*show), f"{host.name}'s interface is up")


def unique_name() -> str:
    """What the names of namespaces begin with: they tell whose they are."""
    _, begun = _state(os.getpid())
    return f"shoal-{os.getpid()}-{begun}-{next(_numbers)}"


@contextmanager
def namespace(name: str) -> Iterator[None]:
    """One network namespace; it takes its interfaces along when it goes."""
    _ip("netns", "add", name)
    try:
        yield
    finally:
        _ip("netns", "delete", name)


def remove_leftovers() -> None:
    """End and remove what test processes left here that were killed themselves."""
    for name in namespaces():
        owner = re.match(r"shoal-(\d+)-(\d+)-", name)
        if owner is None or _is_alive(int(owner[1]), owner[2]):
            continue
        with suppress(RuntimeError):  # another test process may be at it too
            kill_processes(name)
            _ip("netns", "delete", name)


def _is_alive(pid: int, begun: str) -> bool:
    """A zombie is not, nor is whoever has got the same id since."""
    try:
        state, its = _state(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX" and its == begun


def _state(pid: int) -> tuple[str, str]:
    """Of a process, in a letter; and when it began, in the kernel's ticks."""
    _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return fields.split()[0], fields.split()[19]


def namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def processes(namespace: str) -> list[int]:
    """The ids of the processes there."""
    return [int(pid) for pid in _ip("netns", "pids", namespace).split()]


def kill_processes(namespace: str) -> None:
    """Returns when they are gone."""

    def none_left() -> bool:
        found = processes(namespace)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    until(none_left, f"all processes in {namespace} are gone")


def listening_addresses(pid: int) -> set[str]:
    """Where anyone listens for TCP on the host that process `pid` runs on."""
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":
            found.add(socket.inet_ntoa(struct.pack("=I", int(local.split(":")[0], 16))))
    for line in Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()[1:]:
        if line.split()[3] == "0A":
            words = struct.pack("=4I", *struct.unpack(">4I", bytes.fromhex(line.split()[1][:32])))
            found.add(socket.inet_ntop(socket.AF_INET6, words))
    return found


def _ip(*arguments: str) -> str:
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
