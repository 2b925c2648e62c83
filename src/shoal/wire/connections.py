"""Connections that ZeroMQ holds, seen from outside: whose they are, and what has come by them.

ZeroMQ names them by file descriptor only, and one that is named may be gone, and its number taken
by another, before we look: each look is at a handle of our own.
"""

from __future__ import annotations

import os
import socket
import struct

_BYTES_RECEIVED = struct.Struct("<Q"), 128
"""In what Linux tells of a connection (struct tcp_info), and where. Others tell less."""


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
        if _address(connection) != address or _bytes_received(connection) <= most_bytes:
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


def _bytes_received(connection: socket.socket) -> int:
    field, at = _BYTES_RECEIVED
    if not hasattr(socket, "TCP_INFO"):
        return 0
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, at + field.size)
    return int(field.unpack_from(told, at)[0]) if len(told) >= at + field.size else 0
