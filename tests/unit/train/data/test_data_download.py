"""Downloads from a real server on loopback: cut, resumed, refused, wrong, and never half there."""

from __future__ import annotations

import gzip
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import DataError
from shoal.train.data import download
from shoal.train.data.download import fetch

NAME = "train-images-idx3-ubyte.gz"
Mirrors = Callable[..., Any]


def quiet(name: str, have: int, total: int | None) -> None:
    pass


def get(tiny: Any, folder: Path, *mirrors: str, **how: Any) -> Path:
    source = tiny.source(*mirrors)
    return fetch(source, source.files[0], folder, how.pop("progress", quiet), **how)


def assert_whole(tiny: Any, folder: Path) -> None:
    assert gzip.decompress((folder / NAME).read_bytes()) == tiny.plain[NAME.removesuffix(".gz")]
    assert [path.name for path in folder.iterdir()] == [NAME]


def reason(tiny: Any, folder: Path, *mirrors: str, **how: Any) -> str:
    """Why it failed; nothing may then be under the final name."""
    with pytest.raises(DataError) as caught:
        get(tiny, folder, *mirrors, **how)
    assert not (folder / NAME).exists()
    return str(caught.value)


def test_plain_download_with_progress(tmp_path: Path, tiny: Any, mirror_of: Mirrors) -> None:
    mirror = mirror_of(tiny.packed)
    told: list[tuple[str, int, int | None]] = []
    path = get(tiny, tmp_path, mirror.url, progress=lambda *news: told.append(news))
    assert path == tmp_path / NAME
    assert_whole(tiny, tmp_path)
    size = len(tiny.packed[NAME])
    assert told[-1] == (NAME, size, size)
    assert [have for _, have, _ in told] == sorted(have for _, have, _ in told)
    assert mirror.asked == [(NAME, None)]


def test_unknown_length(tmp_path: Path, tiny: Any, mirror_of: Mirrors) -> None:
    mirror = mirror_of(tiny.packed, tells_length=False)
    told: list[tuple[str, int, int | None]] = []
    get(tiny, tmp_path, mirror.url, progress=lambda *news: told.append(news))
    assert_whole(tiny, tmp_path)
    assert told[-1] == (NAME, len(tiny.packed[NAME]), None)


def test_cuts_are_resumed_by_range(tmp_path: Path, tiny: Any, mirror_of: Mirrors) -> None:
    mirror = mirror_of(tiny.packed, cuts=[1_000, 500])
    get(tiny, tmp_path, mirror.url)
    assert_whole(tiny, tmp_path)
    assert mirror.asked == [(NAME, None), (NAME, "bytes=1000-"), (NAME, "bytes=1500-")]


def test_cut_by_a_server_without_range_restarts(
    tmp_path: Path, tiny: Any, mirror_of: Mirrors
) -> None:
    mirror = mirror_of(tiny.packed, cuts=[1_000], knows_range=False)
    get(tiny, tmp_path, mirror.url)
    assert_whole(tiny, tmp_path)
    assert mirror.asked == [(NAME, None), (NAME, "bytes=1000-")]


def test_a_later_process_goes_on_where_the_first_was_cut(
    tmp_path: Path, tiny: Any, mirror_of: Mirrors
) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(tiny.packed[NAME][:2_000])
    mirror = mirror_of(tiny.packed)
    get(tiny, tmp_path, mirror.url)
    assert_whole(tiny, tmp_path)
    assert mirror.asked == [(NAME, "bytes=2000-")]


def test_killed_between_the_last_byte_and_the_rename(
    tmp_path: Path, tiny: Any, mirror_of: Mirrors
) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(tiny.packed[NAME])
    mirror = mirror_of(tiny.packed)
    get(tiny, tmp_path, mirror.url)
    assert_whole(tiny, tmp_path)
    assert len(mirror.asked) == 1  # answered with 416: nothing was sent again


@pytest.mark.parametrize("stale_bytes", [1_000, 100_000])
def test_a_wrong_part_is_thrown_away_and_fetched_anew_once(
    tmp_path: Path, tiny: Any, mirror_of: Mirrors, stale_bytes: int
) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(random.Random(0).randbytes(stale_bytes))
    mirror = mirror_of(tiny.packed)
    get(tiny, tmp_path, mirror.url)
    assert_whole(tiny, tmp_path)
    assert mirror.asked == [(NAME, f"bytes={stale_bytes}-"), (NAME, None)]


def test_wrong_bytes_from_one_mirror_right_ones_from_the_next(
    tmp_path: Path, tiny: Any, other: Any, mirror_of: Mirrors
) -> None:
    wrong, right = mirror_of(other.packed), mirror_of(tiny.packed)
    get(tiny, tmp_path, wrong.url, right.url)
    assert_whole(tiny, tmp_path)
    assert (len(wrong.asked), len(right.asked)) == (1, 1)
    assert right.asked == [(NAME, None)]  # the wrong bytes were not built upon


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (lambda packed: b"<html>log in first</html>", "expected a sound gzip"),
        (lambda packed: b"", "bytes unpacked, got 0"),
        (lambda packed: packed[:1_500], "expected a sound gzip"),
        (lambda packed: packed + b"tail", "expected a sound gzip"),
        (lambda packed: gzip.compress(b"short"), "bytes unpacked, got 5"),
        (lambda packed: gzip.compress(bytes(900_000)), "bytes unpacked, got more"),
        (lambda packed: bytes(900_000), "it announces 900,000"),
    ],
    ids=["html", "empty", "truncated", "tail", "short", "bomb", "huge"],
)
def test_what_is_not_the_file_is_refused_with_the_reason(
    tmp_path: Path, tiny: Any, mirror_of: Mirrors, served: Any, words: str
) -> None:
    mirror = mirror_of({NAME: served(tiny.packed[NAME])})
    message = reason(tiny, tmp_path, mirror.url)
    assert words in message
    assert mirror.url + NAME in message
    assert len(mirror.asked) == 1


def test_a_bomb_is_not_unpacked_to_its_end(tmp_path: Path, tiny: Any, mirror_of: Mirrors) -> None:
    # The checksum at its end is damaged: who unpacks that far complains of the checksum.
    bomb = gzip.compress(bytes(4_000_000))[:-8] + bytes(8)
    assert "bytes unpacked, got more" in reason(tiny, tmp_path, mirror_of({NAME: bomb}).url)


def test_other_bytes_show_both_sums(
    tmp_path: Path, tiny: Any, other: Any, mirror_of: Mirrors
) -> None:
    message = reason(tiny, tmp_path, mirror_of(other.packed).url)
    assert tiny.source().files[0].sha256 in message
    assert other.source().files[0].sha256 in message
    assert list(tmp_path.iterdir()) == []


def test_endless_body_is_bounded(tmp_path: Path, tiny: Any, mirror_of: Mirrors) -> None:
    mirror = mirror_of({NAME: bytes(5_000_000)}, tells_length=False)
    assert "more came" in reason(tiny, tmp_path, mirror.url)
    assert all(path.stat().st_size < 20_000 for path in tmp_path.iterdir())


def test_404_then_good(tmp_path: Path, tiny: Any, mirror_of: Mirrors) -> None:
    empty, good = mirror_of({}), mirror_of(tiny.packed)
    get(tiny, tmp_path, empty.url, good.url)
    assert_whole(tiny, tmp_path)
    assert len(empty.asked) == 1


def test_a_false_range_is_not_believed(tmp_path: Path, tiny: Any, mirror_of: Mirrors) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(tiny.packed[NAME][:1_000])
    liar = mirror_of(tiny.packed, content_range="bytes 7-99/100")
    good = mirror_of(tiny.packed)
    get(tiny, tmp_path, liar.url, good.url)
    assert_whole(tiny, tmp_path)
    assert good.asked == [(NAME, "bytes=1000-")]


def test_a_mirror_that_always_cuts_is_left_for_the_next_which_goes_on(
    tmp_path: Path, tiny: Any, mirror_of: Mirrors
) -> None:
    stuck = mirror_of(tiny.packed, cuts=[1_000, 0, 0, 0])
    good = mirror_of(tiny.packed)
    get(tiny, tmp_path, stuck.url, good.url)
    assert_whole(tiny, tmp_path)
    assert len(stuck.asked) == 2
    assert good.asked == [(NAME, "bytes=1000-")]


def test_tries_are_bounded(tmp_path: Path, tiny: Any, mirror_of: Mirrors) -> None:
    mirror = mirror_of(tiny.packed, cuts=[10] * 100)
    message = reason(tiny, tmp_path, mirror.url)
    assert len(mirror.asked) == download.TRIES_PER_MIRROR
    assert f"cut after 60 of {len(tiny.packed[NAME]):,} bytes" in message


def test_all_mirrors_dead_lists_each_and_the_way_out(
    tmp_path: Path, tiny: Any, mirror_of: Mirrors, dead_url: str
) -> None:
    empty = mirror_of({})
    message = reason(tiny, tmp_path, dead_url, empty.url)
    assert f"{dead_url}{NAME}: " in message
    assert "refused" in message
    assert f"{empty.url}{NAME}: HTTP 404" in message
    assert "--data-dir" in message
    assert all(file.name in message for file in tiny.source().files)


def test_a_silent_server_meets_the_timeout(tmp_path: Path, tiny: Any, mirror_of: Mirrors) -> None:
    mirror = mirror_of(tiny.packed)
    mirror.gate.clear()
    began = time.monotonic()
    message = reason(tiny, tmp_path, mirror.url, timeout_s=0.3)
    assert time.monotonic() - began < 5
    assert "timed out" in message


def test_a_dripping_server_meets_the_deadline(
    tmp_path: Path, tiny: Any, mirror_of: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "MIRROR_DEADLINE_S", 0.0)
    assert "not done after 0 s" in reason(tiny, tmp_path, mirror_of(tiny.packed).url)


def test_a_folder_that_cannot_be_written(tmp_path: Path, tiny: Any, mirror_of: Mirrors) -> None:
    mirror = mirror_of(tiny.packed)
    message = reason(tiny, tmp_path / "nowhere", mirror.url, mirror.url)
    assert "cannot be written" in message
    assert len(mirror.asked) == 1  # the disk is at fault: no other mirror is bothered


def test_an_interrupt_leaves_the_part_to_go_on_from(
    tmp_path: Path, tiny: Any, mirror_of: Mirrors
) -> None:
    def ctrl_c(name: str, have: int, total: int | None) -> None:
        raise KeyboardInterrupt

    mirror = mirror_of(tiny.packed, cuts=[1_000])
    with pytest.raises(KeyboardInterrupt):
        get(tiny, tmp_path, mirror.url, progress=ctrl_c)
    assert [path.name for path in tmp_path.iterdir()] == [f"{NAME}.part"]
    get(tiny, tmp_path, mirror.url)
    assert_whole(tiny, tmp_path)
    assert mirror.asked[1] == (NAME, "bytes=1000-")
