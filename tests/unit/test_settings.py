"""Settings: every fault is found, all of them at once; ranks compare what must be equal."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.settings import (
    DEVICES,
    LOCAL_FIELDS,
    OPTIMIZERS,
    SYNCS,
    TrainSettings,
    cache_dir,
    config_folder,
    faults,
    microbatches_made,
    shared_settings,
    threads_each,
    unknown,
    usable_cores,
)

BAD: list[tuple[dict[str, Any], str]] = [
    ({"epochs": 0}, "--epochs 0: must be at least 1."),
    ({"log_every": 0}, "--log-every 0: must be at least 1."),
    ({"threads": 0}, "--threads 0: must be at least 1."),
    ({"batch_size": 0}, "--batch-size 0: must be at least 1."),
    ({"batch_size": -4}, "--batch-size -4: must be at least 1."),
    ({"lr": 0.0}, "--lr 0.0: must be a positive number."),
    ({"lr": -1.0}, "--lr -1.0"),
    ({"lr": math.nan}, "--lr nan"),
    ({"lr": math.inf}, "--lr inf"),
    ({"momentum": 1.0}, "--momentum 1.0: must be at least 0 and below 1."),
    ({"momentum": -0.1}, "--momentum -0.1"),
    ({"momentum": math.nan}, "--momentum nan"),
    ({"seed": -1}, "--seed -1"),
    ({"seed": 2**63}, f"--seed {2**63}"),
    ({"timeout_s": 0.0}, "--timeout 0.0"),
    ({"timeout_s": math.nan}, "--timeout nan"),
    ({"timeout_s": math.inf}, "--timeout inf"),
    ({"timeout_s": 1e30}, "--timeout 1e+30"),
    ({"sync": "rings"}, "--sync rings: unknown. Did you mean ring"),
    ({"optimizer": "sdg"}, "--optimizer sdg: unknown. Did you mean sgd?"),
    ({"device": "tpu"}, "--device tpu: unknown."),
    ({"name": ""}, "--name ''"),
    ({"name": ".."}, "--name '..'"),
    ({"name": "a/b"}, "--name 'a/b'"),
    ({"name": "é" * 150}, "--name 'é"),
    ({"name": "caf\udce9"}, "--name 'caf\\udce9': is not UTF-8"),  # a byte of Latin-1 in argv
    ({"data_dir": "\udcff"}, "--data-dir '\\udcff': is not UTF-8"),
]


def test_the_defaults_are_valid() -> None:
    assert faults(TrainSettings(), 1) == []
    assert faults(TrainSettings(), 128) == []


@pytest.mark.parametrize(("changes", "expected"), BAD, ids=lambda value: str(value)[:40])
def test_each_fault_is_found(changes: dict[str, Any], expected: str) -> None:
    (found,) = faults(TrainSettings(**changes), 1)
    assert found.startswith(expected)


def test_the_largest_values_that_are_allowed() -> None:
    generous = TrainSettings(seed=2**63 - 1, momentum=0.0, timeout_s=86_400.0, name="x" * 100)
    assert faults(generous, 1) == []


def test_a_batch_that_cannot_be_shared_out_says_both_numbers() -> None:
    (found,) = faults(TrainSettings(batch_size=3), 4)
    assert found.startswith("--batch-size 3: ")
    assert "4 ranks" in found
    assert faults(TrainSettings(batch_size=4), 4) == []


def test_all_faults_come_together() -> None:
    fields = ("epochs", "log_every", "threads", "batch_size")
    everything = TrainSettings(
        **dict.fromkeys(fields, 0),
        lr=0.0, momentum=2.0, seed=-1, timeout_s=-1.0,
        sync="x", optimizer="x", device="x", name="",
    )  # fmt: skip
    found = faults(everything, 4)
    options = sorted({text.split()[0] for text in found})
    assert options == [
        "--batch-size", "--device", "--epochs", "--log-every", "--lr", "--momentum", "--name",
        "--optimizer", "--seed", "--sync", "--threads", "--timeout",
    ]  # fmt: skip
    assert len(found) == len(options), "one fault for each option, none twice"


@pytest.mark.parametrize(
    ("option", "known"), [("sync", SYNCS), ("optimizer", OPTIMIZERS), ("device", DEVICES)]
)
def test_every_known_name_is_allowed(option: str, known: tuple[str, ...]) -> None:
    for name in known:
        assert faults(TrainSettings(**{option: name}), 1) == []


def test_an_unknown_name_lists_the_near_ones_first_and_then_all() -> None:
    assert unknown("--sync", "ring", SYNCS) == []
    assert unknown("--sync", "serial_ring", SYNCS) == [
        "--sync serial_ring: unknown. Did you mean serial-ring? "
        "Known: all-reduce, central, ring, serial-ring, ddp."
    ]
    assert unknown("--sync", "xyz", ("a", "b")) == ["--sync xyz: unknown. Known: a, b."]


def test_what_a_host_decides_for_itself_is_not_compared() -> None:
    here = TrainSettings(
        data_dir="/a", device="cpu", threads=1, out="/b", name="left", timeout_s=1.0
    )
    assert shared_settings(here) == shared_settings(TrainSettings())
    shared = {field.name for field in msgspec.structs.fields(TrainSettings)} - LOCAL_FIELDS
    assert set(shared_settings(here)) == shared - {"cuts"} | {"cut"}  # as the option is called
    assert shared_settings(TrainSettings())["cut"] == "unset"  # as the meeting says it
    assert shared_settings(TrainSettings(cuts=["a", "b"]))["cut"] == "a, b"


@pytest.mark.parametrize(
    "change",
    [
        {"model": "convnet"}, {"data": "mnist"}, {"sync": "ring"}, {"batch_size": 64},
        {"epochs": 1}, {"optimizer": "adam"}, {"lr": 0.1}, {"momentum": 0.0}, {"seed": 1},
        {"log_every": 1}, {"verify": True},
    ],
)  # fmt: skip
def test_what_must_be_equal_is_compared_by_name(change: dict[str, Any]) -> None:
    ours, theirs = shared_settings(TrainSettings()), shared_settings(TrainSettings(**change))
    assert {name for name in ours if ours[name] != theirs[name]} == set(change)


def test_settings_survive_json() -> None:
    settings = TrainSettings(model="a.b:c", lr=0.1, name="é", threads=3, verify=True)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=TrainSettings) == settings


def test_a_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="lerning_rate"):
        msgspec.json.decode(b'{"lerning_rate": 1}', type=TrainSettings)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        TrainSettings().lr = 1.0  # type: ignore[misc]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "shoal"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "shoal"


def test_where_keys_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config_folder() == tmp_path / "shoal"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config_folder() == tmp_path / ".config" / "shoal"
    monkeypatch.setenv("XDG_CONFIG_HOME", "~/config")  # a key for every working folder
    assert config_folder() == tmp_path / ".config" / "shoal"


def test_threads_of_all_processes_fit_the_cores_we_may_use() -> None:
    cores = usable_cores()
    assert cores == len(os.sched_getaffinity(0))
    assert threads_each(1) == threads_each(0) == cores
    assert threads_each(10 * cores) == 1
    for processes in range(1, cores + 1):
        assert threads_each(processes) * processes <= cores


@pytest.mark.parametrize(
    ("values", "num_ranks", "expected"),
    [
        (
            {"stages": 3, "schedule": "1f1b"},
            4,
            "4 ranks do not make whole replicas of 3 stages; 1 would be left over. Use 3 or 6",
        ),
        ({"stages": 2, "schedule": "1f1b"}, 1, "1 would be left over. Use 2 ranks"),
        ({"stages": 2, "schedule": "1f2b"}, 2, "--schedule 1f2b: unknown. Did you mean 1f1b?"),
        (
            {"stages": 2, "schedule": "gpipe", "microbatches": 0},
            2,
            "--microbatches 0: must be at least 1",
        ),
        (
            {"stages": 3, "schedule": "1f1b", "cuts": ["fc3"]},
            3,
            "it takes 2 cuts to make 3 stages; 1 given (fc3)",
        ),
        ({"schedule": "gpipe"}, 2, "--schedule: is about stages, and there is one"),
        ({"microbatches": 2}, 2, "--microbatches: is about stages, and there is one"),
        ({"cuts": ["a"]}, 2, "--cut: is about stages, and there is one"),
        ({"stages": 0}, 2, "--stages 0: must be at least 1"),
    ],
)
def test_stages_that_cannot_be(values: dict[str, Any], num_ranks: int, expected: str) -> None:
    found = faults(TrainSettings(**values), num_ranks)
    assert len(found) == 1
    assert expected in found[0]


def test_no_stages_hide_no_other_fault() -> None:
    settings = TrainSettings(stages=-2, schedule="1f", microbatches=0, cuts=["a"])
    assert [fault.partition(":")[0] for fault in faults(settings, 2)] == [
        "--stages -2", "--schedule 1f", "--microbatches 0"
    ]  # fmt: skip


def test_stages_share_a_batch_out_over_replicas_only() -> None:
    settings = TrainSettings(stages=4, schedule="1f1b", batch_size=1, sync="ddp", transport="zmq")
    assert faults(settings, 4) == []
    assert "over 2 replicas" in faults(settings, 8)[0]


def test_micro_batches_that_are_made() -> None:
    """A header said 200 of a batch of 128."""
    made = TrainSettings(batch_size=128, stages=2, schedule="1f1b", microbatches=200)
    assert microbatches_made(made, 1) == 128
    assert microbatches_made(made, 3) == 43
    assert microbatches_made(msgspec.structs.replace(made, microbatches=8), 2) == 8
