"""A lock that says "whoever wrote this still runs": it ends with its process, however that ends.

    PUBLIC-KEY workers (while workers-3fa9c1d2.lock is held)

A line of authorized keys with such a name counts for as long as the file that it names, in the same
folder, is locked. No process id could tell as much: it may be of another host, or taken anew.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import KeyFileError

_NAME = re.compile(r".+ \(while ([a-z]+-[0-9a-f]{8}\.lock) is held\)")
TURN_S = 10.0
"""Whoever has a turn needs milliseconds, unless it is frozen."""


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Only one at a time reads and writes files there, of those who ask for their turn."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + TURN_S
        while not _has_turn(descriptor):
            if time.monotonic() > deadline:
                reason = f"another shoal has been changing it for {TURN_S:g} s. Is one frozen?"
                raise TimeoutError(errno.ETIMEDOUT, reason)
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _has_turn(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a folder cannot be locked on every file system: then there are no turns
        return True
    return True


@contextmanager
def held(folder: Path, name: str) -> Iterator[str]:
    """The name of a line that counts until the end."""
    lock = folder / f"{name}-{secrets.token_hex(4)}.lock"
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # a home on a server, perhaps
            raise KeyFileError(
                f"nothing can be locked in {folder}: {error.strerror}. So nobody could tell how "
                "long a key counts, and nobody was authorized. Keep keys on a disk of this "
                "machine: export XDG_CONFIG_HOME=FOLDER, here and for the boss."
            ) from error
        yield f"{name} (while {lock.name} is held)"
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def lock_of(folder: Path, name: str) -> Path | None:
    """The file that a line of this name hangs on; None: it counts for good."""
    found = _NAME.fullmatch(name)
    return folder / found[1] if found else None


def is_over(folder: Path, name: str) -> bool:
    """Whether a line of this name has outlived whoever wrote it."""
    lock = lock_of(folder, name)
    return lock is not None and not _is_held(lock)


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held; or no such thing as locks here, and then nobody can tell
        return True
    finally:
        os.close(descriptor)
    return False
