"""Trees taken apart and put together: the same values, whatever they are."""

from __future__ import annotations

import enum
import warnings
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from trees import same, trees

from shoal.errors import WireError
from shoal.wire.apart import take_apart
from shoal.wire.slots import DTYPES, Slot, allocate, check_slots, memory_of, view_of
from shoal.wire.together import read_plan


def put_together(plan: Any, slots: list[Slot], tensors: list[torch.Tensor]) -> Any:
    return read_plan(plan, slots).build(tensors)


def there_and_back(tree: Any) -> Any:
    parcel = take_apart(tree)
    received = []
    for slot, content in zip(parcel.slots, parcel.buffers, strict=True):
        tensor = allocate(slot)
        assert tensor.nbytes == content.nbytes == slot.size_bytes
        view_of(memory_of(tensor))[:] = view_of(memory_of(content))
        received.append(tensor)
    return put_together(parcel.plan, parcel.slots, received)


@given(trees)
def test_any_tree_comes_back_the_same(tree: Any) -> None:
    assert same(there_and_back(tree), tree)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype(name: str) -> None:
    bytes_ = torch.arange(64, dtype=torch.uint8) % 2
    tensor = bytes_.view(DTYPES[name]).reshape(2, -1)
    assert same(there_and_back({"x": tensor}), {"x": tensor})


def test_a_tensor_that_lies_well_is_not_copied() -> None:
    tensor = torch.ones(4, 5)
    assert take_apart([tensor]).buffers[0].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(2, 3, 4).permute(2, 0, 1).bfloat16().requires_grad_(),
    ],
    ids=["channels last", "transposed", "permuted", "with a gradient"],
)
def test_a_tensor_arrives_as_it_lay_and_is_not_copied_for_it(tensor: torch.Tensor) -> None:
    assert not tensor.is_contiguous()
    assert take_apart([tensor]).buffers[0].data_ptr() == tensor.data_ptr()
    back = there_and_back({"x": tensor})["x"]
    assert same(back, tensor.detach())
    assert back.stride() == tensor.stride()


def test_one_element_with_a_stride_of_its_own() -> None:
    tensor = torch.arange(3, dtype=torch.bfloat16)[1::2]  # contiguous, says torch, with stride 2
    assert tensor.is_contiguous()
    assert same(there_and_back(tensor), tensor)


def test_what_is_received_owns_its_memory_and_can_be_written() -> None:
    tensor = torch.ones(3)
    copy = there_and_back(tensor)
    copy.add_(1)
    assert tensor.tolist() == [1, 1, 1]


def test_gradients_conjugates_and_views_are_sent_as_their_values() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j], requires_grad=True)
    assert there_and_back(z.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert not there_and_back(z).requires_grad
    assert there_and_back(z.conj().imag).tolist() == [-2, 4]


@pytest.mark.parametrize("bits", [62, 63, 64, 65, 8190, 8191, 8192, 20_000])
def test_integers_of_any_size(bits: int) -> None:
    for value in (1 << bits, (1 << bits) - 1, -(1 << bits), -(1 << bits) - 1):
        assert there_and_back([value]) == [value]
    if bits < 8191:
        assert there_and_back({-(1 << bits): 1}) == {-(1 << bits): 1}


def compressed() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # that this may change
        return torch.eye(2).to_sparse_csr()


def nested() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # that this may change
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"a": [1, object()]}, "message['a'][1]: object cannot be sent"),
        ([numpy.int64(1)], "message[0]: numpy.int64 cannot be sent"),
        ({1 << 9000: 1}, "message: a dict key"),
        ({"e": torch.empty(0, 2**50)}, "message['e']: a tensor of an impossible shape"),
        ([torch.empty(2**40, 0, 2**20)], "message[0]: a tensor of an impossible shape"),
        ([torch.ones(65 * [1])], "message[0]: a tensor of 65 dimensions"),
        ([torch.ones(65 * [1], dtype=torch.bfloat16)], "message[0]: a tensor of 65 dimensions"),
        ({"a": {("x",): 1}}, "message['a']: a dict key"),
        ([torch.eye(2).to_sparse()], "message[0]: a sparse_coo tensor cannot be sent"),
        ([compressed()], "message[0]: a sparse_csr tensor cannot be sent"),
        ([nested()], "message[0]: a nested tensor cannot be sent"),
        ([torch.empty(2, dtype=torch.int4)], "message[0]: a tensor of torch.int4 cannot be sent"),
        ({"m": torch.empty(2, device="meta")}, "message['m']: a tensor on the meta device"),
        ({1, 2}, "message: set cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_place(tree: Any, where: str) -> None:
    with pytest.raises(WireError) as caught:
        take_apart(tree)
    assert where in str(caught.value)


def test_the_limit_is_known_before_a_copy_is_made() -> None:
    with pytest.raises(
        WireError, match=r"message\['x'\]: a tensor of 1099511627776 bytes; the limit"
    ):
        take_apart({"x": torch.ones(1).expand(2**38)}, limit_bytes=2**36)
    with pytest.raises(WireError, match="no memory for a copy of a tensor of"):
        take_apart(torch.ones(1).expand(2**47))


def test_kinds_of_numbers_and_text_that_are_nearly_pythons_own() -> None:
    class Colour(enum.StrEnum):
        RED = "red"

    got = there_and_back({"f": numpy.float64(1.5), Colour.RED: Colour.RED, "i": Size.LARGE})
    assert same(got, {"f": 1.5, "red": "red", "i": 3})


class Size(enum.IntEnum):
    LARGE = 3


def test_a_list_inside_itself() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(WireError, match="nested more than 64 deep"):
        take_apart(endless)


@pytest.mark.parametrize(
    "plan",
    [
        [],
        ["x"],
        ["b"],
        ["b", 1],
        ["b", -1],
        ["b", True, 0],
        ["b", "0"],
        ["l", 3],
        ["d", [1], []],
        ["d", [1, 1], [2, 3]],
        ["d", [["l", []]], [0]],
        ["i", "z"],
        ["i", "1" * 5000],
        b"bytes in the open",
        ["l", [["b", 0], ["b", 0]]],
        ["p", [0]],
        ["p", [], ["b", 0]],
        ["p", [1], ["b", 0]],
        ["p", [-1], ["b", 0]],
        ["p", [False], ["b", 0]],
        ["p", [0, 0], ["b", 0]],
        ["p", ["0"], ["b", 0]],
        ["p", [0], ["l", [["b", 0]]]],
        ["p", [0], ["b", 1]],
    ],
)
def test_plans_that_nobody_made_are_refused(plan: Any) -> None:
    with pytest.raises(WireError):
        put_together(plan, [Slot("uint8", [1])], [torch.zeros(1, dtype=torch.uint8)])


def test_a_buffer_that_is_not_used_is_refused() -> None:
    with pytest.raises(WireError, match="does not use"):
        put_together(None, [Slot("uint8", [1])], [torch.zeros(1, dtype=torch.uint8)])


@pytest.mark.parametrize(
    "slot",
    [
        Slot("object", [1]),
        Slot("text", [1, 1]),
        Slot("float32", [-1]),
        Slot("float32", [2**63]),
        Slot("float32", [2**40, 2**40]),
        Slot("float32", [1] * 65),
    ],
)
def test_absurd_slots_are_refused_before_anything_is_allocated(slot: Slot) -> None:
    with pytest.raises(WireError):
        check_slots([slot], limit_bytes=2**40)


def test_the_limit_counts_all_buffers_together() -> None:
    assert check_slots([Slot("float32", [10])] * 2, limit_bytes=80) == 80
    with pytest.raises(WireError, match="limit of 79 bytes"):
        check_slots([Slot("float32", [10])] * 2, limit_bytes=79)
