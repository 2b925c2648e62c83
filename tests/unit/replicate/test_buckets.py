"""Buckets: the plan as arithmetic, the packing as copies and views, the lone ones in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.replicate.buckets import (
    Bucket,
    LoneBucket,
    Packable,
    PackedBucket,
    PlannedBucket,
    plan_buckets,
)

CPU = torch.device("cpu")
NOBODY, SOMEBODY = [True], [False]

packables = st.lists(
    st.builds(
        Packable,
        num_elements=st.integers(0, 500),
        element_bytes=st.sampled_from([2, 4, 8]),
        kind=st.sampled_from(["float32", "bfloat16"]),
    ),
    max_size=30,
)

# -- the plan --------------------------------------------------------------------------------------


@given(packables, st.integers(1, 2000), st.integers(1, 2000))
def test_every_parameter_is_in_one_bucket_of_its_kind(
    parameters: list[Packable], bucket_bytes: int, alone_bytes: int
) -> None:
    plan = plan_buckets(parameters, bucket_bytes, alone_bytes)
    assert sorted(i for b in plan for i in b.indices) == list(range(len(parameters)))
    for planned in plan:
        members = [parameters[i] for i in planned.indices]
        assert len({p.kind for p in members}) <= 1
        assert list(planned.indices) == sorted(planned.indices, reverse=True)
        if not planned.is_packed:
            assert len(members) == 1
            assert members[0].size_bytes >= alone_bytes
        else:
            assert all(p.size_bytes < alone_bytes for p in members)
            assert sum(p.size_bytes for p in members[:-1]) < bucket_bytes  # the last may overflow


@given(packables, st.integers(1, 2000), st.integers(1, 2000))
def test_buckets_come_in_the_order_they_are_filled_and_a_packed_one_is_last(
    parameters: list[Packable], bucket_bytes: int, alone_bytes: int
) -> None:
    """The backward pass goes from the last parameter to the first."""
    plan = plan_buckets(parameters, bucket_bytes, alone_bytes)
    if parameters:
        assert plan[-1].is_packed
    completed = [min(b.indices) for b in plan if b.indices]
    closed_full = [
        min(b.indices)
        for b in plan
        if not b.is_packed or sum(parameters[i].size_bytes for i in b.indices) >= bucket_bytes
        if b.indices
    ]
    assert closed_full == sorted(closed_full, reverse=True)
    rest = completed[len(closed_full) :]
    assert rest == sorted(rest, reverse=True)


def test_a_plan_by_hand() -> None:
    kb = [Packable(250, 4, "float32")] * 5

    def packed(*indices: int) -> PlannedBucket:
        return PlannedBucket(indices, is_packed=True)

    assert plan_buckets(kb, 2000, 10**9) == [packed(4, 3), packed(2, 1), packed(0)]
    assert plan_buckets(kb, 10**9, 10**9) == [packed(4, 3, 2, 1, 0)]
    assert plan_buckets([], 2000, 1) == []


def test_a_large_parameter_goes_alone_and_small_ones_around_it_together() -> None:
    """The default model: fc1 leaves early in the backward pass, all others in one message."""
    sizes = [288, 32, 18432, 64, 73728, 128, 720000, 625, 6250, 10]
    plan = plan_buckets([Packable(n, 4, "float32") for n in sizes], 4 * 2**20, 2**20)
    assert plan == [
        PlannedBucket((6,), is_packed=False),
        PlannedBucket((9, 8, 7, 5, 4, 3, 2, 1, 0), is_packed=True),
    ]


def test_nothing_but_large_parameters_leaves_an_empty_bucket_for_the_flags() -> None:
    plan = plan_buckets([Packable(100, 4, "float32")] * 2, 400, 400)
    assert plan[-1] == PlannedBucket((), is_packed=True)
    assert len(plan) == 3


# -- what both kinds do ----------------------------------------------------------------------------


def parameter(
    *shape: int, grad: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(*shape, dtype=dtype))
    made.grad = grad
    return made


def packed(p: nn.Parameter) -> Bucket:
    return PackedBucket([p], p.dtype, CPU)


def lone(p: nn.Parameter) -> Bucket:
    return LoneBucket(p, CPU)


both = pytest.mark.parametrize("make", [packed, lone])
Make = Callable[[nn.Parameter], Bucket]


@both
def test_a_gradient_is_taken_scaled_and_handed_out_after_the_sum(make: Make) -> None:
    p = parameter(2, 2, grad=torch.ones(2, 2))
    bucket = make(p)
    assert bucket.num_missing == 1
    assert bucket.fill(0, 0.5)
    assert bucket.num_missing == 0
    assert bucket.payload().dim() == 1
    bucket.payload().add_(1.5)  # stands for the other ranks
    bucket.hand_out(SOMEBODY)
    assert p.grad is not None
    assert p.grad.tolist() == [[2, 2], [2, 2]]
    assert bucket.num_missing == 1, "ready for the next step"


@both
def test_gradients_kept_as_zeros_are_filled_again(make: Make) -> None:
    """With zero_grad(set_to_none=False) the next backward adds into what was handed out."""
    p = parameter(2, grad=torch.ones(2))
    bucket = make(p)
    bucket.fill(0, 0.5)
    bucket.hand_out(SOMEBODY)
    assert p.grad is not None
    p.grad.zero_().add_(torch.tensor([4.0, 8.0]))
    assert bucket.fill(0, 0.5)
    bucket.hand_out(SOMEBODY)
    assert p.grad.tolist() == [2, 4]


@both
def test_a_parameter_that_nobody_used_keeps_none(make: Make) -> None:
    p = parameter(2)
    bucket = make(p)
    bucket.fill_rest(1.0)
    assert bucket.has_gradient == [False]
    assert bucket.payload().tolist() == [0, 0]
    bucket.hand_out(NOBODY)
    assert p.grad is None


@both
def test_a_parameter_that_another_rank_used_gets_its_gradient(make: Make) -> None:
    p = parameter(2)
    bucket = make(p)
    bucket.fill_rest(1.0)
    bucket.payload().add_(torch.tensor([5.0, 6.0]))
    bucket.hand_out(SOMEBODY)
    assert p.grad is not None
    assert p.grad.tolist() == [5, 6]


@both
def test_zeros_of_a_stand_in_count_as_no_gradient(make: Make) -> None:
    idle = parameter(2, grad=torch.zeros(2))
    bucket = make(idle)
    bucket.fill_rest(1.0, is_stand_in=True)
    assert bucket.has_gradient == [False]
    bucket.hand_out(NOBODY)
    assert idle.grad is None


@both
def test_what_a_stand_in_has_accumulated_before_still_counts(make: Make) -> None:
    carried = parameter(1, grad=torch.ones(1))
    bucket = make(carried)
    bucket.fill_rest(1.0, is_stand_in=True)
    assert bucket.has_gradient == [True]


@both
def test_zeros_of_real_samples_are_a_gradient(make: Make) -> None:
    bucket = make(parameter(2, grad=torch.zeros(2)))
    bucket.fill_rest(1.0)
    assert bucket.has_gradient == [True]


@both
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_gradients_in_any_memory_layout(make: Make, scale: float) -> None:
    grad = torch.arange(6.0).view(3, 2).t()
    assert not grad.is_contiguous()
    p = parameter(2, 3, grad=grad.clone())
    bucket = make(p)
    bucket.fill(0, scale)
    bucket.hand_out(SOMEBODY)
    assert p.grad is not None
    assert torch.equal(p.grad, grad * scale)


@both
def test_sparse_gradients_are_made_dense(make: Make) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    bucket = make(table.weight)
    bucket.fill(0, 0.5)
    bucket.hand_out(SOMEBODY)
    assert table.weight.grad is not None
    assert table.weight.grad.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_kept(make: Make, dtype: torch.dtype) -> None:
    p = parameter(3, grad=torch.tensor([1.0, 2.0, 3.0], dtype=dtype), dtype=dtype)
    bucket = make(p)
    bucket.fill(0, 0.5)
    assert bucket.payload().dtype == dtype
    bucket.hand_out(SOMEBODY)
    assert p.grad is not None
    assert p.grad.dtype == dtype
    assert p.grad.tolist() == [0.5, 1.0, 1.5]


@both
def test_a_second_fill_is_reported_and_changes_nothing(make: Make) -> None:
    p = parameter(1, grad=torch.ones(1))
    bucket = make(p)
    assert bucket.fill(0, 1.0) is True
    p.grad = torch.full((1,), 5.0)
    assert bucket.fill(0, 1.0) is False
    assert bucket.num_missing == 0
    assert bucket.payload()[0] == 1.0


# -- packed ----------------------------------------------------------------------------------------


def test_gradients_lie_one_after_the_other_and_flags_behind_them() -> None:
    first = parameter(2, grad=torch.tensor([1.0, 2.0]))
    second = parameter(3)
    third = parameter(1, 2, grad=torch.tensor([[5.0, 6.0]]))
    bucket = PackedBucket([first, second, third], torch.float32, CPU, num_flags=4)
    bucket.buffer.fill_(99.0)  # what an earlier step left there
    bucket.fill_rest(1.0)
    assert bucket.buffer.tolist() == [1, 2, 0, 0, 0, 5, 6, 99, 99, 99, 99]
    assert bucket.flags.numel() == 4


def test_small_gradients_are_handed_out_as_views() -> None:
    p = parameter(2, grad=torch.ones(2))
    bucket = PackedBucket([p], torch.float32, CPU)
    bucket.fill(0, 1.0)
    bucket.hand_out(SOMEBODY)
    assert p.grad is not None
    assert p.grad.data_ptr() == bucket.buffer.data_ptr()


def test_scalars_and_empty_parameters() -> None:
    scalar = nn.Parameter(torch.tensor(1.0))
    scalar.grad = torch.tensor(7.0)
    empty = parameter(0, 4, grad=torch.zeros(0, 4))
    bucket = PackedBucket([scalar, empty], torch.float32, CPU)
    bucket.fill_rest(1.0)
    bucket.hand_out([False, False])
    assert scalar.grad.item() == 7.0
    assert empty.grad is not None
    assert empty.grad.shape == (0, 4)


# -- lone ------------------------------------------------------------------------------------------


def test_a_large_gradient_is_averaged_where_it_lies() -> None:
    grad = torch.ones(3)
    p = parameter(3, grad=grad)
    bucket = LoneBucket(p, CPU)
    bucket.fill(0, 0.5)
    assert bucket.payload().data_ptr() == grad.data_ptr()
    bucket.hand_out(SOMEBODY)
    assert p.grad is not None
    assert p.grad.data_ptr() == grad.data_ptr()
