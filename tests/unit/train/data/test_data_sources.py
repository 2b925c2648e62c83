"""Where files are looked for, in which order, and what is said when they are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.errors import DataError
from shoal.train.data import sources


def dotted(name: str) -> str:
    return name.replace("-idx", ".idx")


@pytest.mark.parametrize("below", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize(
    "spell",
    [str, dotted, lambda name: f"{name}.gz", lambda name: f"{dotted(name)}.gz"],
    ids=["plain", "dotted", "gz", "dotted.gz"],
)
def test_every_usual_place_and_name(tmp_path: Path, tiny: Any, below: str, spell: Any) -> None:
    folder = tiny.write(tmp_path / below, spell)
    paths = sources.locate(tiny.source(), tmp_path)
    assert paths == tuple(folder / spell(name) for name in tiny.arrays)
    assert sources.faults(paths) == []


def test_own_subfolder_wins_over_the_folder_itself(tmp_path: Path, tiny: Any, other: Any) -> None:
    # As with MNIST in a folder and Fashion-MNIST, under the same file names, in a folder below.
    other.write(tmp_path)
    below = tiny.write(tmp_path / "mnist")
    paths = sources.locate(tiny.source(), tmp_path)
    assert paths is not None
    assert {path.parent for path in paths} == {below}


def test_two_halves_in_two_places_are_not_mixed(tmp_path: Path, tiny: Any) -> None:
    tiny.write(tmp_path)
    tiny.write(tmp_path / "mnist")
    (tmp_path / "train-images-idx3-ubyte").unlink()
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="missing in"):
        sources.locate(tiny.source(), tmp_path)


def test_missing_files_are_all_listed_with_the_places(tmp_path: Path, tiny: Any) -> None:
    folder = tiny.write(tmp_path / "MNIST" / "raw")
    (folder / "train-labels-idx1-ubyte").unlink()
    (folder / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(DataError) as caught:
        sources.locate(tiny.source(), tmp_path)
    message = str(caught.value)
    assert (
        f"missing in {folder}: train-labels-idx1-ubyte[.gz], t10k-images-idx3-ubyte[.gz]" in message
    )
    assert f"looked in {tmp_path}, " in message
    assert str(tmp_path / "mnist") in message


def test_a_folder_that_is_none(tmp_path: Path, tiny: Any) -> None:
    with pytest.raises(DataError, match="there is no such folder"):
        sources.locate(tiny.source(), tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="it is not a folder"):
        sources.locate(tiny.source(), tmp_path / "file")
    with pytest.raises(DataError, match="no way to look into it"):
        sources.locate(tiny.source(), tmp_path / ("x" * 5_000))


def test_system_folder_only_when_whole_and_no_other_was_named(tmp_path: Path, tiny: Any) -> None:
    system = tiny.write(tmp_path / "system", lambda name: f"{name}.gz")
    mine = tiny.write(tmp_path / "mine")
    source = tiny.source(system_dir=system)

    def folder(data_dir: Path | None) -> Path | None:
        paths = sources.locate(source, data_dir)
        return paths[0].parent if paths else None

    assert folder(mine) == mine
    assert folder(None) == system
    (system / "t10k-labels-idx1-ubyte.gz").unlink()
    assert folder(None) is None


def test_what_is_published() -> None:
    mnist, fashion = sources.SOURCES["mnist"], sources.SOURCES["fashion-mnist"]
    for source in (mnist, fashion):
        assert [file.size_bytes for file in source.files] == [47040016, 60008, 7840016, 10008]
        assert all(len(file.sha256) == 64 for file in source.files)
        assert all(mirror.endswith("/") for mirror in source.mirrors)
    assert len({file.sha256 for file in mnist.files + fashion.files}) == 8
    assert fashion.system_dir == Path("/usr/share/datasets/fashion-mnist")
