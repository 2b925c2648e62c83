"""Fronts: what is packed is read back, whatever was read before; anything else is refused."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutations import mutate
from trees import same, trees

from shoal.errors import WireError
from shoal.wire.apart import take_apart
from shoal.wire.front import (
    MAX_FRONT_BYTES,
    MAX_REMEMBERED,
    MAX_SMALL_BYTES,
    SMALL_BYTES,
    FrontReader,
    Memory,
    Packer,
    pack,
)
from shoal.wire.header import DEFAULT_LIMIT_BYTES, MAX_HEADER_BYTES
from shoal.wire.inbox import Inbox
from shoal.wire.slots import view_of
from shoal.wire.tree import Tree

PEER = 1
FUZZ_FRAMES = 100_000
FUZZ_LIMIT_S = 60.0
FUZZ_LIMIT_BYTES = 1 << 20
FUZZ_ROOM_BYTES = 64 << 20
"""The limit, what 100 messages of it need that wait, and what the test itself uses."""

PREFIX = struct.Struct("<QI")
"""Message number, length of the header."""

Packed = tuple[bytes, list[Memory]]


def packed(tree: Any, number: int = 0, tag: str = "") -> Packed:
    return pack(take_apart(tree), tag, number, DEFAULT_LIMIT_BYTES)


def by_hand(plan: Any, *slots: tuple[str, list[int]], total: int, body: bytes = b"") -> bytes:
    header = msgspec.msgpack.encode([1, "", total, 0, [plan, slots]])
    return PREFIX.pack(0, len(header)) + header + body


def receive(reader: FrontReader, inbox: Inbox, data: bytes, behind: list[Memory]) -> Any:
    """All that a receiver does with a front: (message number, message)."""
    number, front = reader.read(memoryview(data))
    announced = sum(slot.size_bytes for slot in front.slots)
    assert announced <= reader._limit_bytes, "more would be allocated than the limit"
    arrival = inbox.arrive(PEER, front)
    for slot, start, end in front.small:
        arrival.take(slot, bytearray(data[start:end]))
    for each, slot in enumerate(front.behind):
        room = arrival.room(slot)
        if each >= len(behind) or behind[each].nbytes != len(room):
            raise WireError("something else came behind")
        room[:] = view_of(behind[each])
    inbox.deliver(arrival)
    return number, inbox.expect(PEER, front.tag, None).wait(0)


def arrived(data: bytes, behind: list[Memory], reader: FrontReader | None = None) -> Any:
    return receive(reader or FrontReader(DEFAULT_LIMIT_BYTES), Inbox(1.0), data, behind)


# -- what is packed --------------------------------------------------------------------------------


@given(trees, st.text(max_size=20), st.integers(0, 2**64 - 1))
def test_what_is_packed_is_read_back(tree: Any, tag: str, number: int) -> None:
    got, message = arrived(*packed(tree, number, tag))
    assert got == number
    assert same(message, tree)


@given(st.lists(trees, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_one_reader_keeps_layouts_apart(several: list[Any], chance: random.Random) -> None:
    """Layouts that it remembers, again and again and in any order."""
    reader = FrontReader(DEFAULT_LIMIT_BYTES)
    order = several * 3
    chance.shuffle(order)
    for number, tree in enumerate(order):
        got, message = arrived(*packed(tree, number), reader)
        assert got == number
        assert same(message, tree)


def test_a_remembered_layout_brings_other_values_each_time() -> None:
    reader = FrontReader(DEFAULT_LIMIT_BYTES)
    for number in range(5):
        tree = {"x": torch.full((3,), float(number)), "large": torch.full((SMALL_BYTES,), number)}
        got, message = arrived(*packed(tree, number, "t"), reader)
        assert got == number
        assert same(message, tree)


def test_more_layouts_than_are_remembered() -> None:
    reader = FrontReader(DEFAULT_LIMIT_BYTES)
    for number in range(3 * MAX_REMEMBERED):
        for extent in (number, 0, number + 1):
            tree = [torch.arange(extent), number]
            assert same(arrived(*packed(tree), reader)[1], tree)
        assert len(reader._seen) <= MAX_REMEMBERED


def test_a_structure_too_large_for_a_header_is_not_mixed_up_with_another() -> None:
    """Its header says little more than how long the structure is: the next may have the same."""
    reader = FrontReader(DEFAULT_LIMIT_BYTES)
    for letter in "abab":
        state = {f"{letter}{i:05}": torch.full((1,), i) for i in range(5000)}
        assert same(arrived(*packed(state), reader)[1], state)


@pytest.mark.parametrize("size", [0, 1, SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 1])
@pytest.mark.parametrize("count", [1, 2, MAX_SMALL_BYTES // SMALL_BYTES + 2])
def test_small_buffers_are_inside_and_large_ones_behind(size: int, count: int) -> None:
    tree = [torch.full((size,), n % 256, dtype=torch.uint8) for n in range(count)]
    data, behind = packed(tree)
    assert len(data) <= MAX_FRONT_BYTES
    assert sum(len(each) for each in behind) + len(data) >= size * count
    if size >= SMALL_BYTES:
        assert len(behind) == count
    else:
        assert len(behind) == max(0, count - MAX_SMALL_BYTES // (size or 1))
    assert same(arrived(data, behind)[1], tree)


def test_a_message_above_the_limit_is_refused_on_either_side() -> None:
    parcel = take_apart(torch.zeros(1000))
    assert pack(parcel, "", 0, limit_bytes=4000)
    with pytest.raises(WireError, match="4000 bytes; the limit is 3999"):
        pack(parcel, "", 0, limit_bytes=3999)
    data, _ = packed(torch.zeros(1000))
    with pytest.raises(WireError, match="the limit is 3999"):
        FrontReader(3999).read(memoryview(data))


# -- what nobody packed ----------------------------------------------------------------------------

EXAMPLES = {
    "scalars": [1, "two", 3.0],
    "tensors": {"x": torch.arange(5.0), "n": torch.arange(3)},
    "large": {"x": torch.arange(5.0), "large": torch.zeros(SMALL_BYTES)},
    "plan apart": {f"name{i:05}": torch.zeros(1) for i in range(5000)},
}


@pytest.fixture(params=EXAMPLES, ids=lambda name: name.replace(" ", "-"))
def example(request: pytest.FixtureRequest) -> Packed:
    return packed(EXAMPLES[request.param], number=7)


@pytest.fixture(params=[False, True], ids=["new", "remembered"])
def reader(request: pytest.FixtureRequest, example: Packed) -> FrontReader:
    """One that has read the example before, or has not."""
    made = FrontReader(DEFAULT_LIMIT_BYTES)
    if request.param:
        made.read(memoryview(example[0]))
    return made


def cuts(data: bytes) -> list[int]:
    """Where to cut: all places of a short front, the ends and some in between of a long one."""
    if len(data) < 1000:
        return list(range(len(data)))
    chance = random.Random(len(data))
    return [*range(100), *(chance.randrange(len(data)) for _ in range(50)), len(data) - 1]


def test_a_front_cut_short_is_refused(example: Packed, reader: FrontReader) -> None:
    data, _ = example
    for at in cuts(data):
        with pytest.raises(WireError):
            reader.read(memoryview(data[:at]))
    assert reader.read(memoryview(data))[0] == 7


def test_a_front_with_something_added_is_refused(example: Packed, reader: FrontReader) -> None:
    data, _ = example
    for more in (b"\0", data[-1:], data[-100:], data):
        with pytest.raises(WireError):
            reader.read(memoryview(data + more))
    assert reader.read(memoryview(data))[0] == 7


def test_a_header_that_is_remembered_does_not_vouch_for_its_body() -> None:
    """The header is right to the last byte; what follows is one value short, or one too long."""
    data, behind = packed(torch.arange(5.0))
    reader = FrontReader(DEFAULT_LIMIT_BYTES)
    assert same(arrived(data, behind, reader)[1], torch.arange(5.0))
    for body in (data[:-4], data + data[-4:], data[:-20]):
        with pytest.raises(WireError, match="its header makes it"):
            reader.read(memoryview(body))
    assert same(arrived(data, behind, reader)[1], torch.arange(5.0))


def test_a_front_that_was_refused_is_not_remembered_as_good() -> None:
    data, behind = packed([torch.arange(5.0), "x"])
    reader = FrontReader(DEFAULT_LIMIT_BYTES)
    for _ in range(2):
        with pytest.raises(WireError):
            reader.read(memoryview(data[:-1]))
    assert same(arrived(data, behind, reader)[1], [torch.arange(5.0), "x"])


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**32 - 1, 1000])
def test_a_header_longer_than_its_front_is_refused(length: int) -> None:
    with pytest.raises(WireError):
        FrontReader(DEFAULT_LIMIT_BYTES).read(memoryview(PREFIX.pack(0, length) + b"\x90" * 100))


def test_a_front_written_by_hand_is_read() -> None:
    """What the refused ones below are variations of."""
    number, message = arrived(by_hand(["b", 0], ("uint8", [2]), total=2, body=b"\1\2"), [])
    assert (number, message.tolist()) == (0, [1, 2])


@pytest.mark.parametrize(
    "data",
    [
        by_hand(["b", 0], ("text", [2]), total=2, body=b"\xff\xfe"),
        by_hand(["b", 1], ("uint8", [2]), total=2, body=b"\1\2"),
        by_hand([["b", 0], ["b", 0]], ("uint8", [2]), total=2, body=b"\1\2"),
        by_hand(None, ("uint8", [2]), total=2, body=b"\1\2"),
        by_hand(["d", [1, True], [2, 3]], total=0),
        by_hand(["i", "-"], total=0),
        by_hand({"a": 1}, total=0),
    ],
    ids=["no text", "no such buffer", "used twice", "not used", "a key twice", "no int", "a map"],
)
def test_a_plan_that_makes_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        arrived(data, [])


@pytest.mark.parametrize("kind", ["float32", "complex32", "uint8"])
@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [2**62, 2**62, 0], [2**31] * 3 + [0]])
def test_an_empty_tensor_that_torch_cannot_make_is_refused(kind: str, shape: list[int]) -> None:
    """No bytes at all, so no limit is exceeded; but torch counts extents and strides too.

    It raised a RuntimeError, in whoever happened to wait, for whatever rank.
    """
    with pytest.raises(WireError):
        arrived(by_hand(["b", 0], (kind, shape), total=0), [])


@pytest.fixture
def every_warning() -> Iterator[None]:
    """Torch gives some of its warnings only once per process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("every_warning")
@pytest.mark.parametrize("extent", [0, 3, SMALL_BYTES])
def test_a_tensor_of_any_dtype_arrives_without_a_warning(extent: int) -> None:
    """Torch warns of every new complex32 tensor; these tests turn warnings into errors."""
    tree = [torch.zeros(extent, dtype=torch.int32).view(torch.complex32), torch.zeros(extent)]
    assert same(arrived(*packed(tree))[1], tree)


@pytest.mark.timeout(FUZZ_LIMIT_S + 60)
def test_mutated_fronts_never_crash_hang_or_allocate() -> None:
    """100,000 fronts with bytes changed, cut, put in or swapped, from a fixed seed.

    The reader remembers what it has read of the unchanged ones. Whoever sends a front that is
    refused is lost, so another peer goes on, with an inbox of its own.
    """
    chance = random.Random(20261115)
    originals = [
        packed({"x": torch.randn(4, 5), "mask": torch.ones(3, dtype=torch.bool)}, 3, "grad"),
        packed([1, 2.5, None, "text", b"bytes", (True, {"k": -1})], 3),
        packed("long text " * 300, 3, "t"),
        packed({"x": torch.zeros(3), "large": torch.zeros(SMALL_BYTES // 4)}, 3),
        packed({f"name{i}": torch.zeros(i % 3) for i in range(5000)}, 3, "state"),
    ]
    reader, inbox = FrontReader(FUZZ_LIMIT_BYTES), Inbox(1.0)
    refused = 0
    memory = psutil.Process().memory_info
    begun, used = time.monotonic(), memory().rss
    for number in range(FUZZ_FRAMES):
        data, behind = chance.choices(originals, [5, 5, 5, 5, 0.02])[0]
        try:
            if chance.random() < 0.1:
                receive(reader, inbox, data, behind)
            receive(reader, inbox, mutate(data, chance), behind)
        except WireError:
            refused += 1
            inbox = Inbox(1.0)
        assert time.monotonic() - begun < FUZZ_LIMIT_S, "took too long: some front is slow"
        assert number % 100 or memory().rss < used + FUZZ_ROOM_BYTES, "it took more than the limit"
    assert refused > FUZZ_FRAMES // 2


def test_a_packer_remembers_layouts_not_contents() -> None:
    packer = Packer(DEFAULT_LIMIT_BYTES)
    trees: list[Tree] = [
        {"x": torch.zeros(3), "on": True},
        {"x": torch.ones(3), "on": True},
        {"x": torch.ones(3), "on": False},
        {"y": torch.ones(3), "on": True},
        {"x": torch.ones(3, dtype=torch.int32), "on": True},
        {"x": torch.ones(1, 3), "on": True},
        {"x": torch.ones(3, 2).T[0], "on": True},
        {"x": torch.ones(3, requires_grad=True), "on": True},
        [torch.zeros(3), 1],
        [torch.zeros(3), 2],
        [torch.zeros(3), None],
        (torch.zeros(3), None),
        [torch.zeros(100_000), torch.ones(2)],
        [torch.ones(100_000)],
        {1: torch.ones(2)},
        {True: torch.ones(2)},
    ]
    for number, tree in enumerate(trees * 3):
        expected = pack(take_apart(tree), "t", number, DEFAULT_LIMIT_BYTES)
        head, behind = packer.pack(tree, "t", number)
        assert head == expected[0]
        assert len(behind) == len(expected[1])
        assert all(a.ctypes.data == b.ctypes.data for a, b in zip(behind, expected[1], strict=True))
    assert packer.pack(trees[0], "t", 0) != packer.pack(trees[0], "u", 0)
    endless: list[Tree] = []
    endless.append(endless)
    with pytest.raises(WireError, match="nested"):
        packer.pack(endless, "t", 0)
