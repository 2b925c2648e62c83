"""Real runs: what they keep and print, and settings and disks that are not fit for one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from mounts import PAGE, disk
from processes import SHOAL, Running
from safetensors.torch import load_file

from shoal.settings import TrainSettings
from shoal.train.data import idx
from shoal.train.data.sample import read as read_sample
from shoal.train.data.sets import MNIST_MEAN_STD, ImageSet
from shoal.train.models.zoo import TutorialCnn

SMALL = ("--model", "residual-mlp", "--data", "sine", "--threads", "1")

USERS_OWN = '''
import os
import numpy as np
import torch
from torch import nn

print("imported")

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        return self.layer(x)

class Chatty(Small):
    def forward(self, x):
        print("a forward pass")
        os.write(1, b"from below python\\n")
        return super().forward(x)

class Dropping(Small):
    def forward(self, x):
        return nn.functional.dropout(self.layer(x), 0.5, training=self.training)

class Drifting(Small):
    """Its weights go another way on every rank: no sync can make up for that."""
    def forward(self, x):
        with torch.no_grad():
            self.layer.weight += torch.distributed.get_rank()
        return super().forward(x)

def few():
    samples = [(np.float32([i]), np.float32([i])) for i in range(4)]
    return samples, samples
'''


def train(*options: str) -> tuple[str, ...]:
    return (*SHOAL, "train", *options)


@pytest.fixture
def users_own(tmp_path: Path) -> str:
    """A folder with a user's module in it, for PYTHONPATH."""
    folder = tmp_path / "users"
    folder.mkdir()
    (folder / "users_own.py").write_text(USERS_OWN)
    return str(folder)


def assert_one_paragraph(run: Running) -> None:
    assert "Traceback" not in run.said
    assert run.err.count("shoal: ") == 1
    assert run.err.startswith("shoal: ")


# -- what a run keeps ------------------------------------------------------------------------------

EPOCHS, BATCH, LOG_EVERY, STEPS = 2, 500, 3, 8
KEPT_OPTIONS = (
    "--workers", "2", "--sync", "ring", "--model", "tutorial-cnn", "--data", "mnist-sample",
    "--epochs", str(EPOCHS), "--batch-size", str(BATCH), "--log-every", str(LOG_EVERY),
    "--seed", "5", "--lr", "0.1", "--name", "kept", "--out", "here", "--json",
)  # fmt: skip


class Kept:
    """One run of two ranks, which several tests look at."""

    def __init__(self, run: Running, folder: Path) -> None:
        self.run = run
        (self.folder,) = (folder / "here").iterdir()
        self.summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_bytes())


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    folder = tmp_path_factory.mktemp("kept")
    run = Running(folder, train(*KEPT_OPTIONS))
    try:
        assert run.end() == 0, run.said
        yield Kept(run, folder)
    finally:
        run.kill()


def test_a_run_folder_has_four_files(kept: Kept) -> None:
    assert kept.folder.name.endswith("-kept")
    assert sorted(path.name for path in kept.folder.iterdir()) == [
        "metrics.jsonl",
        "model.safetensors",
        "settings.json",
        "summary.json",
    ]


def test_settings_are_kept_complete(kept: Kept) -> None:
    stored = (kept.folder / "settings.json").read_bytes()
    assert set(json.loads(stored)) == {f.name for f in msgspec.structs.fields(TrainSettings)}
    assert msgspec.json.decode(stored, type=TrainSettings) == TrainSettings(
        model="tutorial-cnn", sync="ring", epochs=EPOCHS, batch_size=BATCH, log_every=LOG_EVERY,
        seed=5, lr=0.1, name="kept", out="here",
    )  # fmt: skip


def test_metrics_have_a_line_per_logged_step(kept: Kept) -> None:
    lines = [json.loads(line) for line in (kept.folder / "metrics.jsonl").read_text().splitlines()]
    in_epoch = [3, 6, 8]  # every third, and the last
    assert [(line["epoch"], line["step"]) for line in lines] == [
        (epoch, STEPS * (epoch - 1) + step) for epoch in (1, 2) for step in in_epoch
    ]
    for line in lines:
        assert set(line) == {"epoch", "step", "loss", "accuracy", "seconds"}
        assert math.isfinite(line["loss"])
        assert 0 <= line["accuracy"] <= 1
    times = [line["seconds"] for line in lines]
    assert times == sorted(times)
    # Means over the steps since the last line: weighed by steps they give the epoch's.
    weighed = sum(line["loss"] * steps for line, steps in zip(lines, [3, 3, 2], strict=False))
    assert weighed / STEPS == pytest.approx(kept.summary["epochs"][0]["train_loss"])


def test_the_summary_has_the_fields_that_are_promised(kept: Kept) -> None:
    summary = kept.summary
    promised = {
        "model", "data", "seed", "batch_size", "sync", "transport", "schedule", "microbatches",
        "layout", "stages", "hosts", "parameters", "epochs",
    }  # fmt: skip
    assert set(summary) == promised | {"folder", "shoal", "torch"}
    assert summary["model"] == "tutorial-cnn"
    assert summary["data"] == "mnist-sample"
    assert (summary["seed"], summary["batch_size"], summary["sync"]) == (5, BATCH, "ring")
    assert (summary["transport"], summary["schedule"]) == ("dist", None)
    assert summary["layout"] == {"replicas": 2, "stages": 1}
    assert (summary["stages"], summary["microbatches"]) == ([], 1)
    assert summary["hosts"] == [os.uname().nodename] * 2
    assert summary["parameters"] == 21_840
    assert [epoch["epoch"] for epoch in summary["epochs"]] == [1, 2]
    for epoch in summary["epochs"]:
        assert set(epoch) == {
            "epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds",
            "samples_per_second", "bytes_sent",
        }  # fmt: skip
        assert epoch["samples_per_second"] == pytest.approx(4000 / epoch["seconds"], rel=0.01)


def test_bytes_sent_are_what_the_ring_needs(kept: Kept) -> None:
    gradient, ranks = 21_840 * 4, 2
    for epoch in kept.summary["epochs"]:
        assert epoch["bytes_sent"] == pytest.approx(STEPS * 2 * (ranks - 1) * gradient, rel=0.01)


def test_the_weights_load_into_the_plain_model_and_do_what_was_reported(kept: Kept) -> None:
    model = TutorialCnn()
    model.load_state_dict(load_file(kept.folder / "model.safetensors"), strict=True)
    digits = ImageSet(*read_sample()[1], MNIST_MEAN_STD)
    x, y = digits.take(torch.arange(len(digits)))
    with torch.no_grad():
        hits = (model.eval()(x).argmax(1) == y).sum().item()
    reported = kept.summary["epochs"][-1]["test_accuracy"]
    assert reported > 0.5, "it has learnt something"
    assert abs(hits - reported * len(digits)) <= 1  # rounding may turn one that is on the edge


def test_json_is_the_same_object_and_alone(kept: Kept) -> None:
    assert json.loads(kept.run.out) == kept.summary
    assert kept.run.out.count("\n") == 1
    assert "Traceback" not in kept.run.err


# -- only the summary on standard output -----------------------------------------------------------


def assert_json_is_alone(run: Running) -> dict[str, Any]:
    assert run.end() == 0, run.said
    summary: dict[str, Any] = json.loads(run.out)
    assert summary["model"] == "users_own:Chatty"
    for text in ("imported", "a forward pass", "from below python"):
        assert text in run.err
    return summary


def test_json_stays_alone_when_the_model_prints(start_warm, users_own: str) -> None:
    """A model that prints once put its lines before the summary, where there was no launcher."""
    run = start_warm(
        *train("--model", "users_own:Chatty", "--data", "sine", "--batch-size", "2048"),
        *("--epochs", "1", "--threads", "1", "--json"),
        PYTHONPATH=users_own,
    )
    assert_json_is_alone(run)


def test_a_summary_of_many_epochs_comes_through_alone_when_ranks_print(
    start, users_own: str
) -> None:
    """The launcher once cut what ranks tell it at 64 KiB, and failed after the last epoch."""
    epochs = 400
    run = start(
        *train("--workers", "2", "--model", "users_own:Chatty", "--data", "users_own:few"),
        *("--batch-size", "4", "--epochs", str(epochs), "--threads", "1", "--lr", "0.01", "--json"),
        PYTHONPATH=users_own,
    )
    assert len(assert_json_is_alone(run)["epochs"]) == epochs
    assert len(run.out) > 64 * 1024


# -- disks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["alone", "two ranks"])
def test_a_disk_that_fills_up_during_training(
    start, start_warm, tmp_path: Path, users_own: str, workers: tuple[str, ...]
) -> None:
    begin = start if workers else start_warm
    with disk(tmp_path / "disk", 4 * PAGE) as out:
        run = begin(
            *train("--model", "users_own:Small", "--data", "sine", "--batch-size", "4"),
            *("--log-every", "1", "--out", str(out), "--threads", "1", *workers),
            PYTHONPATH=users_own,
        )
        assert run.end() == 1
        (folder,) = out.iterdir()
        assert_one_paragraph(run)
        assert f"No space left to write {folder / 'metrics.jsonl'}" in run.err
        assert "rank 0" in run.err
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
        assert len(lines) > 10
        assert sorted(p.name for p in folder.iterdir()) == ["metrics.jsonl", "settings.json"]


def test_a_disk_that_the_weights_do_not_fit_on(start_warm, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", 2**20) as out:
        run = start_warm(*train(*SMALL, "--batch-size", "2048", "--epochs", "1", "--out", str(out)))
        assert run.end() == 1
        (folder,) = out.iterdir()
        assert_one_paragraph(run)
        assert f"No space left to write {folder / 'model.safetensors'}" in run.err
        assert sorted(p.name for p in folder.iterdir()) == ["metrics.jsonl", "settings.json"]


def test_a_disk_that_the_logs_do_not_fit_on(start, tmp_path: Path) -> None:
    """More is said when that is known: by the rank, while it is ended."""
    script = tmp_path / "flood.py"
    script.write_text("for number in range(100_000): print('line', number)")
    with disk(tmp_path / "disk", 16 * PAGE) as out:
        words = ("--hosts", "localhost", "--no-sync", "--out", str(out))
        run = start(*SHOAL, "run", *words, str(script))
        assert run.end() == 1
        (folder,) = out.iterdir()
        assert_one_paragraph(run)
        assert f"No space left to write {folder / 'logs/rank0.log'}" in run.err
        log = (folder / "logs/rank0.log").read_text()
    assert log == "".join(f"line {number}\n" for number in range(100_000))[: len(log)]


@pytest.mark.parametrize("command", ["train", "run"])
def test_a_disk_that_may_only_be_read_is_found_before_the_start(
    start, tmp_path: Path, command: str
) -> None:
    with disk(tmp_path / "disk", 4 * PAGE, "ro") as out:
        words = [] if command == "train" else [__file__]
        run = start(*SHOAL, command, "--out", str(out), "--workers", "2", *words)
        assert run.end() == 2
        assert_one_paragraph(run)
        assert f"--out {out}" in run.err
        assert "Read-only file system" in run.err


def test_a_file_where_the_folder_should_be(start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = start(*train("--out", str(tmp_path / "file" / "runs")))
    assert run.end() == 2
    assert_one_paragraph(run)
    assert f"{tmp_path / 'file'} is a file" in run.err


# -- settings that cannot be run -------------------------------------------------------------------


def faults_of(run: Running) -> list[str]:
    """What is wrong, one by one; and it ended as a mistake of the user's does."""
    assert run.end() == 2, run.said
    assert run.out == ""
    head, *faults = run.err.splitlines()
    assert head == "shoal: this cannot be run:"
    assert all(fault.startswith("- ") for fault in faults)
    return [fault.removeprefix("- ") for fault in faults]


def assert_nothing_was_made(tmp_path: Path) -> None:
    """`start` gives a process a folder with these two files."""
    made = {path.name for path in tmp_path.glob("process*/*")}
    assert made == {"out", "err"}


def test_all_bad_settings_are_reported_together(start, tmp_path: Path) -> None:
    run = start(
        *train("--batch-size", "1", "--workers", "4", "--sync", "x", "--model", "y"),
        *("--data", "z", "--lr", "0", "--json"),
    )
    faults = faults_of(run)
    words = ("--batch-size 1", "--lr 0", "--sync x", "--model y", "--data z")
    assert len(faults) == len(words)
    for fault, word in zip(faults, words, strict=True):
        assert word in fault
    assert_nothing_was_made(tmp_path)


def test_no_workers_at_all(start, tmp_path: Path) -> None:
    (fault,) = faults_of(start(*train("--workers", "0")))
    assert fault == "--workers 0: must be at least 1."
    assert_nothing_was_made(tmp_path)


def test_factories_that_cannot_be_imported(start_warm, users_own: str) -> None:
    run = start_warm(
        *train("--model", "users_own:Smal", "--data", "no_such_module:few", "--workers", "2"),
        PYTHONPATH=users_own,
    )
    run.end()
    assert run.out == "imported\n"  # by the user's own module
    assert run.process.returncode == 2
    assert "Traceback" not in run.err
    assert "users_own has no 'Smal'; it has: Chatty, Drifting, Dropping, Small" in run.err
    assert "No module named 'no_such_module'" in run.err


@pytest.fixture
def digits_folder(tmp_path: Path) -> Path:
    """A data set as MNIST's, of a few black images."""
    folder = tmp_path / "digits"
    folder.mkdir()
    for part, number in (("train", 20), ("t10k", 10)):
        images = idx.encode(np.zeros((number, 28, 28), dtype=np.uint8))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
        labels = idx.encode(np.zeros(number, dtype=np.uint8))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    return folder


def test_a_data_file_that_was_cut_short(start, tmp_path: Path, digits_folder: Path) -> None:
    options = ("--data", "mnist", "--data-dir", str(digits_folder), "--sync", "x")
    (only,) = faults_of(start(*train(*options)))
    assert "--sync x" in only, "the files are fine as they are"

    images = digits_folder / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-100])
    sync, cut = faults_of(start(*train(*options)))
    assert "--sync x" in sync
    assert str(images) in cut
    assert_nothing_was_made(tmp_path)


# -- `shoal run` -----------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
         "OMP_NUM_THREADS")
print(json.dumps([sys.argv[1:], {name: os.environ[name] for name in names}]))
"""


def told(run: Running, workers: int) -> list[tuple[list[str], dict[str, str]]]:
    assert run.end() == 0, run.said
    lines = sorted(run.out.splitlines())
    assert [line[:4] for line in lines] == [f"[{rank}] " for rank in range(workers)]
    return [json.loads(line[4:]) for line in lines]


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_gets_its_arguments_and_its_place(start, tmp_path: Path, as_module: bool) -> None:
    script = tmp_path / "users_script.py"
    script.write_text(SCRIPT)
    own = ["--its-args", "--workers", "9", "-m", "--", "--help"]
    what = ["-m", "users_script"] if as_module else [str(script)]
    run = start(
        *SHOAL, "run", "--workers", "2", "--threads", "3", *what, *own, PYTHONPATH=str(tmp_path)
    )
    ports = set()
    for rank, (arguments, variables) in enumerate(told(run, 2)):
        assert arguments == own
        ports.add(variables.pop("MASTER_PORT"))
        assert variables == {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "3",
        }  # fmt: skip
    assert len(ports) == 1


def test_what_a_script_keeps_is_in_the_run_folder(start, tmp_path: Path) -> None:
    """As with --hosts; and where nothing is kept there is none."""
    script = tmp_path / "keep.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "for name in sys.argv[1:]: (pathlib.Path(os.environ['SHOAL_RESULTS']) / name).touch()"
    )
    words = (*SHOAL, "run", "--workers", "1", "--out", str(tmp_path / "runs"), str(script))
    run = start(*words)
    assert run.end() == 0, run.said
    assert not (tmp_path / "runs").exists()
    run = start(*words, "weights")
    assert run.end() == 0, run.said
    assert [path.name for path in tmp_path.glob("runs/*-keep/*")] == ["weights"]


def test_an_option_that_does_not_exist_is_not_taken_for_the_scripts(start, tmp_path: Path) -> None:
    script = tmp_path / "users_script.py"
    script.write_text(SCRIPT)
    run = start(*SHOAL, "run", "--wrokers", "2", str(script))
    assert run.end() == 2
    assert "--wrokers" in run.err
    assert run.out == ""


def test_a_script_that_does_not_exist(start) -> None:
    faults = faults_of(start(*SHOAL, "run", "--workers", "0", "no_such_script.py"))
    assert faults[0] == "--workers 0: must be at least 1."
    assert faults[1].startswith("no_such_script.py: there is no such script")


# -- `--verify` ------------------------------------------------------------------------------------


def test_a_layout_that_is_exact_passes(start, tmp_path: Path, users_own: str) -> None:
    """With torch's own sync, and functional dropout, which must not disturb the comparison. The
    ring over zmq: see parity/test_data_parallel.py."""
    run = start(
        *train("--verify", "--workers", "2", "--batch-size", "7", "--sync", "ddp"),
        *("--model", "users_own:Dropping", "--data", "sine", "--threads", "1"),
        PYTHONPATH=users_own,
    )
    assert run.end() == 0, run.said
    assert "2 replicas, sync ddp, against one process" in run.out
    assert "float64" in run.out
    assert run.out.splitlines()[-1] == "pass"
    assert_nothing_was_made(tmp_path)


def test_a_layout_that_is_not_exact_fails(start, users_own: str) -> None:
    """On samples of numpy's, which a loader takes as well as tensors; --verify once did not."""
    run = start(
        *train("--verify", "--workers", "2", "--batch-size", "3"),
        *("--model", "users_own:Drifting", "--data", "users_own:few"),
        PYTHONPATH=users_own,
    )
    assert run.end() == 1, run.said
    assert "Traceback" not in run.said
    assert "in layer.weight (tolerance" in run.out
    assert run.out.splitlines()[-1] == "fail"
