"""What workers tell their boss is read without believing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.boss import answers


@pytest.mark.parametrize(
    ("read", "came"),
    [
        (answers.report, "text"),
        (answers.report, [1, 2, 3]),
        (answers.report, [-1, 0, 0, True]),
        (answers.report, [1, torch.ones(1), 0, True]),
        (answers.trouble, None),
        (answers.trouble, {"kind": 5}),
        (answers.number, "1"),
        (answers.number, True),
        (answers.times, [1.0]),
        (answers.tensor, "nan"),
        (answers.tensors, [torch.ones(1)]),
        (answers.tensors, {"weight": 1}),
        (answers.output, torch.ones(3)),
        (answers.output, [torch.ones(3), []]),
        (answers.output, [torch.ones(3), [True, True]]),
        (answers.output, [torch.ones(3), [5]]),
        (answers.gradients, {"a": 1}),
        (answers.gradients, [["text"]]),
        (answers.gradients, [[[torch.ones(2), [[2], [-1]]]]]),
    ],
)
def test_what_is_no_answer_is_not_taken_for_one(read: Callable[[Any], Any], came: Any) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError, RuntimeError)):
        read(came)


def test_what_is_one() -> None:
    assert answers.report([5, 4, 3, True]) == answers.Report(5, 4, 3, is_busy=True)
    assert answers.output([(torch.ones(1), None), [False]])[1] == [False]
    assert answers.times([1, 2.5]) == (1.0, 2.5)
    assert answers.gradients([[None, torch.ones(2)]])[0][0] is None


def test_trouble_does_not_steer_a_terminal() -> None:
    told = {"kind": "E\x1b[31m", "text": "a\x07\nb\tc", "traceback": "\x9b2J", "is_consequence": 0}
    with pytest.raises(ValueError, match="bool"):
        answers.trouble(told)
    read = answers.trouble(told | {"is_consequence": False})
    assert (read.kind, read.text, read.traceback) == ("E?[31m", "a?\nb\tc", "?2J")
