"""Orders: what comes is checked in every field, and refused if anything is not as it must be."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch

from shoal.boss.orders import (
    Backward,
    Forward,
    Load,
    MakeOptimizer,
    Norms,
    Order,
    Place,
    Scale,
    State,
    Step,
    Times,
    TrainStep,
    ZeroGrad,
    as_message,
    read_order,
)
from shoal.errors import WireError
from shoal.wire.memory import MemoryLink

ORDERS: list[Order] = [
    Place(
        stage=1,
        cuts=[2],
        num_units=4,
        aliases={},
        ports=[[], [("relu", 0), ("x", 0)]],
        inputs=["x"],
        makes=["output"],
        keeps=[],
        module=b"\x00\xff" * 100,
        seed=None,
    ),
    MakeOptimizer(name="Adam", options={"lr": 0.1, "betas": (0.9, 0.99), "foreach": None}),
    Forward(call=1, num_parts=2, keep=True, training=True, forget=[]),
    Backward(call=1, num_parts=2, wants_inputs=False, zero_grad=ZeroGrad(set_to_none=False)),
    TrainStep(
        call=2,
        schedule="1f1b",
        training=None,
        weights=[0.5, 0.5],
        reduction="mean",
        loss=b"loss",
        forget=[1],
    ),
    ZeroGrad(),
    Step(groups=[{"lr": 0.05}]),
    Norms(call=3, kind=2.0),
    Scale(),
    State(call=4),
    Times(call=5),
    Load(),
]


def written(order: Order) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(order)
    return data


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_there_and_back(order: Order) -> None:
    boss, worker = MemoryLink.crew(2, 10.0)
    with boss, worker:
        boss.send(as_message(order, {"weight": torch.ones(2)}), 1, "order")
        found, tensors = read_order(worker.recv(0, "order"))
    assert type(found) is type(order)
    assert written(found) == written(order)
    assert tensors["weight"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "message",
    [
        None, 1, "place", b"place", [], {}, [{}], [{}, None, None], ({"type": "load"}, None),
        torch.ones(2),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_message_of_an_order(message: Any) -> None:
    with pytest.raises(WireError, match="what came is no order"):
        read_order(message)


@pytest.mark.parametrize(
    "data",
    [
        None, 7, "load", [], ["load"], {}, {"type": "exec"}, {"type": None}, {"type": ["load"]},
        {"type": "load", "path": "/"}, {"type": "Load"}, torch.ones(2), {"call": 1},
        {1: "type"}, {"type": "forward"},
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_order(data: Any) -> None:
    with pytest.raises(WireError, match="what came is no order"):
        read_order([data, None])


WRONG: list[Any] = [
    None, True, -1.5, "text", b"bytes", [], [None], {}, {"a": 1}, [[]], float("nan"), 10**30,
    torch.ones(2),
]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_every_field_is_believed_only_with_its_own_type(order: Order) -> None:
    """Whatever is put into whichever field: an order with the right types comes out, or none."""
    kind = msgspec.inspect.type_info(type(order))
    assert isinstance(kind, msgspec.inspect.StructType)
    for field, hint in [(each.name, each.type) for each in kind.fields]:
        for value in WRONG:
            data = {**written(order), field: value}
            try:
                found, _ = read_order([data, None])
            except WireError:
                continue
            assert _is_of(getattr(found, field), hint), f"{field}={value!r}"


def _is_of(value: Any, hint: msgspec.inspect.Type) -> bool:
    match hint:
        case msgspec.inspect.AnyType():
            return True
        case msgspec.inspect.UnionType(types=types):
            return any(_is_of(value, each) for each in types)
        case msgspec.inspect.NoneType():
            return value is None
        case msgspec.inspect.BoolType():
            return type(value) is bool
        case msgspec.inspect.IntType():
            return type(value) is int
        case msgspec.inspect.FloatType():
            return type(value) is float
        case msgspec.inspect.StrType():
            return type(value) is str
        case msgspec.inspect.StructType(cls=kind):
            return type(value) is kind
        case msgspec.inspect.BytesType():
            return type(value) is bytes
        case msgspec.inspect.ListType(item_type=item):
            return type(value) is list and all(_is_of(each, item) for each in value)
        case msgspec.inspect.TupleType(item_types=items):
            return len(value) == len(items) and all(map(_is_of, value, items))
        case msgspec.inspect.DictType(key_type=key):
            return type(value) is dict and all(_is_of(each, key) for each in value)
    return False


def test_fields_that_are_missing_or_too_many() -> None:
    for order in ORDERS:
        data = written(order)
        with pytest.raises(WireError, match="no order"):
            read_order([{**data, "code": "import os"}, None])
        for field in set(data) - {"type", "seed", "set_to_none", "zero_grad"}:
            with pytest.raises(WireError, match=field):
                read_order([{k: v for k, v in data.items() if k != field}, None])


def test_parts_of_orders_exchanged_at_random() -> None:
    """As if one had been put together out of others."""
    draw = random.Random(4)
    pool = [value for order in ORDERS for value in written(order).values()]
    num_read = 0
    for _ in range(3000):
        data = written(draw.choice(ORDERS))
        for field in draw.sample(list(data), min(len(data), draw.randint(1, 3))):
            data[field] = draw.choice(pool)
        try:
            read_order([data, None])
        except WireError:
            continue
        num_read += 1
    assert 0 < num_read < 2500
