"""Connections that ZeroMQ or gloo hold, seen from outside: whose they are, what has come by them.

They are known by file descriptor only, and one that is named may be gone, and its number taken by
another, before we look: each look is at a handle of our own, and only while it is needed, since the
other side does not see the end of a connection that somebody still holds.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_COUNTS = struct.Struct("<QQ"), 120
"""In what Linux tells of a connection (struct tcp_info), and where: bytes that the other side has
taken, and bytes that came. Other systems tell less."""
_UNSENT, _SENT = struct.Struct("<I"), struct.Struct("<QQ")
_UNSENT_AT, _SENT_AT, _TOLD_BYTES = 144, 200, 216
"""Bytes that wait to be sent; bytes that were, and those of them that were sent again."""


_DESCRIPTORS = Path("/proc/self/fd")

Connection = tuple[int, str]
"""Its descriptor, and who is at the other end."""


def connections() -> set[Connection]:
    """All that this process has, on Linux."""
    if not _DESCRIPTORS.exists():
        return set()
    found = {int(entry.name): address_of(int(entry.name)) for entry in _DESCRIPTORS.iterdir()}
    return {(descriptor, address) for descriptor, address in found.items() if address}


class Traffic(NamedTuple):
    taken: int
    """Bytes that the other side's system has taken."""
    come: int


def traffic(known: Iterable[Connection]) -> Traffic:
    """By these connections, so far; by those that are gone, none."""
    taken = come = 0
    for descriptor, address in known:
        connection = _borrow(descriptor)
        if connection is not None:
            with connection:
                if _address(connection) == address:
                    its = _traffic(connection)
                    taken, come = taken + its.taken, come + its.come
    return Traffic(taken, come)


class Outflow:
    """How much the system has been given to send by a connection of somebody else's.

    Quick, and so by descriptor alone: once the connection is gone, what is told is of no use.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._told = ctypes.create_string_buffer(_TOLD_BYTES)
        self._size = ctypes.c_uint(_TOLD_BYTES)

    def given_bytes(self) -> int | None:
        """Since it was made; None where the system does not tell."""
        if _getsockopt is None:
            return None
        self._size.value = _TOLD_BYTES
        what = self._descriptor, socket.IPPROTO_TCP, socket.TCP_INFO
        if _getsockopt(*what, self._told, ctypes.byref(self._size)) or (
            self._size.value < _TOLD_BYTES
        ):
            return None
        sent, again = _SENT.unpack_from(self._told, _SENT_AT)
        (unsent,) = _UNSENT.unpack_from(self._told, _UNSENT_AT)
        return int(sent - again + unsent)


# With the interpreter held: it takes less time than to give that away and have it back.
_libc = ctypes.PyDLL(None) if sys.platform.startswith("linux") else None
_getsockopt = getattr(_libc, "getsockopt", None)


def address_of(descriptor: int) -> str:
    """Who is at the other end; "" if it has gone."""
    connection = _borrow(descriptor)
    if connection is None:
        return ""
    with connection:
        return _address(connection)


def end_if_beyond(most_bytes: int, descriptor: int, address: str) -> bool:
    """End the connection with `address` if more has come by it; whether it was so."""
    connection = _borrow(descriptor)
    if connection is None:
        return False
    with connection:
        if _address(connection) != address or _traffic(connection).come <= most_bytes:
            return False
        connection.shutdown(socket.SHUT_RDWR)
        return True


def _borrow(descriptor: int) -> socket.socket | None:
    try:
        own = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=own)
    except OSError:  # it has become something that is no socket
        os.close(own)
        return None


def _address(connection: socket.socket) -> str:
    try:
        host, port = connection.getpeername()[:2]
    except (OSError, ValueError):  # or a socket of another family has its number by now
        return ""
    return f"{host}:{port}"


def _traffic(connection: socket.socket) -> Traffic:
    counts, at = _COUNTS
    if not hasattr(socket, "TCP_INFO"):
        return Traffic(0, 0)
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, at + counts.size)
    return (
        Traffic(*counts.unpack_from(told, at)) if len(told) >= at + counts.size else Traffic(0, 0)
    )
