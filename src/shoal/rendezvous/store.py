"""The place where ranks meet: a torch store on the leader's address, at an agent, or in a file."""

from __future__ import annotations

import atexit
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import psutil
import torch.distributed as dist

from shoal import network
from shoal.errors import MeetingError
from shoal.rendezvous.bounded import bounded
from shoal.rendezvous.ways import TORCH_INTERFACE_VARIABLES, Way

Notify = Callable[[str], None]
"""Told, about once a second, whom we are waiting for; the empty string when the wait is over."""

POLL_S = 0.05
T = TypeVar("T")


def open_store(way: Way, interface: str | None, timeout_s: float, notify: Notify) -> dist.Store:
    """Open, or connect to, the store at `way.place` within `timeout_s`."""
    if interface is not None:
        network.address_of(interface)  # fail on a wrong name before waiting for anyone
    if way.kind == "file":
        store = _open_file(Path(way.path), way.size)
        store.set_timeout(timedelta(seconds=timeout_s))
        return store
    leads = way.rank == 0 and not way.store_is_hosted
    if leads:
        address = _listening_address(way, interface)
        store = _serve(address, way)
    else:
        store = _connect(way, timeout_s, notify)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def close_store(way: Way, holder: bool | None = None) -> None:
    """Leave the meeting place as it was found. The tcp store ends with its process.

    holder: whether a shared file is this rank's to remove. Default: the leader's.
    """
    if way.kind == "file" and (way.rank == 0 if holder is None else holder):
        Path(way.path).unlink(missing_ok=True)


# -- meeting again ---------------------------------------------------------------------------------

# A script may join several times. Its ranks do not leave at the same instant, so a store that one
# rank closes may just be found open by the next to arrive: stores of crews that have met stay open
# until the process ends, and each meeting there has keys of its own.
_kept: dict[tuple[str, int], tuple[dist.Store, int]] = {}


def kept_store(way: Way) -> tuple[dist.Store, Way] | None:
    """The store of an earlier meeting of this process at the same place, if it still answers."""
    key = (way.place, way.rank)
    if key not in _kept:
        return None
    store, visits = _kept[key]
    try:
        store.check(["anything"])
    except dist.DistError:
        del _kept[key]
        return None
    return store, replace(way, attempt=f"{way.attempt}.{visits}")


def keep_store(way: Way, store: dist.Store) -> None:
    """Called when the crew has met."""
    key = (way.place, way.rank)
    if key not in _kept:
        atexit.register(close_store, way)
    _kept[key] = (store, _kept[key][1] + 1 if key in _kept else 1)


# -- leader ----------------------------------------------------------------------------------------


def _listening_address(way: Way, interface: str | None) -> str:
    address = network.resolve(way.host)
    found = network.interface_with(address)
    host = socket.gethostname()
    if found is None:
        raise MeetingError(
            f"Rank 0 must run on the machine that {way.host} names, to listen there. {host} does "
            f"not have the address {address}; it has {network.describe_interfaces()}. "
            "Start rank 0 on that machine, or put one of these addresses into --init on every rank."
        )
    if interface is not None and found != interface:
        raise MeetingError(
            f"--interface {interface} and {way.place} disagree on {host}: {address} belongs to "
            f"{found}. Use --init with {network.address_of(interface)} on every rank, or "
            f"--interface {found} here."
        )
    return address


def _serve(address: str, way: Way) -> dist.Store:
    # torch's own TCPStore listens on every interface whatever host it is given; a socket of ours,
    # bound to the one address, is handed to it instead.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, way.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE and (gathering := _crew_at(address, way)):
            return gathering  # a second rank 0: the roll will say so to both
        raise MeetingError(_bind_failure(error, address, way)) from error
    return dist.TCPStore(
        address,
        way.port,
        None,
        True,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _crew_at(address: str, way: Way) -> dist.Store | None:
    """The store of the crew that listens at `address`, if that is what listens there."""

    def look() -> dist.Store | None:
        brief = timedelta(seconds=0.5)
        store = dist.TCPStore(address, way.port, None, False, timeout=brief, wait_for_workers=False)
        # Its leader may have opened it this very moment, and not have said hello yet.
        deadline = time.monotonic() + 1.5
        while not store.check([f"shoal/{way.attempt}/hello/0"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)
        return store

    try:
        return _bounded(look, 2.5, "no answer")
    except (MeetingError, RuntimeError):
        return None


def _bind_failure(error: OSError, address: str, way: Way) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {way.port} of {address} is in use{_owner_of(way.port)}, so rank 0 cannot listen "
            f"there. Choose another port in --init (or MASTER_PORT) on every rank, or end that "
            "process."
        )
    if error.errno == errno.EACCES:
        return f"Port {way.port} needs root to listen on. Choose one above 1023 on every rank."
    return f"Rank 0 cannot listen on {address}:{way.port}: {error.strerror}."


def _owner_of(port: int) -> str:
    try:
        found = sorted(psutil.net_connections("tcp"), key=lambda c: c.status != psutil.CONN_LISTEN)
        for connection in found:
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        return ""  # another user's process: the port is still in use, its owner stays unnamed
    return ""


# -- everyone else ---------------------------------------------------------------------------------


def _connect(way: Way, timeout_s: float, notify: Notify) -> dist.Store:
    begun = time.monotonic()
    deadline = begun + timeout_s
    host = socket.gethostname()
    while True:
        address = network.resolve(way.host)
        try:
            with socket.create_connection((address, way.port), timeout=1.0):
                break
        except OSError as error:
            reason = _why_unreachable(error)
        waited = time.monotonic() - begun
        if time.monotonic() >= deadline:
            raise MeetingError(
                f"Rank {way.rank} on {host} did not reach rank 0 at {way.host}:{way.port}"
                f"{'' if address == way.host else f' ({address})'} within {timeout_s:g} s: "
                f"{reason}. Check that rank 0 is running, that it was given the same --init, and "
                f"that its firewall lets port {way.port} in."
            )
        if waited > 1:
            notify(f"waiting for rank 0 at {way.host}:{way.port}, {waited:.0f} s ({reason})")
        time.sleep(POLL_S * 4)
    notify("")

    # A TCPStore client that meets some other server can wait for ever, past its own timeout.
    def connect() -> dist.Store:
        return dist.TCPStore(
            address,
            way.port,
            None,
            False,
            timeout=timedelta(seconds=limit_s / 2),
            wait_for_workers=False,
        )

    limit_s = min(15.0, timeout_s)
    stranger = (
        f"Something listens at {way.host}:{way.port}, but it is not the leader of a crew. "
        f"Is another program using port {way.port}?"
    )
    try:
        return _bounded(connect, limit_s + 1, stranger)
    except RuntimeError as error:  # torch's DistError family
        raise MeetingError(f"{stranger} ({str(error).splitlines()[0]})") from error


def _why_unreachable(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: that machine is up, nothing listens on the port yet"
    if isinstance(error, TimeoutError):
        return "no answer: wrong address, another network, or a firewall that drops packets"
    return error.strerror or str(error)


def _bounded(call: Callable[[], T], limit_s: float, message: str) -> T:
    return bounded(call, limit_s, MeetingError(message))


# -- shared file -----------------------------------------------------------------------------------


def _open_file(path: Path, size: int) -> dist.Store:
    if path.is_dir():
        raise MeetingError(
            f"file://{path} is a folder. Give the path of a file that does not exist yet, for "
            f"example file://{path / 'meeting'}."
        )
    if not path.parent.is_dir():
        raise MeetingError(
            f"file://{path}: the folder {path.parent} does not exist on {socket.gethostname()}. "
            "Is the shared file system mounted here?"
        )
    leftover = (
        f"{path} is left over from an earlier run (or belongs to one that is still training). "
        f"Remove it (rm {path}), or give another name."
    )
    try:
        if _is_used(path):
            raise MeetingError(leftover)
        return dist.FileStore(str(path), size)
    except (OSError, RuntimeError) as error:
        raise MeetingError(f"file://{path} cannot be used: {error}") from error


def _is_used(path: Path) -> bool:
    """True for a file of a crew that has already met, or of some other program.

    A rank writes its hello right after it made the file, so a file of ours without one is at
    most moments old.
    """
    deadline = time.monotonic() + 2
    while path.exists():
        content = path.read_bytes()
        if b"/shoal/0/" in content:
            return b"/shoal/0/go" in content
        if time.monotonic() > deadline:
            return True
        time.sleep(POLL_S)
    return False


# -- torch reads the interface from the environment ------------------------------------------------


@contextmanager
def use_interface(name: str) -> Iterator[None]:
    """Make gloo and NCCL use this interface for as long as the crew lasts."""
    before = {key: os.environ.get(key) for key in TORCH_INTERFACE_VARIABLES}
    os.environ.update(dict.fromkeys(TORCH_INTERFACE_VARIABLES, name))
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
