"""Memory that is lent, not sent: a rank of the same host reads it from where it lies.

    lender    offers addresses, and leaves what is there as it is    [front, addresses] ───────>
    borrower  reads it right into place (process_vm_readv, Linux)    <──────────── "taken"

One copy, by whoever waits for it, instead of three by both of them. The system lets a process read
another of the same user, unless it was told not to: so both try it, with a seal, when they meet.

A seal is some random bytes in the lender's memory, one for each rank, that were told to the others.
The borrower reads its own after what was lent to it, each time. If it is still whole, then what was
read is of that very process (ids are used again) and had not been taken back: the lender breaks the
seal first, before it uses that memory for something else.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import sys
from collections.abc import Sequence

import msgspec
import numpy

from shoal.errors import WireError

MOST_BYTES = 64 * 2**20
"""That are lent in one message: while it is read, whoever waits for others waits too."""
SEAL_BYTES = 16
_SET_PTRACER = 0x59616D61  # PR_SET_PTRACER


class TakenBack(Exception):
    """What was lent cannot be had any more: its process has ended, or its seal is broken."""


class Lender(msgspec.Struct, frozen=True):
    """Of whom memory can be read."""

    pid: int
    address: int
    """Of its seals, one behind the other."""
    seals: str
    """What they are, by rank, in hexadecimal."""

    def seal(self, rank: int) -> bytes:
        try:
            return bytes.fromhex(self.seals)[rank * SEAL_BYTES : (rank + 1) * SEAL_BYTES]
        except ValueError:
            return b""


class Seals:
    """Of this process: while a rank's is whole, all that was lent to it is as it was."""

    def __init__(self, size: int) -> None:
        """size: of the crew."""
        content = secrets.token_bytes(SEAL_BYTES * size)
        self._memory = numpy.frombuffer(content, dtype=numpy.uint8).copy().reshape(size, -1)
        self.lender = Lender(os.getpid(), self._memory.ctypes.data, content.hex())
        _let_siblings_read()

    def break_for(self, rank: int) -> None:
        """It can rely no more on what was lent to it."""
        self._memory[rank] = 0

    def close(self) -> None:
        """Nor can anybody."""
        self._memory[:] = 0


def is_readable(lender: Lender, rank: int) -> bool:
    """Whether the memory of that process can be read, it is who it says, and lends to `rank`."""
    try:
        read(lender, rank, [], [])
    except (TakenBack, WireError):
        return False
    return True


def can_be_read(address: int) -> bool:
    """Whether the system would read there, in this very process, for another."""
    byte = ctypes.create_string_buffer(1)
    return _read(os.getpid(), (ctypes.addressof(byte), address, 1))


def read(lender: Lender, rank: int, addresses: Sequence[int], places: Sequence[memoryview]) -> None:
    """Fill the places with what lies at these addresses there, lent to `rank`.

    Raises TakenBack; WireError where the system does not let us read it, or not any more.
    """
    seal = ctypes.create_string_buffer(SEAL_BYTES)
    sealed = (ctypes.addressof(seal), lender.address + rank * SEAL_BYTES, SEAL_BYTES)
    parts = [
        (ctypes.addressof(ctypes.c_char.from_buffer(place)), address, len(place))
        for address, place in zip(addresses, places, strict=True)
    ]
    for part in parts or [(0, 0, 0)]:
        if not _read(lender.pid, part, sealed) or seal.raw != lender.seal(rank):
            raise TakenBack


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _read(pid: int, *parts: tuple[int, int, int]) -> bool:
    """Parts: an address here, one there, and how many bytes. Whether all of them came."""
    if _readv is None:
        raise WireError("memory of other processes cannot be read on this system")
    here = (_Piece * len(parts))(*(_Piece(own, size) for own, _, size in parts))
    there = (_Piece * len(parts))(*(_Piece(other, size) for _, other, size in parts))
    count = _readv(pid, here, len(parts), there, len(parts), 0)
    if count < 0 and ctypes.get_errno() == errno.EPERM:
        raise WireError("what it lends cannot be read here: it, or this rank, has another user")
    return bool(count == sum(size for *_, size in parts))


def _let_siblings_read() -> None:
    """Yama keeps processes of a user apart (ptrace_scope 1): not those of our own launcher."""
    if _libc is not None and (parent := os.getppid()) > 1:
        _libc.prctl(_SET_PTRACER, ctypes.c_ulong(parent), 0, 0, 0)  # fails where there is no Yama


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None
_readv = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
