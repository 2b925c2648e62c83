"""The check before the start: everything at once, and without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.settings import TrainSettings
from shoal.train.check import check


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))


def faults(num_replicas: int = 1, **settings: Any) -> list[str]:
    return check(TrainSettings(**settings), num_replicas)


def test_the_defaults_can_be_run_and_nothing_is_left_behind(tmp_path: Path) -> None:
    assert faults() == []
    assert list(tmp_path.iterdir()) == []


def test_everything_is_reported_together(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = faults(
        4, batch_size=1, sync="x", model="y", data="z", lr=0.0, out=str(tmp_path / "file")
    )
    text = "\n".join(found)
    assert len(found) == 6
    for word in ("--batch-size 1", "--sync x", "--model y", "z", "--lr 0.0", "--out"):
        assert word in text


def test_no_more_stages_than_the_model_has_steps() -> None:
    """All workers were started and waited for, and then one of them said so."""
    for boss, option in ((True, "--workers"), (False, "--stages")):
        how = {"boss": boss, "schedule": "gpipe", "transport": "zmq"}
        assert faults(13, stages=13, microbatches=13, **how) == []
        (fault,) = faults(14, stages=14, microbatches=14, **how)
        assert fault.startswith(f"{option} 14: --model mnist-cnn has 13 steps")


def test_what_other_hosts_lack_they_tell_themselves() -> None:
    away = TrainSettings(data="mnist", data_dir="/not/here", device="cuda")
    assert len(check(away, 1)) == 2
    assert check(away, 1, is_elsewhere=True) == []
    (fault,) = check(TrainSettings(data="mnist-sampel"), 1, is_elsewhere=True)
    assert "Did you mean mnist-sample" in fault
    idle = TrainSettings(model="residual-mlp", data="sine", data_dir="/not/here")
    (fault,) = check(idle, 1, is_elsewhere=True)
    assert "data sine reads no folder" in fault


def test_factories_of_model_and_data_are_both_tried() -> None:
    found = faults(model="no_model_here:make", data="no_data_here:make")
    assert [text.split(": ")[0] for text in found] == [
        "--model no_model_here:make",
        "--data no_data_here:make",
    ]


def test_a_model_that_is_not_known_shows_those_that_are() -> None:
    (found,) = faults(model="mnist-cn")
    assert "Did you mean mnist-cnn" in found
    assert "residual-mlp, or package.module:factory of your own." in found


def test_data_that_is_not_known_shows_those_that_are() -> None:
    (found,) = faults(data="minst")
    assert "mnist" in found
    assert "fashion-mnist" in found


@pytest.mark.parametrize(
    ("model", "data", "fitting"),
    [
        ("residual-mlp", "mnist-sample", "sine"),
        ("mnist-cnn", "sine", "mnist-sample, mnist, fashion-mnist"),
    ],
)
def test_a_model_and_data_that_do_not_fit(model: str, data: str, fitting: str) -> None:
    (found,) = faults(model=model, data=data)
    assert f"--model {model} takes samples of shape" in found
    assert found.endswith(f"Data for this model: {fitting}.")


def test_data_files_are_looked_at(tmp_path: Path) -> None:
    found = faults(data="mnist", data_dir=str(tmp_path))
    assert found
    assert "train-images-idx3-ubyte" in found[0]


def test_a_comparison_keeps_nothing_so_its_folder_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert len(faults(out=str(tmp_path / "file"))) == 1
    assert faults(out=str(tmp_path / "file"), verify=True) == []


@pytest.mark.parametrize("module", ["shoal.train.check", "shoal.cli.main"])
def test_the_launcher_needs_no_torch(module: str) -> None:
    """It only starts ranks: with torch, it would take seconds to find a misspelt option."""
    code = f"""
import sys
import {module}
from shoal.settings import TrainSettings
from shoal.train.check import check
assert check(TrainSettings(), 2) == []
assert check(TrainSettings(model="residual-mlp", data="sine", sync="x"), 2)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
