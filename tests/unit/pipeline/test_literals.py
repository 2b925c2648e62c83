"""Plain values that become trees, and values again."""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from shoal.errors import ModelError
from shoal.pipeline import literals
from shoal.pipeline.literals import NotPlain, read, written

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(),
    st.complex_numbers(),
)
keys = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text())
others = st.sampled_from(
    [
        *(..., torch.float32, torch.bool, torch.complex64, torch.strided, torch.sparse_coo),
        *(torch.channels_last, torch.preserve_format, torch.device("cpu"), torch.device("cuda:1")),
        *(torch.Size([]), torch.Size([2, 3]), slice(None), slice(1, None, 2)),
    ]
)
values = st.recursive(
    scalars | others,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.builds(slice, inner, inner, inner),
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """To the bit and to the type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return one.hex() == other.hex()  # nan is nan, and -0.0 is not 0.0
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, slice):
        return same([one.start, one.stop, one.step], [other.start, other.stop, other.step])
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def nothing(literal: list[Any]) -> None:
    return None


@pytest.mark.parametrize("coding", [msgspec.json, msgspec.msgpack], ids=["json", "msgpack"])
@given(values)
def test_there_and_back(coding: Any, value: Any) -> None:
    literal = coding.decode(coding.encode(written(value)))
    assert same(read(literal, nothing)([]), value)


def test_values_are_made_anew() -> None:
    build = read(written([1, {"a": [2]}]), nothing)
    first = build([])
    first[1]["a"].append(3)
    assert build([]) == [1, {"a": [2]}]


trees = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
    | st.sampled_from(["t", "l", "z", "d", "s", "e", "c", "f", "i", "n", "dtype", "device"]),
    lambda inner: st.lists(inner, max_size=4),
)


@given(trees)
def test_what_is_believed_is_plain(tree: Any) -> None:
    try:
        build = read(tree, nothing)
    except ModelError:
        return
    try:
        value = build([])
    except TypeError:  # sizes that are no numbers
        return
    assert same(read(written(value), nothing)([]), value)


def test_containers_of_fx_are_plain_ones() -> None:
    value = fx.immutable_collections.immutable_list([1, [2]])
    assert same(read(written(value), nothing)([]), [1, [2]])


def test_numbers_of_numpy() -> None:
    assert same(written(numpy.float32(0.5)), 0.5)
    assert same(written(numpy.int64(3)), 3)
    assert same(written(numpy.bool_(True)), True)
    assert written(numpy.float64("inf")) == ["f", "inf"]


class Colour(enum.IntEnum):
    RED = 1


class Words(str):
    __slots__ = ()


class Row(tuple[int, ...]):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        *(Colour.RED, Words("a"), Row([1]), {1}, b"a", object(), math.sqrt, range(3), torch.qint8),
        *(numpy.zeros(2), torch.zeros(2), [1, (2, {"a": {3}})], {(1,): 2}, "\ud800"),
    ],
    ids=range(14),
)
def test_what_is_not_plain(value: Any) -> None:
    """Also what only looks as if: it would come back as something else."""
    with pytest.raises(NotPlain):
        written(value)


def test_what_is_plain_to_the_caller() -> None:
    def other(value: Any) -> Any:
        return ["set", sorted(value)] if isinstance(value, set) else literals.refuse(value)

    def back(literal: list[Any]) -> Any:
        return (lambda values: set(literal[1])) if literal[0] == "set" else None

    literal = written(([{3, 1}], slice({2}, None)), other)
    assert read(literal, back)([]) == ([{1, 3}], slice({2}, None))
    with pytest.raises(ModelError, match=r"\['set'\.\.\.\] is no plain value"):
        read(literal, nothing)
