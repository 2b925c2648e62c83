"""Which rank was to blame, and how that is said."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from shoal.launch.outcome import PEER_LOST_WORDS, RankEnd, cause_of, describe, is_consequence


def end(rank: int, code: int, consequence: bool = False, **said: str) -> RankEnd:
    return RankEnd(
        rank=rank, host="desk", pid=100 + rank, return_code=code, is_consequence=consequence, **said
    )


def test_nobody_is_to_blame_when_all_went_well() -> None:
    assert cause_of([]) is None
    assert cause_of([end(0, 0), end(1, 0)]) is None


def test_the_first_that_failed_on_its_own_account_is_the_cause() -> None:
    ends = [end(3, 0), end(0, 1, consequence=True), end(2, -9), end(1, 1)]
    assert cause_of(ends) is ends[2]


def test_where_all_only_lost_a_peer_the_first_is_shown() -> None:
    ends = [end(3, 0), end(2, 1, consequence=True), end(1, 1, consequence=True)]
    assert cause_of(ends) is ends[1]


@pytest.mark.parametrize(
    ("code", "exit_code", "how"),
    [
        (1, 1, "ended with exit code 1"),
        (7, 7, "ended with exit code 7"),
        (-9, 1, "was killed by SIGKILL (by hand, or by the system when memory runs out)"),
        (-11, 1, "was killed by SIGSEGV (a crash in native code)"),
        (-15, 1, "was killed by SIGTERM"),
        (-200, 1, "was killed by signal 200"),
    ],
)
def test_how_it_ended(code: int, exit_code: int, how: str) -> None:
    assert end(2, code).how == how
    assert end(2, code).exit_code == exit_code
    assert describe(end(2, code)) == f"rank 2 (desk, pid 102) {how}."


def test_what_a_rank_said_is_shown_once() -> None:
    assert describe(end(0, 1, message="No space left.")).splitlines() == [
        "rank 0 (desk, pid 100) ended with exit code 1.",
        "No space left.",
    ]
    assert describe(end(0, 2, message="- no such layer\n- another")).splitlines() == [
        "this cannot be run, as rank 0 (desk, pid 100) found:",
        "- no such layer",
        "- another",
    ]
    here = dataclasses.replace(end(0, 2, message="no such layer"), host=socket.gethostname())
    assert describe(here) == "this cannot be run:\nno such layer"
    with_trace = describe(end(0, 1, message="boom", traceback="Traceback …\nValueError: boom"))
    assert "boom" not in with_trace, "the traceback stands above, and ends with it"


@pytest.mark.parametrize("word", PEER_LOST_WORDS)
def test_the_last_line_tells_a_rank_that_only_lost_a_peer(word: str) -> None:
    assert is_consequence(["Traceback …", f"RuntimeError: {word}: 127.0.0.1", "", "  "])
    assert not is_consequence([f"a warning about {word}", "ValueError: mine"])


def test_a_rank_that_said_nothing_is_no_consequence() -> None:
    assert not is_consequence([])


def test_an_error_that_a_script_made_of_a_lost_peer_is_a_consequence() -> None:
    lines = [
        "[rank2]: shoal.errors.PeerLost: rank 2 lost rank 1 in a barrier: it ended with ValueError",
        "[rank2]: ",
        "[rank2]: During handling of the above exception, another exception occurred:",
        "[rank2]: KeyError: 'batch'",
    ]
    assert is_consequence(lines)
    assert not is_consequence(lines[1:])
