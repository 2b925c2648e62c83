"""The folder of a run: its name, whole files or none, clear words when it cannot be written."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from mounts import PAGE, disk, fill

from shoal.errors import StorageError
from shoal.report.records import EpochRecord, LayoutRecord, StepRecord, Summary
from shoal.report.run_folder import RunFolder, faults, folder_while_needed
from shoal.settings import TrainSettings

SUMMARY = Summary(
    model="mnist-cnn", data="mnist-sample", seed=0, batch_size=128, sync="ring", transport="dist",
    schedule=None, layout=LayoutRecord(replicas=2, stages=1), hosts=["here", "there"],
    parameters=819_557, folder="runs/x", shoal="0.1.0", torch="2.13.0",
    epochs=[
        EpochRecord(
            epoch=1, train_loss=None, train_accuracy=0.5, test_loss=0.25, test_accuracy=0.75,
            seconds=1.5, samples_per_second=100.0, bytes_sent=2**40,
        )
    ],
)  # fmt: skip


def step(number: int) -> StepRecord:
    return StepRecord(epoch=1, step=number, loss=0.5, accuracy=None, seconds=0.25)


def create(out: Path, name: str = "demo") -> RunFolder:
    return RunFolder.create(str(out), name, TrainSettings(name=name))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "disk", 16 * PAGE) as folder:
        yield folder


# -- what is in it ---------------------------------------------------------------------------------


def test_its_name_is_the_time_and_the_runs_name(tmp_path: Path) -> None:
    with create(tmp_path / "new" / "runs") as folder:
        assert folder.path.parent == tmp_path / "new" / "runs"
        assert re.fullmatch(r"\d{8}-\d{6}-demo", folder.path.name)


def test_runs_that_begin_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    paths = []
    for _ in range(20):
        with create(tmp_path) as folder:
            paths.append(folder.path)
    assert len(set(paths)) == 20
    assert all(re.fullmatch(r"\d{8}-\d{6}-demo(-\d+)?", path.name) for path in paths)
    assert any(path.name.endswith("demo-2") for path in paths), "twenty take less than a second"


def test_one_that_stays_empty_is_gone_afterwards(tmp_path: Path) -> None:
    out = tmp_path / "new" / "runs"
    with folder_while_needed(str(out), "x") as folder:
        assert folder.is_dir()
    assert not out.exists()
    with folder_while_needed(str(out), "x") as folder:
        (folder / "kept").touch()
    with folder_while_needed(str(out), "x"):
        pass
    assert [path.name for path in out.glob("*/*")] == ["kept"]


def test_settings_are_there_from_the_start(tmp_path: Path) -> None:
    with create(tmp_path) as folder:
        stored = (folder.path / "settings.json").read_bytes()
    assert msgspec.json.decode(stored, type=TrainSettings) == TrainSettings(name="demo")
    assert stored.endswith(b"\n")
    assert stored.count(b"\n") > 10, "for people to read: a line per setting"


def test_metrics_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    with create(tmp_path) as folder:
        metrics = folder.path / "metrics.jsonl"
        assert metrics.read_text() == ""
        for number in (1, 2, 3):
            folder.log(step(number))
            lines = metrics.read_text().splitlines()
            assert [json.loads(line)["step"] for line in lines] == list(range(1, number + 1))
    assert json.loads(lines[0]) == {
        "epoch": 1, "step": 1, "loss": 0.5, "accuracy": None, "seconds": 0.25,
    }  # fmt: skip


def test_the_summary_is_what_was_given(tmp_path: Path) -> None:
    with create(tmp_path) as folder:
        folder.finish(SUMMARY)
        stored = (folder.path / "summary.json").read_bytes()
    assert msgspec.json.decode(stored, type=Summary) == SUMMARY
    assert json.loads(stored)["epochs"][0]["train_loss"] is None


# -- never half a file -----------------------------------------------------------------------------


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    def fail_half_way(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("half way")

    with create(tmp_path) as folder:
        folder.write("model.safetensors", b"whole")
        before = sorted(p.name for p in folder.path.iterdir())
        with pytest.raises(RuntimeError, match="half way"):
            folder.replace("model.safetensors", fail_half_way)
        assert (folder.path / "model.safetensors").read_bytes() == b"whole"
        assert sorted(p.name for p in folder.path.iterdir()) == before


def test_a_file_appears_under_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    with create(tmp_path) as folder:
        target = folder.path / "model.safetensors"

        def write(path: Path) -> None:
            path.write_bytes(b"whole")
            assert not target.exists()

        folder.replace("model.safetensors", write)
        assert target.read_bytes() == b"whole"


# -- a full disk -----------------------------------------------------------------------------------


def test_a_full_disk_is_found_before_the_start(small_disk: Path) -> None:
    assert faults(str(small_disk / "runs")) == []
    fill(small_disk)
    (found,) = faults(str(small_disk / "runs"))
    assert found.startswith(f"--out {small_disk / 'runs'}: ")
    assert "full" in found


def test_lines_of_a_disk_that_fills_up_are_whole(small_disk: Path) -> None:
    """Where a line does not fit, its beginning is not left behind either.

    The system writes what fits and says so only by a number, which once was not looked at.
    """
    with create(small_disk) as folder:
        metrics = folder.path / "metrics.jsonl"
        fill(small_disk, leave_bytes=2 * PAGE)
        with pytest.raises(StorageError) as caught:
            log_without_end(folder)
        lines = metrics.read_text().splitlines()
        logged = len(lines)
        assert [json.loads(line)["step"] for line in lines] == list(range(1, logged + 1))
        assert 2 * PAGE - 100 < metrics.stat().st_size <= 2 * PAGE
        assert f"No space left to write {metrics}" in str(caught.value)
        assert "--out" in str(caught.value)

        (small_disk / "filler").unlink()  # and when there is room again, it goes on
        folder.log(step(logged + 1))
        assert json.loads(metrics.read_text().splitlines()[-1])["step"] == logged + 1


def log_without_end(folder: RunFolder) -> None:
    for number in itertools.count(1):
        folder.log(step(number))


def test_a_file_that_does_not_fit_is_not_there(small_disk: Path) -> None:
    with create(small_disk) as folder:
        folder.finish(SUMMARY)
        before = {p.name: p.read_bytes() for p in folder.path.iterdir()}
        for name in ("model.safetensors", "summary.json"):
            with pytest.raises(StorageError, match="No space left"):
                folder.write(name, b"x" * 17 * PAGE)
        assert {p.name: p.read_bytes() for p in folder.path.iterdir()} == before


def test_a_folder_on_a_full_disk_is_refused_and_closed(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(StorageError, match="No space left"):
        create(small_disk)


# -- folders that cannot be written ----------------------------------------------------------------


def test_what_is_fine_leaves_no_trace(tmp_path: Path) -> None:
    assert faults(str(tmp_path)) == []
    assert faults(str(tmp_path / "a" / "b" / "c")) == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/below/it"):
        (found,) = faults(str(tmp_path / out))
        assert found.startswith(f"--out {tmp_path / out}: ")
        assert f"{tmp_path / 'file'} is a file" in found
        with pytest.raises(StorageError, match="cannot be written"):
            create(tmp_path / out)


def test_a_disk_that_may_only_be_read(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", 16 * PAGE, "ro") as folder:
        (found,) = faults(str(folder / "runs"))
        assert f"no folder can be made in {folder}" in found
        assert "Read-only file system" in found
        with pytest.raises(StorageError, match=r"Read-only file system.*--out"):
            create(folder / "runs")


def test_a_name_that_no_disk_takes(tmp_path: Path) -> None:
    out = tmp_path / ("x" * 300)
    (found,) = faults(str(out))
    assert found.startswith(f"--out {out}: ")
    assert "File name too long" in found


@pytest.mark.skipif(os.geteuid() != 0, reason="root becomes another user here")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    """Root may write anywhere, so it asks as nobody."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    locked = tmp_path / "locked"
    locked.mkdir(0o700)
    for out in (locked, locked / "runs"):
        os.seteuid(65534)
        try:
            (found,) = faults(str(out))
        finally:
            os.seteuid(0)
        assert found.startswith(f"--out {out}: no folder can be made in {out} (Permission denied)")
