"""Events: one line each, decoded as encoded; a reader that is gone is no reason to stop."""

from __future__ import annotations

import math
import os
from typing import get_args

import msgspec
import pytest

from shoal.report import events
from shoal.report.records import EpochRecord, LayoutRecord, Summary
from shoal.settings import PIPE_VARIABLE

RECORD = EpochRecord(
    epoch=1, train_loss=0.5, train_accuracy=None, test_loss=0.25, test_accuracy=0.75,
    seconds=1.5, samples_per_second=100.0, bytes_sent=2**40,
)  # fmt: skip
SUMMARY = Summary(
    model="mnist-cnn", data="mnist-sample", seed=0, batch_size=128, sync="ring", transport="dist",
    schedule=None, layout=LayoutRecord(replicas=2, stages=1), hosts=["here", "there"],
    parameters=819_557, epochs=[RECORD], folder="runs/x", shoal="0.1.0", torch="2.13.0",
)  # fmt: skip
ALL: list[events.Event] = [
    events.Waiting(text="waiting for rank 2, schüssel\n14 s"),
    events.Started(
        model="m", data="d", sync="ring", hosts=["a"], parameters=1, batch_size=2,
        train_samples=3, test_samples=4, threads=[5],
    ),
    events.Progress(epoch=1, epochs=2, step=3, steps=4, loss=0.1, accuracy=None),
    events.EpochDone(record=RECORD, epochs=3),
    events.Finished(summary=SUMMARY),
    events.Verified(
        passed=True, steps=5, replicas=2, sync="ring", largest_difference=1e-16, parameter="fc.w",
        tolerance=1e-10, dtype="float64", notes=["a", "b"],
    ),
    events.Failed(
        rank=1, host="here", kind="ValueError", message="line\nline", traceback="  File …\n",
        exit_code=1, is_consequence=False,
    ),
]  # fmt: skip


def test_there_is_an_example_of_every_event() -> None:
    assert {type(event) for event in ALL} == set(get_args(events.Event))


@pytest.mark.parametrize("event", ALL, ids=lambda event: type(event).__name__)
def test_survives_the_pipe_as_one_line(event: events.Event) -> None:
    line = events.encode(event)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert events.decode(line) == event


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_becomes_null(loss: float) -> None:
    line = events.encode(
        events.Progress(epoch=1, epochs=1, step=1, steps=1, loss=loss, accuracy=None)
    )
    assert b'"loss":null' in line
    event = events.decode(line)
    assert isinstance(event, events.Progress)
    assert event.loss is None


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[1]", b'{"type":"Nonsense"}', b'{"type":"Waiting"}']
)
def test_what_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        events.decode(line)


def test_emitted_events_come_out_of_the_pipe_in_order() -> None:
    read_fd, write_fd = os.pipe()
    emit = events.pipe_emitter(write_fd)
    for event in ALL:
        emit(event)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        assert [events.decode(line) for line in pipe] == ALL


def test_a_reader_that_is_gone_is_no_reason_to_stop() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        emit = events.pipe_emitter(write_fd)
        for event in ALL:
            emit(event)  # raises nothing
    finally:
        os.close(write_fd)


def test_the_pipe_to_the_launcher_is_found_by_the_rank_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a rank starts has the variable too, and another file at the same number."""
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb") as pipe, os.fdopen(write_fd, "wb"):
        monkeypatch.setenv(PIPE_VARIABLE, events.pipe_name(write_fd))
        emit = events.launcher_emitter()
        assert emit is not None
        emit(ALL[0])
        assert events.decode(pipe.readline()) == ALL[0]
        another = events.pipe_name(2).partition(":")[2]
        for name in (f"{write_fd}:{another}", f"{write_fd}", "", "?:1"):
            monkeypatch.setenv(PIPE_VARIABLE, name)
            assert events.launcher_emitter() is None
    monkeypatch.setenv(PIPE_VARIABLE, f"{write_fd}:1")  # which is closed
    assert events.launcher_emitter() is None
