"""`shoal keygen`, as it is typed."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

from mounts import PAGE, disk, fill
from processes import SHOAL

from shoal.wire.keys import AuthorizedKeys, own_name, read_pair

ALONE = """
import sys
from shoal.cli.main import main
sys.argv = ["shoal", "keygen", "--key", "key"]
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def test_it_makes_a_key_and_says_what_to_do_with_it(start, tmp_path: Path) -> None:
    run = start(*SHOAL, "keygen", HOME=str(tmp_path), XDG_CONFIG_HOME="")
    assert run.end() == 0, run.said
    assert run.err == ""
    folder = tmp_path / ".config" / "shoal"
    assert sorted(each.name for each in folder.iterdir()) == ["key", "key.pub"]
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600

    pair = read_pair(folder / "key")
    assert pair.secret not in run.said
    lines = run.out.splitlines()
    assert f"{pair.public} {own_name()}" in lines
    assert lines[0].startswith(f"secret key: {folder / 'key'} ")
    assert lines[1] == f"public key: {folder / 'key.pub'}"
    assert lines[-1].startswith("Append this line to ~/.config/shoal/authorized_keys on every")


def test_its_line_is_what_other_machines_take(start, tmp_path: Path) -> None:
    run = start(*SHOAL, "keygen", "--key", str(tmp_path / "mine"), XDG_CONFIG_HOME=str(tmp_path))
    assert run.end() == 0, run.said
    (line,) = (each for each in run.out.splitlines() if each.endswith(f" {own_name()}"))
    (tmp_path / "authorized_keys").write_text(f"{line}\n")
    public = read_pair(tmp_path / "mine").public
    assert AuthorizedKeys(tmp_path / "authorized_keys").name_of(public) == own_name()
    assert str(tmp_path / "shoal" / "authorized_keys") in run.out, "where XDG says"
    assert not (tmp_path / "shoal").exists()


def test_a_key_that_is_there_is_kept_and_shown(start, tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert start(*SHOAL, "keygen", "--key", str(path)).end() == 0
    pair = read_pair(path)
    again = start(*SHOAL, "keygen", "--key", str(path))
    assert again.end() == 2
    assert again.out == ""
    assert again.err.startswith(f"shoal: {path} exists already")
    assert f"{pair.public} {own_name()}" in again.err.splitlines()
    assert "Traceback" not in again.err
    assert read_pair(path) == pair


def test_a_full_disk_ends_in_a_sentence(start, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", 16 * PAGE) as folder:
        filler = fill(folder)
        run = start(*SHOAL, "keygen", "--key", str(folder / "key"))
        assert run.end() == 2
        assert run.err.startswith(f"shoal: the key {folder / 'key'} cannot be written: No space")
        assert run.err.count("\n") == 1
        assert list(folder.iterdir()) == [filler]


def test_it_is_quick_because_it_needs_no_torch(start) -> None:
    run = start(sys.executable, "-c", ALONE)
    assert run.end() == 0, run.said


def test_where_nothing_can_be_shown_it_says_where_the_public_line_is(start, tmp_path: Path) -> None:
    path = tmp_path / "key"
    run = start("sh", "-c", 'exec "$@" > /dev/full', "sh", *SHOAL, "keygen", "--key", str(path))
    assert run.end() == 2
    assert "Traceback" not in run.err
    assert run.err.strip().endswith(f"its public line is in {path}.pub")
    assert read_pair(path).public in Path(f"{path}.pub").read_text()
