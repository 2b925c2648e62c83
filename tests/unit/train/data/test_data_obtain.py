"""The cache: filled once however many ask, mended when it went bad."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import DataError
from shoal.train.data import obtain as room
from shoal.train.data import sources
from shoal.train.data.obtain import obtain

Mirrors = Callable[..., Any]


def quiet(name: str, have: int, total: int | None) -> None:
    pass


def times_asked(mirror: Any) -> dict[str, int]:
    return dict(Counter(name for name, _ in mirror.asked))


def test_downloads_once_then_never_again(tmp_path: Path, tiny: Any, mirror_of: Mirrors) -> None:
    mirror = mirror_of(tiny.packed)
    source = tiny.source(mirror.url)
    paths = obtain(source, None, tmp_path, quiet)
    assert paths == tuple(tmp_path / "mnist" / f"{name}.gz" for name in tiny.arrays)
    assert sources.faults(paths) == []
    assert obtain(source, None, tmp_path, quiet) == paths
    assert times_asked(mirror) == dict.fromkeys(tiny.packed, 1)


def test_named_folder_then_system_then_cache(tmp_path: Path, tiny: Any, mirror_of: Mirrors) -> None:
    mirror = mirror_of(tiny.packed)
    system, mine = tiny.write(tmp_path / "system"), tiny.write(tmp_path / "mine")
    source, cache = tiny.source(mirror.url, system_dir=system), tmp_path / "cache"
    assert obtain(source, mine, cache, quiet)[0].parent == mine
    assert obtain(source, None, cache, quiet)[0].parent == system
    assert not cache.exists()
    (system / "t10k-labels-idx1-ubyte").unlink()
    assert obtain(source, None, cache, quiet)[0].parent == cache / "mnist"


def test_a_named_folder_without_the_files_is_never_replaced_by_a_download(
    tmp_path: Path, tiny: Any, mirror_of: Mirrors
) -> None:
    mirror = mirror_of(tiny.packed)
    with pytest.raises(DataError, match="needs four files"):
        obtain(tiny.source(mirror.url), tmp_path, tmp_path / "cache", quiet)
    assert mirror.asked == []


def test_a_bad_file_in_the_cache_is_fetched_anew_and_only_that(
    tmp_path: Path, tiny: Any, mirror_of: Mirrors
) -> None:
    mirror = mirror_of(tiny.packed)
    source = tiny.source(mirror.url)
    paths = obtain(source, None, tmp_path, quiet)
    paths[2].write_bytes(paths[2].read_bytes()[:100])
    mirror.asked.clear()
    assert sources.faults(obtain(source, None, tmp_path, quiet)) == []
    assert times_asked(mirror) == {paths[2].name: 1}


def test_a_failed_refetch_does_not_lose_what_was_there(
    tmp_path: Path, tiny: Any, mirror_of: Mirrors
) -> None:
    paths = obtain(tiny.source(mirror_of(tiny.packed).url), None, tmp_path, quiet)
    paths[0].write_bytes(b"bad")
    with pytest.raises(DataError, match="HTTP 404"):
        obtain(tiny.source(mirror_of({}).url), None, tmp_path, quiet)
    assert paths[0].read_bytes() == b"bad"
    assert all(path.exists() for path in paths)


def test_threads_at_once_fetch_once_and_the_waiting_report(
    tmp_path: Path, tiny: Any, mirror_of: Mirrors
) -> None:
    mirror = mirror_of(tiny.packed)
    mirror.gate.clear()
    source = tiny.source(mirror.url)
    heard: list[tuple[str, int, int | None]] = []
    # As if an earlier run had left something: the waiting ones see its size at once.
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz.part").write_bytes(b"")
    waiting = threading.Event()

    def report(name: str, have: int, total: int | None) -> None:
        heard.append((name, have, total))
        waiting.set()

    results: list[sources.Paths] = []
    threads = [
        threading.Thread(target=lambda: results.append(obtain(source, None, tmp_path, report)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert waiting.wait(10)
    mirror.gate.set()
    for thread in threads:
        thread.join(20)
    assert len(results) == 3
    assert len(set(results)) == 1
    assert times_asked(mirror) == dict.fromkeys(tiny.packed, 1)
    assert heard[0] == ("train-images-idx3-ubyte.gz", 0, None)


CHILD = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from shoal.train.data.obtain import obtain
    from shoal.train.data.sources import Source, SourceFile

    url, cache, *rest = sys.argv[1:]
    files = tuple(
        SourceFile(name=name, shape=tuple(map(int, shape.split("x"))), sha256=sha256)
        for name, shape, sha256 in (one.split(",") for one in rest)
    )
    source = Source(name="mnist", files=files, mirrors=(url,))
    print("ready", flush=True)
    sys.stdin.readline()
    print(obtain(source, None, Path(cache), lambda *_: None)[0])
    """
)


def test_processes_at_once_fetch_once(tmp_path: Path, tiny: Any, mirror_of: Mirrors) -> None:
    mirror = mirror_of(tiny.packed)
    source = tiny.source(mirror.url)
    files = [f"{file.name},{'x'.join(map(str, file.shape))},{file.sha256}" for file in source.files]
    command = [sys.executable, "-W", "error", "-c", CHILD, mirror.url, str(tmp_path), *files]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        for child in children:
            out, _ = child.communicate(timeout=30)
            assert child.returncode == 0
            assert out.strip() == str(tmp_path / "mnist" / "train-images-idx3-ubyte.gz")
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert times_asked(mirror) == dict.fromkeys(tiny.packed, 1)
    assert not list((tmp_path / "mnist").glob("*.part"))


def test_a_holder_that_does_nothing_is_not_waited_for_for_ever(
    tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch, dead_url: str
) -> None:
    monkeypatch.setattr(room, "STALL_S", 0.2)
    folder = tmp_path / "mnist"
    folder.mkdir()
    with (folder / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process downloads into this folder"):
            obtain(tiny.source(dead_url), None, tmp_path, quiet)


def test_a_cache_that_cannot_be(tmp_path: Path, tiny: Any, dead_url: str) -> None:
    source = tiny.source(dead_url)
    blocker = tmp_path / "file"
    blocker.touch()
    long = tmp_path / ("x" * 5_000)
    for cache in (blocker, blocker / "below", long):
        with pytest.raises(DataError, match="cannot be used"):
            obtain(source, None, cache, quiet)
        (fault,) = room.faults(source, cache)
        assert "cannot be used" in fault
        assert "--data-dir" in fault
    assert room.faults(source, tmp_path / "to" / "be" / "made") == []
