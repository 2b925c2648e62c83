"""Key files, as ssh users know them: a secret key, its public key, and whose keys are welcome.

    key               the secret key. Only its owner may read it; it never leaves the machine
    key.pub           one line, `public-key name`, to be handed to other machines
    authorized_keys   such lines of others; a line that begins with '#' is a comment

Keys are CURVE keys in Z85, 40 characters. Z85 has a '#', but never at the beginning of a key: each
five characters stand for 32 bits, and a group that begins with '#' would be above 2**32. So no key
is ever taken for a comment.

Permissions are read off the open file, not off its path, which may lead elsewhere a moment later.
No message shows what a file holds: it may be a secret.
"""

from __future__ import annotations

import logging
import os
import pwd
import shlex
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import zmq

from shoal.errors import KeyFileError
from shoal.settings import config_folder
from shoal.wire.meanwhile import held, is_over, lock_of, turn

KEY_LENGTH = 40
Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
MAX_KEY_FILE_BYTES = 4096
"""More than any secret key file has: enough to see that another file is none."""
SECRET_HEAD = (
    "# A secret key of shoal's: it stays on this machine. The file beside it is to be shared."
)

log = logging.getLogger("shoal.wire")


@dataclass(frozen=True)
class KeyPair:
    """Both keys of one machine's user."""

    public: str
    secret: str = field(repr=False)


def default_key_path() -> Path:
    """The secret key; the public one is beside it."""
    return config_folder() / "key"


def default_authorized_keys_path() -> Path:
    return config_folder() / "authorized_keys"


def public_path(path: Path) -> Path:
    """Where the public key of the secret key at `path` is."""
    return Path(f"{path}.pub")


def own_name() -> str:
    """What a public key is called: who made it, and where."""
    return f"{_user(os.geteuid())}@{socket.gethostname()}"


def new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


# -- a pair on disk --------------------------------------------------------------------------------


def write_pair(path: Path, pair: KeyPair, name: str) -> None:
    """The secret key to `path`, the public one with `name` to `path`.pub: both or none.

    Never over a file that is there. Each file is written whole under another name and then linked
    to its own: a link, unlike a rename, fails if the name is taken.
    """
    assert not _name_fault(name), name
    with _explained(f"the folder {path.parent} cannot be made", "Choose another for the key."):
        _make_private(path.parent)
    with (
        _explained(
            f"the key {path} cannot be written",
            "Nothing was kept of it. Choose a folder that has room and that this user may write.",
        ),
        _written(path.parent, f"{SECRET_HEAD}\n{pair.secret}\n", 0o600) as secret,
        _written(path.parent, f"{pair.public} {name}\n", 0o644) as public,
    ):
        try:
            path.hardlink_to(secret)
        except FileExistsError as error:
            raise KeyFileError(_taken(path, name)) from error
        try:
            public_path(path).hardlink_to(public)
        except BaseException as error:
            path.unlink()
            if isinstance(error, FileExistsError):
                raise KeyFileError(
                    f"{public_path(path)} exists already, without the secret key that belongs "
                    "beside it. Choose another path for the key, or delete this file."
                ) from error
            raise


def read_pair(path: Path) -> KeyPair:
    """The secret key at `path`, if nobody else may read it, and the public key that follows."""
    with _explained(f"the key {path} cannot be read", "Give the path of a key of your own."):
        try:
            with _open(path) as file:
                _check_secrecy(path, os.fstat(file.fileno()))
                content = file.read(MAX_KEY_FILE_BYTES)
        except FileNotFoundError as error:
            raise KeyFileError(f"there is no key at {path}. Make one: {_keygen(path)}") from error
    lines = _lines(content)
    fault = f"{len(lines)} lines where one was expected"
    if len(lines) == 1:
        ((_, secret),) = lines
        fault = _key_fault(secret)
        if not fault:
            return KeyPair(zmq.curve_public(secret.encode()).decode(), secret)
    raise KeyFileError(
        f"{path} is not a secret key of shoal's: {fault}. Give the path of one, or move this file "
        f"away and make a new key: {_keygen(path)}"
    )


def _check_secrecy(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"the key {path} is not a regular file. Give the path of one that is.")
    if status.st_uid != os.geteuid():
        raise KeyFileError(
            f"the key {path} belongs to {_user(status.st_uid)}, and this is run by "
            f"{_user(os.geteuid())}. Give the path of a key of your own, or make one: shoal keygen"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFileError(
            f"the key {path} has mode {mode:04o}: others than its owner may use it. "
            f"It must be 0600: chmod 600 {shlex.quote(str(path))}"
        )


def _taken(path: Path, name: str) -> str:
    if path.is_dir():
        return f"{path} exists already, and is a folder. Name a file: {path / 'key'}, for one."
    if path.is_symlink() and not path.exists():
        return (
            f"{path} is a link to {path.readlink()}, where nothing is. Delete it, or name a file."
        )
    try:
        line = f"{read_pair(path).public} {name}"
    except KeyFileError as error:
        return (
            f"{path} exists already, and cannot be used as it is: {error}\n"
            "A new key needs another path, or this one and its .pub deleted."
        )
    return (
        f"{path} exists already, and is a key. This is its public line:\n\n{line}\n\n"
        "Use this key; a new one needs another path, or this one and its .pub deleted."
    )


def _make_private(folder: Path) -> None:
    """All that are missing: mkdir(parents=True) leaves the upper ones to the umask."""
    for each in reversed((folder, *folder.parents)):
        each.mkdir(0o700, exist_ok=True)


@contextmanager
def _written(folder: Path, text: str, mode: int) -> Iterator[Path]:
    """A whole file under a name that nobody looks for, gone afterwards.

    mkstemp opens it with O_EXCL and 0600: it is never looser than `mode`, whatever the umask.
    """
    descriptor, name = tempfile.mkstemp(prefix=".shoal-", dir=folder)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


# -- whose keys are welcome ------------------------------------------------------------------------


class AuthorizedKeys:
    """Names by public key, from a file that may change at any time and counts as it is now.

    Any thread may ask.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._names: dict[str, str] = {}
        self._stamp: tuple[int, ...] | None = None
        self._lock = threading.Lock()

    def name_of(self, public: str) -> str | None:
        """Who has this key; None if it is not authorized. No file: nobody is.

        Raises KeyFileError if others than the owner might have written the file.
        """
        with (
            self._lock,
            _explained(f"{self.path} cannot be read", "Nobody is authorized until it can be."),
        ):
            try:
                with _open(self.path) as file:
                    status = os.fstat(file.fileno())
                    _check_authorship(self.path, status)
                    if (stamp := _stamp(status)) != self._stamp:
                        self._names = self._names_in(file.read())
                        self._stamp = stamp
            except FileNotFoundError:
                self._names, self._stamp = {}, None
            name = self._names.get(public)
            return None if name is None or is_over(self.path.parent, name) else name

    def all_names(self) -> dict[str, str]:
        """Who is authorized, by public key."""
        self.name_of("")  # reads the file, if it has changed
        folder = self.path.parent
        with self._lock:
            return {key: name for key, name in self._names.items() if not is_over(folder, name)}

    def _names_in(self, content: bytes) -> dict[str, str]:
        names: dict[str, str] = {}
        for number, line in _lines(content):
            key, _, name = line.partition(" ")
            fault = _key_fault(key) or _name_fault(name.strip())
            if key in names:
                fault = f"the key of {names[key]} again"
            if fault:
                log.warning("%s, line %d does not count: %s", self.path, number, fault)
            else:
                names[key] = name.strip()
        return names


@contextmanager
def authorized_meanwhile(path: Path, public: str, name: str) -> Iterator[None]:
    """A line more in a file of authorized keys, which is taken out again in the end.

    Should this process be killed before, the line does not count any more, and the next one that
    comes here takes it out.
    """
    assert not _key_fault(public), public
    assert not _name_fault(name), name
    with ExitStack() as stack:
        remedy = (
            "Nobody was authorized. Choose a folder that has room and that this user may write."
        )
        with _explained(f"{path} cannot be written", remedy):
            _make_private(path.parent)
            line = f"{public} {stack.enter_context(held(path.parent, name))}\n"
            with turn(path.parent):
                before = _that_count(path)
                gap = "" if not before or before.endswith("\n") else "\n"
                _put(path, before + gap + line)
        try:
            yield
        finally:
            remedy = f"Take the line of {public} out of it."
            with _explained(f"{path} cannot be written", remedy), turn(path.parent):
                _put(path, _that_count(path).replace(line, ""))


def _that_count(path: Path) -> str:
    """The lines of a file, without those whose writers are gone; their locks are removed."""
    if not path.exists():
        return ""
    kept = []
    for line in path.read_bytes().decode().splitlines(keepends=True):
        name = line.strip().partition(" ")[2]
        lock = lock_of(path.parent, name)
        if lock is not None and is_over(path.parent, name):
            lock.unlink(missing_ok=True)
        else:
            kept.append(line)
    return "".join(kept)


def _put(path: Path, content: str) -> None:
    """Whole or not at all; who may read and write it stays as it was, and a link stays a link."""
    path = path.resolve()
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600
    with _written(path.parent, content, mode) as written:
        written.replace(path)


def _check_authorship(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"{path} is not a regular file. Nobody is authorized until it is one.")
    if status.st_uid not in (0, os.geteuid()):
        raise KeyFileError(
            f"{path} belongs to {_user(status.st_uid)}, who could authorize anybody. "
            f"It must belong to {_user(os.geteuid())}: chown it, or write one of your own."
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KeyFileError(
            f"{path} has mode {mode:04o}: others than its owner could authorize anybody. "
            f"Only the owner may write it: chmod go-w {shlex.quote(str(path))}"
        )


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    """Other than before when the file is. ctime: a copy may bring its mtime along."""
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev


# -- what files hold -------------------------------------------------------------------------------


def _open(path: Path) -> BinaryIO:
    """Without waiting: a FIFO would have us wait for whoever writes to it."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def _lines(content: bytes) -> list[tuple[int, str]]:
    """Lines with their numbers, without blank ones and comments."""
    lines = enumerate(content.decode("utf-8", errors="replace").split("\n"), start=1)
    bare = ((number, " ".join(line.split())) for number, line in lines)
    return [(number, line) for number, line in bare if line and not line.startswith("#")]


def _key_fault(key: str) -> str:
    if len(key) != KEY_LENGTH:
        return f"a key has {KEY_LENGTH} characters, this has {len(key)}"
    if not set(key) <= set(Z85):
        return "it has characters that no key has"
    for start in range(0, KEY_LENGTH, 5):
        value = 0
        for letter in key[start : start + 5]:
            value = value * len(Z85) + Z85.index(letter)
        if value >= 2**32:
            return "it has characters in an order that no key has"
    return ""


def _name_fault(name: str) -> str:
    """Names are shown in terminals and logs, where some characters do more than show."""
    if not name:
        return "there is no name after the key"
    if not name.isprintable():
        return "its name has characters that cannot be shown"
    return ""


# -- words -----------------------------------------------------------------------------------------


@contextmanager
def _explained(problem: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KeyFileError(f"{problem}: {error.strerror or error}. {remedy}") from error


def _keygen(path: Path) -> str:
    if path == default_key_path():
        return "shoal keygen"
    return f"shoal keygen --key {shlex.quote(str(path))}"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
