"""Lines out of bytes: the same ones however the bytes are cut, and never too long."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.launch.output import MAX_LINE_BYTES, TAIL_LINES, Lines, shown, text_of, under

pieces = st.lists(st.sampled_from([b"\n", b"\r", b"a", b"bc", "é".encode(), b"\xff", b"\x00"]))
long_pieces = st.lists(
    st.one_of(
        st.sampled_from([b"\n", b"\r\n", b"y"]),
        st.integers(-2, 2).map(lambda more: b"x" * (MAX_LINE_BYTES + more)),
    ),
    max_size=6,
)


def lines_of(parts: list[bytes], max_bytes: int | None = MAX_LINE_BYTES) -> list[bytes]:
    lines = Lines(max_bytes)
    return [line for part in parts for line in lines.feed(part)] + list(lines.finish())


@given(pieces)
def test_any_cut_gives_the_same_lines(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    *ended, rest = whole.split(b"\n")
    expected = [line + b"\n" for line in ended] + ([rest] if rest else [])
    assert lines_of([whole]) == expected
    assert lines_of(parts) == expected
    assert lines_of([whole[i : i + 1] for i in range(len(whole))]) == expected


@given(long_pieces)
@example([b"x" * MAX_LINE_BYTES, b"\n"])
@example([b"x" * MAX_LINE_BYTES, b"x" * MAX_LINE_BYTES, b"\n", b"y"])
def test_any_cut_of_long_lines_gives_the_same_lines(parts: list[bytes]) -> None:
    """Once, a line of exactly the limit got an empty one after it, if its end came later."""
    whole = lines_of([b"".join(parts)])
    assert lines_of(parts) == whole
    assert all(len(line.rstrip(b"\n")) <= MAX_LINE_BYTES for line in whole)
    assert b"".join(whole) == b"".join(parts), "nothing is lost, and nothing comes in"


def test_long_lines_are_cut_at_64_kib() -> None:
    assert MAX_LINE_BYTES == 64 * 1024
    assert [len(line) for line in lines_of([b"x" * 65_537 + b"\n"])] == [65_536, 2]
    assert [len(line) for line in lines_of([b"x" * 65_536 + b"\n"])] == [65_537]


def test_a_line_without_an_end_does_not_wait_for_it() -> None:
    """A rank that writes dots for an hour must not fill the launcher's memory."""
    lines = Lines()
    shown = sum(len(line) for _ in range(100) for line in lines.feed(b"." * 10_000))
    assert shown > 1_000_000 - 2 * MAX_LINE_BYTES


def test_without_a_limit_lines_stay_whole() -> None:
    assert [len(line) for line in lines_of([b"x" * 200_000, b"x\n"], None)] == [200_002]


def test_empty_lines_are_lines() -> None:
    assert lines_of([b"\n\na\n\n"]) == [b"\n", b"\n", b"a\n", b"\n"]


def test_finishing_twice_gives_nothing_more() -> None:
    lines = Lines()
    assert list(lines.feed(b"a")) == []
    assert list(lines.finish()) == [b"a"]
    assert list(lines.finish()) == []


def test_the_last_lines_are_remembered() -> None:
    lines = Lines()
    for number in range(100):
        list(lines.feed(f"{number}\n".encode()))
    assert lines.tail == [str(n) for n in range(100 - TAIL_LINES, 100)]


def test_a_line_that_begins_anew_does_not_write_over_whose_it_is() -> None:
    assert under("[a 0] ", "0%\r50%\r[b 1] no") == "[a 0] 0%\r[a 0] 50%\r[a 0] [b 1] no"
    assert under("[a 0] ", "text") == "[a 0] text"


def test_a_line_without_its_end() -> None:
    assert text_of(b"caf\xc3\xa9\r\n") == "caf\u00e9"
    assert text_of(b"\xff\n") == "\ufffd"
    assert text_of(b"") == ""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"a\tb\n", "a\tb"),
        (b"\x1b[1;31mred\x1b[0m\x1b[m", "\x1b[1;31mred\x1b[0m\x1b[m"),
        (b" 10%\r 20%\r\n", " 10%\r 20%"),
        (b"\x1b[2J\x1b[H", "\\x1b[2J\\x1b[H"),
        (b"\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\u009b2J".encode(), "\\x9b2J"),
        (b"a\x08\x7f\x00", "a\\x08\\x7f\\x00"),
    ],
)
def test_a_terminal_is_not_at_the_mercy_of_a_rank(line: bytes, expected: str) -> None:
    assert shown(line) == expected
