"""Buckets: the plan as arithmetic, the packing as copies and views."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.replicate.buckets import Bucket, Packable, plan_buckets

CPU = torch.device("cpu")

packables = st.lists(
    st.builds(
        Packable,
        num_elements=st.integers(0, 500),
        element_bytes=st.sampled_from([2, 4, 8]),
        kind=st.sampled_from(["float32", "bfloat16"]),
    ),
    max_size=30,
)


def size_bytes(p: Packable) -> int:
    return p.num_elements * p.element_bytes


# -- the plan --------------------------------------------------------------------------------------


@given(packables, st.integers(1, 2000))
def test_every_parameter_is_in_one_bucket_last_layer_first(
    parameters: list[Packable], bucket_bytes: int
) -> None:
    plan = plan_buckets(parameters, bucket_bytes)
    assert [i for bucket in plan for i in bucket] == list(reversed(range(len(parameters))))
    assert all(plan)


@given(packables, st.integers(1, 2000))
def test_a_bucket_is_of_one_kind_and_closes_when_it_is_full_or_the_kind_changes(
    parameters: list[Packable], bucket_bytes: int
) -> None:
    plan = [[parameters[i] for i in bucket] for bucket in plan_buckets(parameters, bucket_bytes)]
    for bucket in plan:
        assert len({p.kind for p in bucket}) == 1
        assert sum(map(size_bytes, bucket[:-1])) < bucket_bytes  # the last one may overflow it
    for bucket, following in pairwise(plan):
        is_full = sum(map(size_bytes, bucket)) >= bucket_bytes
        assert is_full or bucket[0].kind != following[0].kind


def test_a_plan_by_hand() -> None:
    kb = [Packable(250, 4, "float32")] * 5
    assert plan_buckets(kb, 2000) == [[4, 3], [2, 1], [0]]
    assert plan_buckets(kb, 1) == [[4], [3], [2], [1], [0]]
    assert plan_buckets(kb, 10**9) == [[4, 3, 2, 1, 0]]
    assert plan_buckets([], 2000) == []


# -- packing ---------------------------------------------------------------------------------------


def parameter(
    *shape: int, grad: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(*shape, dtype=dtype))
    made.grad = grad
    return made


def test_gradients_and_flags_lie_one_after_the_other() -> None:
    first = parameter(2, grad=torch.tensor([1.0, 2.0]))
    second = parameter(3)
    third = parameter(1, 2, grad=torch.tensor([[5.0, 6.0]]))
    bucket = Bucket([first, second, third], CPU)
    bucket.buffer.fill_(99.0)  # what an earlier step left there
    bucket.fill_rest(1.0)
    assert bucket.buffer.tolist() == [1, 2, 0, 0, 0, 5, 6, 1, 0, 1]


def test_the_scale_rides_on_the_copy() -> None:
    p = parameter(2, grad=torch.tensor([1.0, 2.0]))
    bucket = Bucket([p], CPU)
    assert bucket.fill(0, 0.25)
    assert bucket.buffer.tolist() == [0.25, 0.5, 1]
    assert p.grad is not None
    assert p.grad.tolist() == [1.0, 2.0], "the sync may still fail: the gradient is not touched"


def test_what_is_handed_out_is_a_view_and_no_copy() -> None:
    p = parameter(2, 2, grad=torch.ones(2, 2))
    bucket = Bucket([p], CPU)
    bucket.fill(0, 1.0)
    bucket.buffer.mul_(3)  # stands for the sum over the ranks
    bucket.hand_out()
    assert p.grad is not None
    assert p.grad.tolist() == [[3, 3], [3, 3]]
    assert p.grad.data_ptr() == bucket.buffer.data_ptr()


def test_a_gradient_that_is_the_view_already_is_filled_again() -> None:
    """With zero_grad(set_to_none=False) the next backward adds into the buffer itself."""
    p = parameter(2, grad=torch.ones(2))
    bucket = Bucket([p], CPU)
    bucket.fill(0, 0.5)
    bucket.hand_out()
    assert p.grad is not None
    p.grad.zero_().add_(torch.tensor([4.0, 8.0]))
    assert bucket.fill(0, 0.5)
    bucket.hand_out()
    assert p.grad.tolist() == [2, 4]


def test_a_parameter_that_nobody_used_keeps_none() -> None:
    used, unused = parameter(2, grad=torch.ones(2)), parameter(2)
    bucket = Bucket([used, unused], CPU)
    bucket.fill_rest(1.0)
    bucket.hand_out()
    assert unused.grad is None
    assert used.grad is not None


def test_a_parameter_that_another_rank_used_gets_its_gradient() -> None:
    p = parameter(2)
    bucket = Bucket([p], CPU)
    bucket.fill_rest(1.0)
    bucket.buffer += torch.tensor([5.0, 6.0, 1.0])  # what came from the other rank
    bucket.hand_out()
    assert p.grad is not None
    assert p.grad.tolist() == [5, 6]


def test_zeros_of_a_stand_in_count_as_no_gradient() -> None:
    idle = parameter(2, grad=torch.zeros(2))
    carried = parameter(1, grad=torch.ones(1))  # accumulated by an earlier batch of real samples
    bucket = Bucket([idle, carried], CPU)
    bucket.fill_rest(1.0, is_stand_in=True)
    assert bucket.buffer.tolist() == [0, 0, 1, 0, 1]
    bucket.hand_out()
    assert idle.grad is None
    assert carried.grad is not None


def test_zeros_of_real_samples_are_a_gradient() -> None:
    p = parameter(2, grad=torch.zeros(2))
    bucket = Bucket([p], CPU)
    bucket.fill_rest(1.0)
    bucket.hand_out()
    assert p.grad is not None


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_gradients_in_any_memory_layout(scale: float) -> None:
    grad = torch.arange(6.0).view(3, 2).t()
    assert not grad.is_contiguous()
    p = parameter(2, 3, grad=grad)
    bucket = Bucket([p], CPU)
    bucket.fill(0, scale)
    bucket.hand_out()
    assert p.grad is not None
    assert torch.equal(p.grad, grad * scale)


def test_sparse_gradients_are_made_dense() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    bucket = Bucket([table.weight], CPU)
    bucket.fill(0, 0.5)
    bucket.hand_out()
    assert table.weight.grad is not None
    assert table.weight.grad.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_buffer_has_the_dtype_of_its_parameters(dtype: torch.dtype) -> None:
    p = parameter(3, grad=torch.tensor([1.0, 2.0, 3.0], dtype=dtype), dtype=dtype)
    bucket = Bucket([p], CPU)
    assert bucket.buffer.dtype == dtype
    bucket.fill(0, 0.5)
    bucket.hand_out()
    assert p.grad is not None
    assert p.grad.dtype == dtype
    assert p.grad.tolist() == [0.5, 1.0, 1.5]


def test_scalars_and_empty_parameters() -> None:
    scalar = nn.Parameter(torch.tensor(1.0))
    scalar.grad = torch.tensor(7.0)
    empty = parameter(0, 4, grad=torch.zeros(0, 4))
    bucket = Bucket([scalar, empty], CPU)
    bucket.fill_rest(1.0)
    bucket.hand_out()
    assert scalar.grad.item() == 7.0
    assert empty.grad is not None
    assert empty.grad.shape == (0, 4)


def test_a_second_fill_is_reported_and_changes_nothing() -> None:
    p = parameter(1, grad=torch.ones(1))
    bucket = Bucket([p, parameter(1)], CPU)
    assert bucket.num_missing == 2
    assert bucket.fill(0, 1.0) is True
    p.grad = torch.full((1,), 5.0)
    assert bucket.fill(0, 1.0) is False
    assert bucket.num_missing == 1
    assert bucket.buffer[0] == 1.0


def test_handing_out_makes_ready_for_the_next_step() -> None:
    p = parameter(1, grad=torch.ones(1))
    bucket = Bucket([p], CPU)
    bucket.fill_rest(1.0)
    assert bucket.num_missing == 0
    bucket.hand_out()
    assert bucket.num_missing == 1
    assert bucket.fill(0, 1.0) is True
