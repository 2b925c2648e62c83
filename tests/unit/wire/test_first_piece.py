"""What a message over gloo begins with: told apart by nothing but a mark."""

from __future__ import annotations

import numpy
import pytest
import torch

from shoal.errors import WireError
from shoal.wire.apart import take_apart
from shoal.wire.first_piece import (
    LEAST_ROOM_BYTES,
    MAX_PIECE_BYTES,
    MOST_ROOM_BYTES,
    Room,
    may_stand,
    with_length,
)
from shoal.wire.front import Front, FrontReader, pack
from shoal.wire.tree import Tree

LIMIT_BYTES = 2**30


def front_of(tree: Tree) -> Front:
    head, _ = pack(take_apart(tree), "", 0, LIMIT_BYTES)
    return FrontReader(LIMIT_BYTES).read(memoryview(head))[1]


def waiting(front: Front | None = None) -> Room:
    room = Room(front)
    room.make_ready()
    return room


def arrive(room: Room, content: bytes) -> None:
    """As gloo does it: from the beginning, as far as it goes."""
    room.content[: len(content)] = content


X = torch.randn(128, 200)


@pytest.mark.parametrize("front", [None, front_of({"x": X})], ids=["no buffer", "a buffer due"])
@pytest.mark.parametrize("length", [1, 100, MAX_PIECE_BYTES - 4])
@pytest.mark.parametrize("is_sign", [True, False])
def test_a_front_leaves_the_mark_alone(front: Front | None, length: int, is_sign: bool) -> None:
    room = waiting(front)
    said = bytes(range(256)) * (length // 256) + bytes(length % 256)
    arrive(room, with_length(said, is_sign=is_sign))
    assert not room.is_full
    assert room.read() == (is_sign, length, said)


def test_a_front_of_which_a_part_came() -> None:
    room = waiting()
    arrive(room, with_length(bytes(100_000))[:MAX_PIECE_BYTES])
    assert not room.is_full
    is_sign, length, said = room.read()
    assert (is_sign, length, len(said)) == (False, 100_000, MAX_PIECE_BYTES - 4)


def test_a_buffer_fills_its_room_and_is_the_tensor() -> None:
    room = waiting(front_of({"x": X}))
    arrive(room, X.numpy().tobytes())
    assert room.is_full
    assert room.tensor is not None
    assert torch.equal(room.tensor, X)


def test_a_buffer_that_ends_like_the_one_before_is_seen_to_have_come() -> None:
    """Marks are drawn anew: what lay there before is none."""
    room = waiting(front_of({"x": X}))
    for _ in range(3):
        arrive(room, X.numpy().tobytes())
        assert room.is_full
        room.make_ready()
        assert not room.is_full


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ("no tensor", False),
        (torch.zeros(10), False),
        (torch.zeros(MOST_ROOM_BYTES // 4), True),
        (torch.zeros(MOST_ROOM_BYTES // 4 + 1), False),
        ([torch.zeros(10), torch.zeros(100_000)], True),
        ([torch.zeros(15_000) for _ in range(20)], True),
    ],
    ids=["text", "small", "largest", "too large", "small and large", "many small"],
)
def test_both_sides_agree_on_what_may_stand_for_a_front(tree: Tree, expected: bool) -> None:
    _, buffers = pack(take_apart(tree), "", 0, LIMIT_BYTES)
    assert may_stand(buffers) == expected
    assert (Room(front_of(tree)).tensor is not None) == expected


def test_what_stands_for_a_front_is_longer_than_any_front() -> None:
    assert not may_stand([numpy.zeros(LEAST_ROOM_BYTES - 1, dtype=numpy.uint8)])
    assert may_stand([numpy.zeros(LEAST_ROOM_BYTES, dtype=numpy.uint8)])
    assert not may_stand([torch.zeros(100_000)]), "it stays on its GPU"


@pytest.mark.parametrize("length", [0, 2**30])
def test_a_front_of_an_absurd_length(length: int) -> None:
    room = waiting()
    arrive(room, length.to_bytes(4, "little"))
    with pytest.raises(WireError, match=f"a front of {length} bytes"):
        room.read()
