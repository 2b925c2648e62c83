"""The way in: names, faults before anything starts, and loading."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.errors import DataError
from shoal.train.data import catalog, sources
from shoal.train.data.load import load
from shoal.train.data.sets import ImageSet


def quiet(name: str, have: int, total: int | None) -> None:
    pass


def test_no_torch_is_imported() -> None:
    code = "import sys, shoal.train.data.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


def test_names_and_shapes() -> None:
    assert catalog.NAMES == ("mnist-sample", "mnist", "fashion-mnist", "sine")
    assert catalog.entry("sine").input_shape == (1,)
    for name in catalog.NAMES[:3]:
        assert catalog.entry(name).input_shape == (1, 28, 28)
    assert set(sources.SOURCES) <= set(catalog.NAMES)


@pytest.mark.parametrize("name", ["mnist-sample", "sine"])
def test_embedded_data_loads_as_the_catalog_says(name: str, tmp_path: Path) -> None:
    assert catalog.faults(name, None, tmp_path) == []
    catalog.prepare(name, None, tmp_path, quiet)
    data = load(name, None, tmp_path)
    for part in (data.train, data.test):
        x, _ = part[0]
        assert x.shape == catalog.entry(name).input_shape
        assert x.dtype == torch.float32
    assert list(tmp_path.iterdir()) == []


def test_sample_is_normalised(tmp_path: Path) -> None:
    train = load("mnist-sample", None, tmp_path).train
    assert isinstance(train, ImageSet)
    x, _ = train.take(torch.arange(4_000))
    assert abs(x.mean().item()) < 0.02
    assert abs(x.std().item() - 1) < 0.02


def test_unknown_name_with_near_ones(tmp_path: Path) -> None:
    (fault,) = catalog.faults("minst", None, tmp_path)
    assert "Did you mean mnist?" in fault
    assert all(name in fault for name in catalog.NAMES)
    (fault,) = catalog.faults("imagenet", None, tmp_path)
    assert "Did you mean" not in fault
    with pytest.raises(DataError, match="Did you mean fashion-mnist"):
        load("fashion_mnist", None, tmp_path)


def test_a_factory_is_judged_elsewhere(tmp_path: Path) -> None:
    assert catalog.faults("package.module:factory", tmp_path / "nowhere", tmp_path) == []


def test_all_faults_at_once(tmp_path: Path) -> None:
    name, folder = catalog.faults("minst", tmp_path / "nowhere", tmp_path)
    assert "unknown" in name
    assert "there is no such folder" in folder
    (fault,) = catalog.faults("mnist", tmp_path / "nowhere", tmp_path)
    assert "there is no such folder" in fault
    (fault,) = catalog.faults("mnist", tmp_path, tmp_path)
    assert fault.count("-ubyte[.gz]") == 4
    (fault,) = catalog.faults("sine", tmp_path / ("x" * 5_000), tmp_path)
    assert "no way to look into it" in fault


def test_a_folder_that_would_not_be_read_is_a_fault(tmp_path: Path) -> None:
    (fault,) = catalog.faults("mnist-sample", tmp_path, tmp_path)
    assert "reads no folder" in fault


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_own_files(name: str, tmp_path: Path, tiny: Any) -> None:
    tiny.write(tmp_path / name, lambda file: f"{file}.gz")
    assert catalog.faults(name, tmp_path, tmp_path / "cache") == []
    catalog.prepare(name, tmp_path, tmp_path / "cache", quiet)
    data = load(name, tmp_path, tmp_path / "cache")
    assert isinstance(data.train, ImageSet)
    assert isinstance(data.test, ImageSet)
    assert (len(data.train), len(data.test)) == (6, 3)
    pixels = torch.from_numpy(tiny.arrays["t10k-images-idx3-ubyte"])
    mean, std = (0.1307, 0.3081) if name == "mnist" else (0.2860, 0.3530)
    torch.testing.assert_close(data.test[2][0][0], (pixels[2] / 255 - mean) / std)
    assert data.test[2][1] == tiny.arrays["t10k-labels-idx1-ubyte"][2]
    assert not (tmp_path / "cache").exists()


def test_every_damaged_file_is_named(tmp_path: Path, tiny: Any) -> None:
    tiny.write(tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    faults = catalog.faults("mnist", tmp_path, tmp_path / "cache")
    assert len(faults) == 4
    assert all(any(file in fault for fault in faults) for file in tiny.arrays)
    with pytest.raises(DataError, match="cut short"):
        load("mnist", tmp_path, tmp_path / "cache")


def test_downloads_in_prepare_or_else_in_load(
    tmp_path: Path,
    tiny: Any,
    mirror_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mirror = mirror_of(tiny.packed)
    monkeypatch.setitem(sources.SOURCES, "mnist", tiny.source(mirror.url))
    for step in ("prepare", "load"):
        cache = tmp_path / step
        assert catalog.faults("mnist", None, cache) == []
        mirror.asked.clear()
        if step == "prepare":
            catalog.prepare("mnist", None, cache, quiet)
            assert len(mirror.asked) == 4
        assert len(load("mnist", None, cache).train) == 6  # type: ignore[arg-type]
        assert len(mirror.asked) == 4
        assert catalog.faults("mnist", None, cache) == []
    # A cache that went bad is not the user's fault: it is mended, and no fault is reported.
    next((tmp_path / "load" / "mnist").glob("*.gz")).write_bytes(b"bad")
    assert catalog.faults("mnist", None, tmp_path / "load") == []
    assert len(load("mnist", None, tmp_path / "load").test) == 3  # type: ignore[arg-type]


def test_a_cache_that_is_a_file_is_a_fault_only_where_it_is_needed(
    tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sources.SOURCES, "mnist", tiny.source())
    (tmp_path / "cache").touch()
    (fault,) = catalog.faults("mnist", None, tmp_path / "cache")
    assert "is not a folder" in fault
    assert catalog.faults("mnist", tiny.write(tmp_path / "mine"), tmp_path / "cache") == []
    assert catalog.faults("mnist-sample", None, tmp_path / "cache") == []
