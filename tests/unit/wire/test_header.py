"""Headers: what we encode is understood, what anyone else makes up is refused."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import same, trees

from shoal.errors import WireError
from shoal.wire.header import (
    MAX_HEADER_BYTES,
    MAX_PLAN_BYTES,
    Header,
    decode,
    decode_plan,
    encode,
)
from shoal.wire.tree import allocate, put_together, take_apart

FUZZ_FRAMES = 100_000
FUZZ_LIMIT_S = 60.0
ALLOCATION_LIMIT_BYTES = 1 << 20


def receive(header_bytes: bytes, plan: bytes, buffers: list[torch.Tensor], limit: int) -> Any:
    """All that a receiver does with a header."""
    header = decode(header_bytes, limit)
    if header.plan_bytes:
        header = decode_plan(header, plan, limit)
    made = []
    allocated = 0
    for slot, content in zip(header.slots, buffers, strict=False):
        tensor, room = allocate(slot)
        allocated += room.numel()
        assert allocated <= limit, "a header made the receiver allocate beyond its limit"
        if content.numel() != room.numel():
            raise WireError("another number of bytes came")
        room.copy_(content)
        made.append(tensor)
    if len(made) != len(header.slots):
        raise WireError("buffers are missing")
    return put_together(header.plan, header.slots, made)


@settings(deadline=None)
@given(trees, st.text(max_size=20), st.integers(0, 2**60))
def test_what_is_encoded_is_understood(tree: Any, tag: str, number: int) -> None:
    parcel = take_apart(tree)
    header_bytes, plan = encode(parcel, tag, number)
    header = decode(header_bytes)
    assert (header.tag, header.number) == (tag, number)
    assert same(receive(header_bytes, plan, parcel.buffers, 1 << 40), tree)


def test_a_large_structure_goes_after_the_header() -> None:
    state = {f"model.layers.{i}.self_attn.q_proj.weight": torch.zeros(1) for i in range(3000)}
    parcel = take_apart(state)
    header_bytes, plan = encode(parcel, "", 0)
    assert len(header_bytes) < 100
    assert len(plan) > MAX_HEADER_BYTES
    assert same(receive(header_bytes, plan, parcel.buffers, 1 << 40), state)


def test_too_large_a_structure_is_refused_where_it_is_made() -> None:
    with pytest.raises(WireError, match="Put numbers into tensors"):
        encode(take_apart([["a" * 1000] * 70_000]), "", 0)


def wire(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(list(fields))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00" * (MAX_HEADER_BYTES + 1),
        b"\xdf\xff\xff\xff\xff",  # a map of four billion entries
        b"\x91" * 60_000,  # lists in lists in lists
        wire(2, "", 0, 0, 0, [None, []]),
        wire(1, "x" * 201, 0, 0, 0, [None, []]),
        wire(1, "", -1, 0, 0, [None, []]),
        wire(1, "", 0, 0, 0, None),
        wire(1, "", 0, 0, 5, [None, []]),
        wire(1, "", 0, 0, MAX_PLAN_BYTES + 1, None),
        wire(1, "", 0, 8, 0, [["b", 0], [["float32", [1]]]]),
        wire(1, "", 0, 4, 0, [["b", 0], [["float33", [1]]]]),
        wire(1, "", 0, 1 << 50, 0, [["b", 0], [["float32", [1 << 48]]]]),
        wire(1, "", 0, 0, 0, [None, []], "one field too many"),
        wire(1, "", 0, 0, 0, [None, [], "one too many inside"]),
        wire(1, "", 0, 0, 0),
        wire("1", "", 0, 0, 0, [None, []]),
    ],
)
def test_what_nobody_encoded_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


def test_a_plan_of_another_length_is_refused() -> None:
    header = Header("", 0, 0, 10, None, [])
    with pytest.raises(WireError, match="announced"):
        decode_plan(header, b"123")


@pytest.mark.timeout(FUZZ_LIMIT_S + 60)
def test_mutated_frames_never_crash_hang_or_allocate() -> None:
    """100,000 frames with bytes changed, cut, doubled or swapped, from a fixed seed."""
    chance = random.Random(20261115)
    originals = [
        (*encode(parcel, tag, 3), parcel.buffers)
        for parcel, tag in (
            (take_apart({"x": torch.randn(4, 5), "mask": torch.ones(3, dtype=torch.bool)}), "grad"),
            (take_apart([1, 2.5, None, "text", b"bytes", (True, {"k": -1})]), ""),
            (take_apart({f"name{i}": torch.zeros(i % 3) for i in range(3000)}), "state"),
            (take_apart("long text " * 300), "t"),
        )
    ]
    begun = time.monotonic()
    refused = 0
    for _ in range(FUZZ_FRAMES):
        header, plan, buffers = chance.choices(originals, [5, 5, 0.02, 5])[0]
        header, plan = mutate(header, chance), mutate(plan, chance) if plan else plan
        try:
            receive(header, plan, buffers, ALLOCATION_LIMIT_BYTES)
        except WireError:
            refused += 1
        assert time.monotonic() - begun < FUZZ_LIMIT_S, "took too long: some frame is slow"
    assert refused > FUZZ_FRAMES // 2


def mutate(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) or 1)
        match chance.randrange(5):
            case 0 if changed:
                changed[at] = chance.randrange(256)
            case 1 if changed:
                changed[at] ^= 1 << chance.randrange(8)
            case 2:
                del changed[at:]
            case 3:
                changed[at:at] = chance.randbytes(chance.randint(1, 8))
            case 4:
                other = chance.randrange(len(changed) or 1)
                changed[at : at + 4], changed[other : other + 4] = (
                    changed[other : other + 4],
                    changed[at : at + 4],
                )
    return bytes(changed)
