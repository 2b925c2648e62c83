"""What was done when: every span is kept for a while, and counted forever."""

from __future__ import annotations

import itertools

import pytest

from shoal.pipeline import timeline as timeline_module
from shoal.pipeline.timeline import Span, Timeline


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes between any two looks at it."""
    ticks = itertools.count()
    monkeypatch.setattr(timeline_module.time, "perf_counter", lambda: float(next(ticks)))


def test_spans_in_order_and_their_sums() -> None:
    timeline = Timeline()
    with timeline.span("forward", 0):
        pass
    with timeline.span("wait"):
        pass
    with timeline.span("forward", 1):
        pass
    assert timeline.spans == [
        Span("forward", 0, 0.0, 1.0),
        Span("wait", -1, 2.0, 3.0),
        Span("forward", 1, 4.0, 5.0),
    ]
    assert timeline.seconds == {"forward": 2.0, "wait": 1.0}


def test_a_span_inside_another() -> None:
    timeline = Timeline()
    with timeline.span("update"), timeline.span("wait"):
        pass
    assert timeline.spans == [Span("wait", -1, 1.0, 2.0), Span("update", -1, 0.0, 3.0)]


def test_a_span_that_ends_with_an_error_is_kept() -> None:
    timeline = Timeline()
    with pytest.raises(ValueError), timeline.span("backward", 3):
        raise ValueError
    assert timeline.spans == [Span("backward", 3, 0.0, 1.0)]


@pytest.mark.parametrize("num_kept", [1, 2, 5, 10])
def test_the_last_spans_are_kept_and_all_are_counted(num_kept: int) -> None:
    timeline = Timeline(num_kept)
    for number in range(50):
        with timeline.span("forward", number):
            pass
        assert len(timeline.spans) <= num_kept
        assert timeline.spans[-1].micro_batch == number
    kept = [span.micro_batch for span in timeline.spans]
    assert kept == list(range(50 - len(kept), 50))
    assert len(kept) >= num_kept // 2
    assert timeline.seconds == {"forward": 50.0}
