"""One connection of the doctor's, from one host to another: what the way between them is like.

    visitor                               listener
    token                 ->              is it the one that we expect?
                          <-  token
    a small message       ->              ROUND_TRIPS times
                          <-  the same
    LARGE_BYTES in one go ->              how many of them came in time?
                          <-  that number
    bytes, bytes, bytes   ->              for a second and a bit; counted where they arrive
                          <-  bytes a second

All but the token is random bytes, and nothing that comes is kept.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
import statistics
import struct
import threading
import time
from contextlib import ExitStack, suppress

from shoal.launch.messages import Listen, Listening, Measure, Measured

LISTEN_S = 20.0
"""How long a visitor is expected."""
CONNECT_S = 4.0
"""The system itself takes 3 s to notice that nobody has an address."""
ANSWER_S = 5.0
ROUND_TRIPS = 21
SMALL_BYTES = 64
LARGE_BYTES = 64 * 1024
"""More than a packet of any size, little for a link of any speed."""
LARGE_S = 2.0
SKIP_S = 0.3
SKIP_BYTES = 256 * 1024
"""The start is not counted: TCP is still careful, and a limiter lets a first burst through."""
COUNT_S = 1.0
COUNT_BYTES = 8 * 2**20
"""So long, and so many; but a fast link needs no whole second, and a slow one gets no more than
PATIENCE times as long."""
MANY_BYTES = 256 * 2**20
PATIENCE = 4
REJECTED_S = 1.0
"""Who says at once that there is no way to a host is a firewall; the system needs longer."""
_NUMBER = struct.Struct("!d")


# -- the listener ----------------------------------------------------------------------------------


def listen(order: Listen) -> Listening:
    """Returns when it listens. The visitor is served in a thread."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(_server(order.address, 0))
            if order.fixed_port is not None:
                with suppress(_InUse):  # whoever listens there lets a visitor connect too
                    stack.enter_context(_server(order.address, order.fixed_port))
        except OSError as error:
            fixed = f" (or at port {order.fixed_port})" if order.fixed_port else ""
            return Listening(fault=f"{error.strerror or error}{fixed}")
        server.settimeout(LISTEN_S)
        port = int(server.getsockname()[1])
        sockets = stack.pop_all()
    token = order.token.encode()
    threading.Thread(target=_serve, args=(server, token, sockets), daemon=True).start()
    return Listening(port=port)


class _InUse(Exception):
    """Someone listens there already."""


def _server(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=8)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _InUse from error
        raise


def _serve(server: socket.socket, token: bytes, sockets: ExitStack) -> None:
    deadline = time.monotonic() + LISTEN_S
    with sockets:
        while time.monotonic() < deadline:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                return  # nobody came
            with connection, suppress(OSError):  # whoever left tells of it, if it was the visitor
                if secrets.compare_digest(_read(connection, len(token)), token):
                    _receive(connection, token)
                    return


def _receive(connection: socket.socket, token: bytes) -> None:
    """The visitor that was expected."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token)
    for _ in range(ROUND_TRIPS):
        connection.sendall(_read(connection, SMALL_BYTES))
    came = len(_read(connection, LARGE_BYTES, LARGE_S))
    connection.sendall(_NUMBER.pack(came))
    if came:
        connection.sendall(_NUMBER.pack(_count(connection)))
    while connection.recv(LARGE_BYTES):  # until the visitor has read it, and hangs up
        continue


def _read(connection: socket.socket, size: int, limit_s: float = ANSWER_S) -> bytes:
    """So many bytes; fewer at the end, or when the time is over."""
    deadline = time.monotonic() + limit_s
    data = b""
    while len(data) < size and (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            piece = connection.recv(size - len(data))
        except TimeoutError:
            break
        if not piece:
            break
        data += piece
    connection.settimeout(ANSWER_S)
    return data


def _count(connection: socket.socket) -> float:
    """Bytes a second, without the start; 0 if they stop to come."""
    buffer = bytearray(2**20)

    def receive(seconds: float, size: int) -> tuple[int, float]:
        """How many came, and how long it took."""
        begun = now = time.monotonic()
        came = 0
        while came < MANY_BYTES and (
            now - begun < seconds or (came < size and now - begun < PATIENCE * seconds)
        ):
            if not (piece := connection.recv_into(buffer)):
                break
            came += piece
            now = time.monotonic()
        return came, now - begun

    try:
        receive(SKIP_S, SKIP_BYTES)
        came, seconds = receive(COUNT_S, COUNT_BYTES)
    except TimeoutError:
        return 0.0
    return came / seconds if seconds > 0 else 0.0


# -- the visitor -----------------------------------------------------------------------------------


def measure(order: Measure) -> Measured:
    fixed_error = None
    if order.fixed_port is not None:
        found = _connect(order.address, order.fixed_port)
        if isinstance(found, socket.socket):
            found.close()
            fixed_error = ""
        else:
            fixed_error = found[0]
    connection = _connect(order.address, order.port)
    if not isinstance(connection, socket.socket):
        error, detail = connection
        return Measured(error=error, detail=detail, fixed_error=fixed_error)
    visit = _Visit()
    error = detail = ""
    with connection:
        try:
            visit.pay(connection, order.token.encode())
        except OSError as broken:
            error, detail = "broken", broken.strerror or str(broken)
    return Measured(
        error=error,
        detail=detail,
        latency_s=visit.latency_s,
        large_bytes=visit.large_bytes,
        bytes_per_s=visit.bytes_per_s,
        fixed_error=fixed_error,
    )


def _connect(address: str, port: int) -> socket.socket | tuple[str, str]:
    """The connection, or what is wrong and the system's words for it."""
    begun = time.monotonic()
    try:
        return socket.create_connection((address, port), timeout=CONNECT_S)
    except OSError as error:
        seconds = time.monotonic() - begun
        return _kind(error, seconds), error.strerror or str(error)


def _kind(error: OSError, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if error.errno == errno.ENETUNREACH:
        return "no-route"
    if error.errno == errno.EHOSTUNREACH:
        return "rejected" if seconds < REJECTED_S else "absent"
    return "rejected" if error.errno in (errno.EACCES, errno.EPERM) else "broken"


class _Visit:
    """What is known of the way so far."""

    def __init__(self) -> None:
        self.latency_s: float | None = None
        self.large_bytes: int | None = None
        self.bytes_per_s: float | None = None

    def pay(self, connection: socket.socket, token: bytes) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # What is still on its way at the end is thrown away: the next pair has the network alone.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.settimeout(ANSWER_S)
        connection.sendall(token)
        if _read(connection, len(token)) != token:
            raise OSError("someone else answers there")
        self.latency_s = self._small(connection)
        connection.sendall(os.urandom(LARGE_BYTES))
        self.large_bytes = int(_number(connection, LARGE_S + LARGE_S))
        if self.large_bytes:
            self.bytes_per_s = _flood(connection)

    def _small(self, connection: socket.socket) -> float:
        message = os.urandom(SMALL_BYTES)
        seconds = []
        for _ in range(ROUND_TRIPS):
            begun = time.perf_counter()
            connection.sendall(message)
            if _read(connection, SMALL_BYTES) != message:
                raise OSError("the answer to a small message did not come")
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds)


def _number(connection: socket.socket, limit_s: float) -> float:
    """The listener's; 0 if it does not come: where large packets are lost, it may be stuck behind
    what they would have acknowledged."""
    data = _read(connection, _NUMBER.size, limit_s)
    return float(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else 0.0


def _flood(connection: socket.socket) -> float:
    """Send until the other side says how fast it came; 0 if it says nothing."""
    piece = memoryview(os.urandom(2**20))
    deadline = time.monotonic() + PATIENCE * (SKIP_S + COUNT_S) + ANSWER_S
    at = 0
    connection.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while (left := deadline - time.monotonic()) > 0:
            for _, events in selector.select(left):
                if events & selectors.EVENT_READ:
                    return _number(connection, ANSWER_S)
                with suppress(BlockingIOError):
                    at = (at + connection.send(piece[at:])) % len(piece)
    return 0.0
