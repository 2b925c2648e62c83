"""What a person sees, and what a program that reads `--json` sees."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import msgspec
import pytest

from shoal.report import events, waiting
from shoal.report.records import EpochRecord, LayoutRecord, Summary
from shoal.report.terminal import HEADER, Terminal, epoch_line, summary_lines
from shoal.report.waiting import waiting_line


def record(epoch: int = 1, **changes: object) -> EpochRecord:
    plain = EpochRecord(
        epoch=epoch, train_loss=0.25, train_accuracy=0.875, test_loss=0.5, test_accuracy=0.9375,
        seconds=2.0, samples_per_second=2000.0, bytes_sent=1_500_000,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def summary(*epochs: EpochRecord, replicas: int = 2, folder: str | None = "runs/x") -> Summary:
    return Summary(
        model="mnist-cnn", data="mnist-sample", seed=0, batch_size=128, sync="ring",
        transport="dist", schedule=None, layout=LayoutRecord(replicas=replicas, stages=1),
        hosts=["here"] * replicas, parameters=819_557, epochs=list(epochs), folder=folder,
        shoal="0.1.0", torch="2.13.0",
    )  # fmt: skip


STARTED = events.Started(
    model="mnist-cnn", data="mnist-sample", sync="ring", hosts=["here", "there"],
    parameters=819_557, batch_size=128, train_samples=4000, test_samples=1000, threads=[1, 1],
)  # fmt: skip
FAILED = events.Failed(
    rank=1, host="desk", kind="StorageError", message="No space left.\nFree some.", traceback="",
    exit_code=1, is_consequence=False,
)  # fmt: skip
WHOLE_RUN: list[events.Event] = [
    events.Waiting(text="waiting for rank 1"),
    events.Waiting(text=""),
    STARTED,
    events.Progress(epoch=1, epochs=1, step=5, steps=10, loss=0.5, accuracy=0.5),
    events.EpochDone(record=record(), epochs=1),
    events.Finished(summary=summary(record())),
]


def show(*shown: events.Event, as_json: bool = False) -> None:
    with Terminal(as_json) as terminal:
        for event in shown:
            terminal.handle(event)


# -- lines -----------------------------------------------------------------------------------------


def test_the_line_of_an_epoch_stands_under_its_header() -> None:
    line = epoch_line(record(), 5)
    assert line.split() == ["1/5", "0.2500", "0.8750", "0.9375", "2.0", "2,000"]
    ends = [
        i for i, letter in enumerate(line) if letter != " " and line[i + 1 : i + 2] in ("", " ")
    ]
    names = HEADER.replace("train ", "train-").replace("test ", "test-")
    assert ends == [
        i for i, letter in enumerate(names) if letter != " " and names[i + 1 : i + 2] in ("", " ")
    ]


def test_what_is_not_known_is_a_dash() -> None:
    line = epoch_line(record(train_loss=None, train_accuracy=None, test_accuracy=None), 5)
    assert line.split() == ["1/5", "–", "–", "–", "2.0", "2,000"]


def test_the_summary_of_a_classifier() -> None:
    assert summary_lines(summary(record(1), record(2, test_accuracy=0.96))) == [
        "test accuracy 0.9600 after 2 epochs, 4.0 s of training, 2,000 samples/s",
        "1.5 MB of gradients sent per epoch, all ranks together",
        "kept in runs/x",
    ]


def test_the_summary_of_a_regression_alone() -> None:
    only = record(train_accuracy=None, test_accuracy=None)
    assert summary_lines(summary(only, replicas=1, folder=None)) == [
        "test loss 0.5000 after 1 epoch, 2.0 s of training, 2,000 samples/s"
    ]


def test_a_loss_that_is_no_number_gets_advice() -> None:
    lines = summary_lines(summary(record(train_loss=None)))
    assert any("smaller --lr" in line for line in lines)


# -- a whole run -----------------------------------------------------------------------------------


def test_a_run_as_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    """No terminal: no bar, no colours, nothing that moves the cursor."""
    show(*WHOLE_RUN)
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert "\r" not in out
    assert out.splitlines() == [
        "mnist-cnn (819,557 parameters) on mnist-sample (4,000 train, 1,000 test)",
        "2 replicas, sync ring on here, there · global batch 128 · 1 thread each",
        "",
        HEADER,
        epoch_line(record(), 1),
        "",
        *summary_lines(summary(record())),
    ]


@pytest.mark.parametrize(("columns", "lines"), [(80, 2), (120, 1)])
def test_a_line_that_is_too_long_for_the_screen_is_parted_between_its_facts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, lines: int
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    stages = {"stages": 4, "schedule": "1f1b", "microbatches": 8, "hosts": ["here"] * 8}
    show(msgspec.structs.replace(STARTED, **stages))
    shown = capsys.readouterr().out.splitlines()[1 : 1 + lines]
    between = " · " if lines == 1 else "\n"
    layout = "2 replicas (sync ring) of 4 stages, 1f1b × 8 micro-batches"
    assert "\n".join(shown) == f"{layout}{between}global batch 128 · 1 thread each"


def test_json_is_the_only_thing_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    show(*WHOLE_RUN, as_json=True)
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert msgspec.json.decode(out, type=Summary) == summary(record())
    assert epoch_line(record(), 1) in err


def test_a_failure_leaves_standard_output_empty(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (True, False):
        show(FAILED, as_json=as_json)
        out, err = capsys.readouterr()
        assert out == ""
        assert err == "shoal: rank 1 (desk): No space left.\nFree some.\n"


def test_a_traceback_stands_above_its_failure(capsys: pytest.CaptureFixture[str]) -> None:
    trace = 'Traceback (most recent call last):\n  File "a[0].py", line 1\nValueError: [/b] boom\n'
    show(msgspec.structs.replace(FAILED, message="[/b] boom", traceback=trace))
    err = capsys.readouterr().err
    assert err.startswith(trace)
    assert err.endswith(
        f"rank {FAILED.rank} ({FAILED.host}) failed with the {FAILED.kind} above.\n"
    )


def test_a_lost_peer_is_not_named_twice(capsys: pytest.CaptureFixture[str]) -> None:
    lost = "rank 1 (desk) lost rank 0"
    show(msgspec.structs.replace(FAILED, message=lost, is_consequence=True))
    assert capsys.readouterr().err == f"shoal: {lost}\n"


@pytest.mark.parametrize("passed", [True, False])
def test_a_comparison(capsys: pytest.CaptureFixture[str], passed: bool) -> None:
    verdict = events.Verified(
        passed=passed, steps=5, replicas=2, sync="ring",
        largest_difference=1.25e-13 if passed else None, parameter="fc1.weight",
        tolerance=1e-10, dtype="float64", notes=["held in evaluation mode: [Dropout]"],
    )  # fmt: skip
    with Terminal() as terminal:
        terminal.handle(verdict)
        assert terminal.verdict == verdict
    out = capsys.readouterr().out
    assert "(held in evaluation mode: [Dropout])" in out
    assert ("1.25e-13 in fc1.weight" if passed else "not a number in fc1.weight") in out
    assert out.splitlines()[-1] == ("pass" if passed else "fail")


@pytest.mark.parametrize(
    ("threads", "text"),
    [([1, 1], "1 thread each"), ([4, 4], "4 threads each"), ([8, 1, 2], "1 to 8 threads each")],
)
def test_threads_are_those_of_all_ranks(
    capsys: pytest.CaptureFixture[str], threads: list[int], text: str
) -> None:
    show(msgspec.structs.replace(STARTED, threads=threads))
    assert capsys.readouterr().out.splitlines()[1].endswith(f" · {text}")


@pytest.mark.parametrize("name", ["[bold]x[/bold]", "[/b]", ":smile:", "a" * 300])
def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Square brackets once were taken for markup: swallowed, or a traceback after training."""
    with Terminal() as terminal:
        terminal.handle(msgspec.structs.replace(STARTED, model=name, hosts=[name, "other"]))
        terminal.handle(events.Finished(summary=summary(record(), folder=name)))
        terminal.log("rank 1", name)
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith(f"{name} (")
    assert name in out.splitlines()[1]
    assert f"kept in {name}\n" in out
    assert f"[rank 1] {name}\n" in out


# -- standard output kept for the summary ----------------------------------------------------------

CHATTY = """
import os, subprocess, sys
from shoal.report.terminal import own_stdout
with own_stdout(sys.argv[1] == "reserve") as out:
    print("from python")
    os.write(1, b"from below\\n")
    subprocess.run(["echo", "from a child"])
    out.write("the summary\\n")
print("afterwards")
"""


@pytest.mark.parametrize("reserve", [True, False])
def test_what_others_print_goes_elsewhere(reserve: bool) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CHATTY, "reserve" if reserve else "share"],
        capture_output=True, text=True, check=True, timeout=60, env={**os.environ},
    )  # fmt: skip
    others = {"from python", "from below", "from a child"}
    if reserve:
        assert ran.stdout.splitlines() == ["the summary", "afterwards"]
        assert set(ran.stderr.splitlines()) == others
    else:
        assert set(ran.stdout.splitlines()) == {*others, "the summary", "afterwards"}
        assert ran.stderr == ""


# -- the line that says whom we wait for -----------------------------------------------------------


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_screen_the_line_is_rewritten_in_place_and_wiped() -> None:
    screen = Screen()
    show = waiting_line(screen)
    show("waiting for rank 2, 1 s")
    show("waiting for rank 2, 2 s")
    show("")
    assert screen.getvalue() == (
        "\r\x1b[2Kwaiting for rank 2, 1 s\r\x1b[2Kwaiting for rank 2, 2 s\r\x1b[2K"
    )
    show("")
    assert screen.getvalue().count("\x1b") == 3, "nothing there, nothing to wipe"


def test_in_a_log_the_line_comes_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now)
    log = io.StringIO()
    show = waiting_line(log)
    for second in range(200):
        now = 1000.0 + second
        show(f"waited {second} s")
    assert log.getvalue().splitlines() == [f"waited {s} s" for s in (1, 9, 29, 59, 119, 179)]
    show("")
    log.truncate(0)
    show("a wait that is over at once")
    assert log.getvalue() == ""


def test_events_reach_the_waiting_line(capsys: pytest.CaptureFixture[str]) -> None:
    show(events.Waiting(text="waiting for rank 1"), events.Waiting(text=""))
    assert capsys.readouterr() == ("", ""), "a wait of a moment is not worth a line in a log"


def test_json_of_the_summary_is_plain_json(capsys: pytest.CaptureFixture[str]) -> None:
    show(events.Finished(summary=summary(record(train_loss=None))), as_json=True)
    loaded = json.loads(capsys.readouterr().out)
    assert loaded["epochs"][0]["train_loss"] is None
    assert loaded["layout"] == {"replicas": 2, "stages": 1}
