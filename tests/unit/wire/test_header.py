"""Headers: what we encode is understood, what anyone else makes up is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trees import same, trees

from shoal.errors import WireError
from shoal.wire.apart import Parcel, take_apart
from shoal.wire.header import (
    DEFAULT_LIMIT_BYTES,
    MAX_HEADER_BYTES,
    MAX_PLAN_BYTES,
    MAX_TAG_LETTERS,
    Header,
    decode,
    decode_plan,
    encode,
)


def encoded(parcel: Parcel, tag: str = "") -> tuple[bytes, bytes]:
    return encode(parcel, tag, sum(buffer.nbytes for buffer in parcel.buffers))


def understood(header_bytes: bytes, plan: bytes, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Header:
    header = decode(header_bytes, limit_bytes)
    return decode_plan(header, plan, limit_bytes) if header.plan_bytes else header


@given(trees, st.text(max_size=20))
def test_what_is_encoded_is_understood(tree: Any, tag: str) -> None:
    parcel = take_apart(tree)
    header = understood(*encoded(parcel, tag))
    assert header.tag == tag
    assert header.total_bytes == sum(slot.size_bytes for slot in header.slots)
    assert same(header.plan, parcel.plan)
    assert header.slots == parcel.slots


def test_a_large_structure_goes_after_the_header() -> None:
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3000)]
    parcel = take_apart({name: torch.zeros(1) for name in names})
    header_bytes, plan = encoded(parcel)
    assert len(header_bytes) < 100
    assert len(plan) > MAX_HEADER_BYTES
    header = understood(header_bytes, plan)
    assert header.plan == parcel.plan
    assert header.slots == parcel.slots


def test_too_large_a_structure_is_refused_where_it_is_made() -> None:
    with pytest.raises(WireError, match="Put numbers into tensors"):
        encoded(take_apart([["a" * 1000] * 70_000]))


def test_the_longest_tag() -> None:
    longest = "é" * MAX_TAG_LETTERS
    assert understood(*encoded(take_apart(None), longest)).tag == longest


def wire(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(list(fields))


def test_a_header_written_by_hand_is_understood() -> None:
    """What the refused ones below are variations of."""
    header = decode(wire(1, "t", 4, 0, [["b", 0], [["float32", [1]]]]))
    assert (header.tag, header.total_bytes, header.plan) == ("t", 4, ["b", 0])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00" * (MAX_HEADER_BYTES + 1),
        b"\xdf\xff\xff\xff\xff",  # a map of four billion entries
        b"\x91" * 60_000,  # lists in lists in lists
        wire(2, "", 0, 0, [None, []]),
        wire(1, "x" * 201, 0, 0, [None, []]),
        wire(1, "", -1, 0, [None, []]),
        wire(1, "", 0.0, 0, [None, []]),
        wire(1, "", 0, 0, None),
        wire(1, "", 0, -1, None),
        wire(1, "", 0, 5, [None, []]),
        wire(1, "", 0, MAX_PLAN_BYTES + 1, None),
        wire(1, "", 8, 0, [["b", 0], [["float32", [1]]]]),
        wire(1, "", 4, 0, [["b", 0], [["float33", [1]]]]),
        wire(1, "", 4, 0, [["b", 0], [["float32", [-1]]]]),
        wire(1, "", 0, 0, [["b", 0], [["float32", [-1, 0]]]]),
        wire(1, "", 0, 0, [["b", 0], [["float32", [1 << 63, 0]]]]),
        wire(1, "", 4, 0, [["b", 0], [["text", [2, 2]]]]),
        wire(1, "", 1 << 50, 0, [["b", 0], [["float32", [1 << 48]]]]),
        wire(1, "", 0, 0, [None, []], "one field too many"),
        wire(1, "", 0, 0, [None, [], "one too many inside"]),
        wire(1, "", 0, 0),
        wire("1", "", 0, 0, [None, []]),
        wire(1, "", 0, 0, [None, []]) + b"\0",
        wire(1, "", 0, 0, [None, []])[:-1],
        wire(1, "", 0, 0, [0, []]).replace(b"\x00\x90", b"\x81\x80\x01\x90"),  # {{}: 1}
        wire(1, "\ud800".encode("utf-8", "surrogatepass"), 0, 0, [None, []]),
    ],
)
def test_what_nobody_encoded_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


def test_a_plan_of_another_length_is_refused() -> None:
    header = Header("", 0, 10, None, [])
    with pytest.raises(WireError, match="announced"):
        decode_plan(header, b"123")


def test_a_message_above_the_limit_is_refused_before_anything_is_allocated() -> None:
    header_bytes = wire(1, "", 1 << 30, 0, [["b", 0], [["uint8", [1 << 30]]]])
    assert decode(header_bytes, 1 << 30).total_bytes == 1 << 30
    with pytest.raises(WireError, match=f"the limit is {(1 << 30) - 1}"):
        decode(header_bytes, (1 << 30) - 1)
