"""Key files: secret from the first moment, whole or not there, and never misread."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from mounts import PAGE, disk, fill
from processes import ENOUGH_S
from zmq.utils import z85

from shoal.errors import EXIT_USAGE, KeyFileError
from shoal.wire import keys, meanwhile
from shoal.wire.keys import (
    AuthorizedKeys,
    KeyPair,
    authorized_meanwhile,
    default_authorized_keys_path,
    default_key_path,
    new_pair,
    own_name,
    public_path,
    read_pair,
    write_pair,
)

NOBODY = 65534
NAME = "ann@laptop"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="root becomes another user here")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With nothing in it but what the test puts there."""
    made = tmp_path / "keys"
    made.mkdir()
    return made


@pytest.fixture
def path(folder: Path) -> Path:
    """Of a pair that is there and good."""
    write_pair(folder / "key", new_pair(), NAME)
    return folder / "key"


@pytest.fixture
def umask() -> Iterator[Callable[[int], object]]:
    before = os.umask(0o022)
    os.umask(before)
    yield os.umask
    os.umask(before)


@pytest.fixture
def as_nobody(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Root may do anything, so it asks as somebody else."""
    for each in (tmp_path, *tmp_path.parents):
        if not each.stat().st_mode & 0o001:
            each.chmod(0o755)
    yield lambda: os.seteuid(NOBODY)
    os.seteuid(0)


def refusal(do: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(KeyFileError) as caught:
        do(*arguments)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


# -- a pair ----------------------------------------------------------------------------------------


def test_a_new_pair_is_a_pair_and_each_time_another() -> None:
    first, second = new_pair(), new_pair()
    assert first.secret != second.secret
    for pair in (first, second):
        assert len(pair.public) == len(pair.secret) == 40
        assert zmq.curve_public(pair.secret.encode()).decode() == pair.public


def test_the_secret_is_not_shown() -> None:
    pair = new_pair()
    assert pair.public in repr(pair)
    assert pair.secret not in repr(pair)
    assert pair.secret not in str([pair])


def test_a_pair_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        new_pair().secret = "another"  # type: ignore[misc]


def test_where_files_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_key_path() == tmp_path / "shoal" / "key"
    assert default_authorized_keys_path() == tmp_path / "shoal" / "authorized_keys"
    assert public_path(tmp_path / "key.mine") == tmp_path / "key.mine.pub"


def test_a_key_is_called_by_who_made_it_and_where() -> None:
    user, _, host = own_name().partition("@")
    assert user
    assert host == socket.gethostname()


def test_keys_need_no_torch() -> None:
    code = "import sys, shoal.wire.keys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# -- writing ---------------------------------------------------------------------------------------


def test_what_is_written_can_be_read(folder: Path) -> None:
    for number in range(50):  # keys with all kinds of characters
        pair = new_pair()
        write_pair(folder / f"key{number}", pair, NAME)
        assert read_pair(folder / f"key{number}") == pair
        line = (folder / f"key{number}.pub").read_text()
        assert line == f"{pair.public} {NAME}\n"
    assert len(list(folder.iterdir())) == 100, "and nothing else is left there"


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_modes_do_not_depend_on_the_umask(
    folder: Path, umask: Callable[[int], object], mask: int
) -> None:
    umask(mask)
    path = folder / "a" / "b" / "key"
    write_pair(path, new_pair(), NAME)
    assert mode_of(path) == 0o600
    assert mode_of(public_path(path)) == 0o644
    assert mode_of(folder / "a") == mode_of(folder / "a" / "b") == 0o700


def test_a_folder_that_is_there_keeps_its_mode(folder: Path) -> None:
    folder.chmod(0o755)
    write_pair(folder / "key", new_pair(), NAME)
    assert mode_of(folder) == 0o755


def test_the_secret_is_secret_from_the_first_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, umask: Callable[[int], object]
) -> None:
    """The mode comes with the creation; a chmod afterwards would leave a moment between them."""
    umask(0o000)
    created: list[tuple[int, int]] = []
    plain_open = os.open

    def watched(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        descriptor = plain_open(name, flags, *rest, **more)
        if flags & os.O_CREAT:
            created.append((flags, stat.S_IMODE(os.fstat(descriptor).st_mode)))
        return descriptor

    monkeypatch.setattr(os, "open", watched)
    write_pair(folder / "key", new_pair(), NAME)
    assert len(created) == 2
    for flags, mode in created:
        assert flags & os.O_EXCL
        assert mode == 0o600


def test_a_key_that_is_there_is_never_replaced(path: Path) -> None:
    before = {each.name: each.read_bytes() for each in path.parent.iterdir()}
    said = refusal(write_pair, path, new_pair(), NAME)
    assert said.startswith(f"{path} exists already")
    assert f"\n{read_pair(path).public} {NAME}\n" in said
    assert read_pair(path).secret not in said
    assert "another path" in said
    assert "deleted" in said
    assert {each.name: each.read_bytes() for each in path.parent.iterdir()} == before


def test_a_key_that_is_in_the_way_and_cannot_be_used(path: Path) -> None:
    path.chmod(0o644)
    said = refusal(write_pair, path, new_pair(), NAME)
    assert said.startswith(f"{path} exists already")
    assert f"chmod 600 {path}" in said


def test_a_public_key_that_is_there_is_not_replaced_either(folder: Path) -> None:
    (folder / "key.pub").write_text("mine")
    said = refusal(write_pair, folder / "key", new_pair(), NAME)
    assert said.startswith(f"{folder / 'key.pub'} exists already")
    assert "delete this file" in said
    assert [each.name for each in folder.iterdir()] == ["key.pub"], "no secret without its public"
    assert (folder / "key.pub").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "fault"), [("key", "where nothing is"), ("key.pub", "exists already")]
)
def test_nothing_is_written_through_a_symlink(
    folder: Path, tmp_path: Path, name: str, fault: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (folder / name).symlink_to(elsewhere)
    assert fault in refusal(write_pair, folder / "key", new_pair(), NAME)
    assert not elsewhere.exists()
    assert [each.name for each in folder.iterdir()] == [name]


def test_a_folder_in_the_way(folder: Path) -> None:
    (folder / "key").mkdir()
    said = refusal(write_pair, folder / "key", new_pair(), NAME)
    assert said.startswith(f"{folder / 'key'} exists already")
    assert "is a folder. Name a file" in said


@pytest.mark.parametrize("below", ["file/key", "file/below/key"])
def test_a_file_where_the_folder_should_be(folder: Path, below: str) -> None:
    (folder / "file").write_text("mine")
    path = folder / below
    said = refusal(write_pair, path, new_pair(), NAME)
    assert said.startswith(f"the folder {path.parent} cannot be made: ")


@needs_root
def test_a_folder_that_may_not_be_written(folder: Path, as_nobody: Callable[[], None]) -> None:
    folder.chmod(0o755)
    as_nobody()
    said = refusal(write_pair, folder / "key", new_pair(), NAME)
    assert said.startswith(f"the key {folder / 'key'} cannot be written: Permission denied.")
    assert "Choose a folder" in said
    said = refusal(write_pair, folder / "new" / "key", new_pair(), NAME)
    assert said.startswith(f"the folder {folder / 'new'} cannot be made: Permission denied.")


def test_a_disk_that_may_only_be_read(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", 16 * PAGE, "ro") as folder:
        said = refusal(write_pair, folder / "key", new_pair(), NAME)
        assert "Read-only file system" in said


@pytest.mark.parametrize("room", [0, PAGE], ids=["for none", "for the secret only"])
def test_on_a_full_disk_there_is_no_key_at_all(tmp_path: Path, room: int) -> None:
    with disk(tmp_path / "disk", 16 * PAGE) as folder:
        path = folder / "key"
        filler = fill(folder, leave_bytes=room)
        said = refusal(write_pair, path, new_pair(), NAME)
        assert said.startswith(f"the key {path} cannot be written: No space left on device.")
        assert "Nothing was kept" in said
        assert list(folder.iterdir()) == [filler]
        filler.unlink()
        write_pair(path, new_pair(), NAME)
        assert read_pair(path)


def test_an_interrupted_write_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the two files, where the secret has its name already."""
    plain_link = Path.hardlink_to

    def interrupted(self: Path, target: Path) -> None:
        if self.name.endswith(".pub"):
            raise KeyboardInterrupt
        plain_link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_pair(folder / "key", new_pair(), NAME)
    assert list(folder.iterdir()) == []


# -- reading ---------------------------------------------------------------------------------------


def test_the_public_key_follows_from_the_secret(path: Path) -> None:
    before = read_pair(path)
    public_path(path).unlink()
    assert read_pair(path) == before


def test_a_key_that_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "a key"
    said = refusal(read_pair, path)
    assert said == f"there is no key at {path}. Make one: shoal keygen --key '{path}'"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    assert refusal(read_pair, default_key_path()).endswith("Make one: shoal keygen")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604, 0o620, 0o601, 0o610, 0o777])
def test_a_key_that_others_may_use_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    said = refusal(read_pair, path)
    assert f"{path} has mode {mode:04o}" in said
    assert said.endswith(f"chmod 600 {path}")
    path.chmod(0o600)
    assert read_pair(path)


def test_a_key_that_even_its_owner_may_only_read(path: Path) -> None:
    path.chmod(0o400)
    assert read_pair(path)


def test_a_symlink_is_judged_by_where_it_leads(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    assert read_pair(link) == read_pair(path)
    path.chmod(0o640)
    assert "has mode 0640" in refusal(read_pair, link)
    path.unlink()
    assert "there is no key at" in refusal(read_pair, link)


@needs_root
def test_a_key_of_somebody_else(path: Path) -> None:
    """Root could read it, and would be taken for its owner."""
    os.chown(path, NOBODY, -1)
    said = refusal(read_pair, path)
    assert "belongs to nobody" in said
    assert "run by root" in said
    os.chown(path, 4242, -1)
    assert "belongs to user 4242" in refusal(read_pair, path)


@needs_root
def test_a_key_that_may_not_be_read(path: Path, as_nobody: Callable[[], None]) -> None:
    path.parent.chmod(0o755)
    as_nobody()
    said = refusal(read_pair, path)
    assert said.startswith(f"the key {path} cannot be read: Permission denied.")


def test_a_folder_is_no_key(folder: Path) -> None:
    assert f"the key {folder} cannot be read: Is a directory" in refusal(read_pair, folder)


@pytest.mark.timeout(20)
def test_a_pipe_is_no_key_and_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "key", 0o600)
    assert "is not a regular file" in refusal(read_pair, folder / "key")
    assert "is not a regular file" in refusal(AuthorizedKeys(folder / "key").name_of, "x" * 40)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "0 lines where one was expected"),
        (b"# only a comment\n", "0 lines where one was expected"),
        (b"x" * 39, "a key has 40 characters, this has 39"),
        (b"x" * 40 + b" " + NAME.encode(), "a key has 40 characters, this has 51"),
        (b"x" * 40 + b"\n" + b"y" * 40, "2 lines where one was expected"),
        (b"x" * 39 + b"~", "it has characters that no key has"),
        (b"x" * 39 + b"\xff", "it has characters that no key has"),
        (b"x" * 35 + b"$0000", "it has characters in an order that no key has"),
        (os.urandom(100_000).replace(b"\n", b"."), "characters"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3B\n", "2 lines where one was expected"),
    ],
)
def test_a_file_that_is_no_key(path: Path, content: bytes, fault: str) -> None:
    path.write_bytes(content)
    said = refusal(read_pair, path)
    assert f"{path} is not a secret key of shoal's" in said
    assert fault in said
    assert f"shoal keygen --key {path}" in said
    assert "xxx" not in said.replace(str(path), ""), "it may be a secret that was damaged"


def test_blank_lines_and_comments_around_a_key(path: Path) -> None:
    secret = read_pair(path).secret
    path.write_text(f"\n # mine\r\n\n  {secret}  \r\n\n#")
    assert read_pair(path).secret == secret


# -- keys and what only looks like one -------------------------------------------------------------


@given(raw=st.binary(min_size=32, max_size=32))
def test_every_key_is_known_as_one_and_none_begins_like_a_comment(raw: bytes) -> None:
    key = z85.encode(raw).decode()
    assert keys._key_fault(key) == ""
    assert not key.startswith("#")


@given(text=st.text(keys.Z85, min_size=40, max_size=40))
def test_what_is_no_key_to_zmq_is_none_here(text: str) -> None:
    """Any 40 characters of Z85: some groups of them are above 2**32."""
    try:
        zmq.curve_public(text.encode())
    except zmq.ZMQError:
        assert keys._key_fault(text)
    else:
        assert not keys._key_fault(text)


# -- authorized keys -------------------------------------------------------------------------------

ANN, BEN, CID = (z85.encode(bytes([byte]) * 32).decode() for byte in (1, 2, 3))
HASHES = z85.encode(bytes.fromhex("00000054" * 8)).decode()
"""A key with as many '#' as a key can have at the ends of its groups."""


@pytest.fixture
def listed(folder: Path) -> AuthorizedKeys:
    (folder / "authorized_keys").write_text(f"{ANN} ann@laptop\n{BEN} ben@desktop\n")
    return AuthorizedKeys(folder / "authorized_keys")


def test_who_is_in_the_file_is_known_by_name(listed: AuthorizedKeys) -> None:
    assert listed.name_of(ANN) == "ann@laptop"
    assert listed.name_of(BEN) == "ben@desktop"
    assert listed.name_of(CID) is None
    assert listed.name_of("") is None
    assert listed.name_of(ANN[:-1]) is None


def test_without_a_file_nobody_is_authorized(folder: Path) -> None:
    assert AuthorizedKeys(folder / "no" / "authorized_keys").name_of(ANN) is None


def test_a_public_file_can_be_appended_as_it_is(path: Path, listed: AuthorizedKeys) -> None:
    with listed.path.open("ab") as file:
        file.write(public_path(path).read_bytes())
    assert listed.name_of(read_pair(path).public) == NAME


MEANWHILE = """
import sys
import threading
from pathlib import Path
from shoal.wire.keys import authorized_meanwhile
with authorized_meanwhile(Path(sys.argv[1]), sys.argv[2], "workers"):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_a_line_ends_with_its_process_however_that_ends(listed: AuthorizedKeys) -> None:
    before = listed.path.read_text()
    words = [sys.executable, "-c", MEANWHILE, str(listed.path), CID]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None
    assert other.stdout is not None
    with other.stdin, other.stdout:
        assert other.stdout.readline() == b"in\n"
        assert (listed.name_of(CID) or "").startswith("workers (while workers-")
        assert CID in listed.all_names()
        other.kill()
        other.wait()
    assert CID in listed.path.read_text()
    assert listed.name_of(CID) is None
    assert list(listed.all_names()) == [ANN, BEN]
    with authorized_meanwhile(listed.path, HASHES, "workers"):
        assert listed.name_of(HASHES)
        assert CID not in listed.path.read_text()
    assert listed.path.read_text() == before
    assert [each.name for each in listed.path.parent.iterdir()] == ["authorized_keys"]


def test_of_two_that_run_at_a_time_neither_takes_the_other_out(listed: AuthorizedKeys) -> None:
    with authorized_meanwhile(listed.path, CID, "workers"):
        with authorized_meanwhile(listed.path, HASHES, "workers"):
            assert listed.name_of(CID)
            assert listed.name_of(HASHES)
        assert listed.name_of(CID)
        assert listed.name_of(HASHES) is None


def test_those_that_come_and_go_at_once_do_not_undo_each_other(listed: AuthorizedKeys) -> None:
    before = listed.path.read_text()
    keys = [new_pair().public for _ in range(8)]
    together = threading.Barrier(len(keys), timeout=ENOUGH_S)
    seen = []

    def work(key: str) -> None:
        together.wait()
        with authorized_meanwhile(listed.path, key, "workers"):
            together.wait()
            seen.append(listed.path.read_text().count(key))
            together.wait()

    threads = [threading.Thread(target=work, args=(key,)) for key in keys]
    for each in threads:
        each.start()
    for each in threads:
        each.join(ENOUGH_S)
    assert seen == [1] * len(keys)
    assert listed.path.read_text() == before


def test_one_that_is_frozen_in_its_turn_is_not_waited_for_forever(
    listed: AuthorizedKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meanwhile, "TURN_S", 0.1)
    with (
        meanwhile.turn(listed.path.parent),
        pytest.raises(KeyFileError, match="another shoal has been changing it"),
        authorized_meanwhile(listed.path, CID, "workers"),
    ):
        pass
    assert [each.name for each in listed.path.parent.iterdir()] == ["authorized_keys"]


def test_where_nothing_can_be_locked_the_remedy_is_another_disk(
    listed: AuthorizedKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(meanwhile.fcntl, "flock", flock)
    with (
        pytest.raises(KeyFileError, match=r"No locks available\..* export XDG_CONFIG_HOME="),
        authorized_meanwhile(listed.path, CID, "workers"),
    ):
        pass
    assert [each.name for each in listed.path.parent.iterdir()] == ["authorized_keys"]


def test_a_link_to_the_file_stays_one(listed: AuthorizedKeys, tmp_path: Path) -> None:
    """As those have it who keep such files elsewhere."""
    kept = tmp_path / "kept"
    before = listed.path.read_text()
    listed.path.rename(kept)
    listed.path.symlink_to(kept)
    with authorized_meanwhile(listed.path, CID, "workers"):
        assert listed.name_of(CID)
        assert CID in kept.read_text()
    assert listed.path.readlink() == kept
    assert kept.read_text() == before


def test_comments_and_blank_lines(listed: AuthorizedKeys, caplog: Any) -> None:
    listed.path.write_text(
        f"# people\n#\n\n   \n#no space\n#{ANN} left us\n# {BEN} left us\n\t# more\n{CID} cid\n"
    )
    assert listed.name_of(CID) == "cid"
    assert listed.name_of(ANN) is None
    assert listed.name_of(BEN) is None
    assert caplog.records == []


def test_a_key_full_of_hashes_is_no_comment(listed: AuthorizedKeys) -> None:
    assert HASHES == "0000#" * 8
    listed.path.write_text(f"{HASHES} hash\n")
    assert listed.name_of(HASHES) == "hash"


@pytest.mark.parametrize(
    "line",
    [
        f"{CID} cid at home",
        f"  {CID}   cid at home  ",
        f"{CID}\tcid\tat home",
        f"{CID} cid at home\r",
    ],
)
def test_a_name_may_have_spaces_and_lines_any_ending(listed: AuthorizedKeys, line: str) -> None:
    listed.path.write_bytes(f"{ANN} ann\n{line}".encode())
    assert listed.name_of(CID) == "cid at home"
    assert listed.name_of(ANN) == "ann"


def test_the_file_counts_as_it_is_now(listed: AuthorizedKeys) -> None:
    assert listed.name_of(CID) is None
    with listed.path.open("a") as file:
        file.write(f"{CID} cid\n")
    assert listed.name_of(CID) == "cid"

    other = listed.path.with_name("other")
    other.write_text(f"{CID} cid@moved\n")
    other.replace(listed.path)  # as editors do
    assert listed.name_of(CID) == "cid@moved"
    assert listed.name_of(ANN) is None, "who was taken out is out"

    listed.path.unlink()
    assert listed.name_of(CID) is None
    listed.path.write_text(f"{BEN} ben\n")
    assert listed.name_of(BEN) == "ben"


def test_a_file_of_the_same_size_and_time_is_seen_to_be_another(listed: AuthorizedKeys) -> None:
    """As `cp --preserve` makes it."""
    before = listed.path.stat()
    assert listed.name_of(ANN) == "ann@laptop"
    other = listed.path.with_name("other")
    other.write_bytes(listed.path.read_bytes().replace(ANN.encode(), CID.encode()))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(listed.path)
    assert (listed.path.stat().st_size, listed.path.stat().st_mtime_ns) == (
        before.st_size, before.st_mtime_ns,
    )  # fmt: skip
    assert listed.name_of(ANN) is None
    assert listed.name_of(CID) == "ann@laptop"


def test_a_file_that_has_not_changed_is_not_read_again(
    listed: AuthorizedKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listed.name_of(ANN)
    monkeypatch.setattr(keys, "_lines", None)
    assert listed.name_of(ANN) == "ann@laptop"


BAD_LINES = {
    ANN: "there is no name after the key",
    f"{ANN[:-1]} ann": "a key has 40 characters, this has 39",
    f"ssh-ed25519 {ANN} ann": "a key has 40 characters, this has 11",
    f"{ANN[:-1]}~ ann": "it has characters that no key has",
    f"{ANN[:-5]}$0000 ann": "it has characters in an order that no key has",
    f"{ANN} ann\x1b[2J": "its name has characters that cannot be shown",
    f"{BEN} ann": "the key of ben again",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=BAD_LINES.values())
def test_a_bad_line_is_told_once_and_the_others_count(
    listed: AuthorizedKeys, caplog: Any, line: str, reason: str
) -> None:
    listed.path.write_text(f"# people\n{BEN} ben\n{line}\n{CID} cid\n")
    for _ in range(3):
        assert listed.name_of(BEN) == "ben"
        assert listed.name_of(CID) == "cid"
        assert listed.name_of(ANN) is None
    (told,) = caplog.records
    assert (told.name, told.levelno) == ("shoal.wire", logging.WARNING)
    assert told.getMessage() == f"{listed.path}, line 3 does not count: {reason}"

    with listed.path.open("a") as file:
        file.write("\n")
    listed.name_of(BEN)
    listed.name_of(BEN)
    assert len(caplog.records) == 2, "once more, as the file is another"


def test_a_line_that_is_not_text(listed: AuthorizedKeys, caplog: Any) -> None:
    listed.path.write_bytes(b"\xff\xfe\x00\n" + f"{CID} cid\n".encode() + BEN.encode() + b" \xe9\n")
    assert listed.name_of(CID) == "cid"
    assert listed.name_of(BEN) == "\N{REPLACEMENT CHARACTER}"
    assert [record.args[1] for record in caplog.records] == [1]


@pytest.mark.parametrize("mode", [0o664, 0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(listed: AuthorizedKeys, mode: int) -> None:
    assert listed.name_of(ANN)
    listed.path.chmod(mode)
    for _ in range(2):
        said = refusal(listed.name_of, ANN)
        assert f"{listed.path} has mode {mode:04o}" in said
        assert said.endswith(f"chmod go-w {listed.path}")
    listed.path.chmod(0o644)
    assert listed.name_of(ANN) == "ann@laptop"


@needs_root
def test_a_list_of_somebody_else(listed: AuthorizedKeys, as_nobody: Callable[[], None]) -> None:
    os.chown(listed.path, 4242, -1)
    assert f"{listed.path} belongs to user 4242" in refusal(listed.name_of, ANN)
    os.chown(listed.path, 0, -1)
    listed.path.parent.chmod(0o755)
    as_nobody()
    assert listed.name_of(ANN) == "ann@laptop", "root may say who is welcome to others"


@needs_root
def test_a_list_that_may_not_be_read(listed: AuthorizedKeys, as_nobody: Callable[[], None]) -> None:
    listed.path.chmod(0o600)
    listed.path.parent.chmod(0o755)
    as_nobody()
    said = refusal(listed.name_of, ANN)
    assert said.startswith(f"{listed.path} cannot be read: Permission denied.")


def test_pairs_compare_by_value() -> None:
    assert KeyPair("p", "s") == KeyPair("p", "s")
    assert KeyPair("p", "s") != KeyPair("p", "t")
