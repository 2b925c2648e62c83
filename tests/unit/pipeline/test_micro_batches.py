"""Batches cut into micro-batches and put together again: nothing lost, nothing twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trees import same

from shoal.errors import ModelError
from shoal.layout import Share
from shoal.pipeline.micro_batches import join, num_samples, shares, split


def batch_of(size: int) -> dict[str, Any]:
    """Tensors of every kind, in every place, and what is no tensor."""
    return {
        "x": torch.arange(size * 6, dtype=torch.float32).view(size, 3, 2),
        "more": [
            torch.arange(size),
            (torch.arange(size) % 2 == 0, torch.arange(2 * size).view(2, size).t()),
        ],
        "scale": torch.tensor(2.0),
        "n": 3,
        "name": "text",
        "none": None,
    }


@given(st.integers(1, 40), st.integers(1, 50))
def test_a_batch_comes_back_whole(size: int, num_parts: int) -> None:
    parts = shares(size, num_parts)
    batch = batch_of(size)
    pieces = split(batch, parts)
    assert len(pieces) == len(parts) == min(size, num_parts)
    assert [num_samples(piece, "x") for piece in pieces] == [part.size for part in parts]
    assert same(join(pieces, parts), batch)


@given(st.integers(0, 200), st.integers(1, 50))
def test_shares_are_all_of_it_once_and_nearly_equal(total: int, num_parts: int) -> None:
    parts = shares(total, num_parts)
    assert [sample for part in parts for sample in range(part.start, part.stop)] == list(
        range(total)
    )
    sizes = [part.size for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert {part.total for part in parts} == {total}
    assert len(parts) == max(1, min(total, num_parts))
    assert all(sizes) or total == 0


def test_a_batch_that_does_not_divide() -> None:
    assert [part.size for part in shares(10, 4)] == [3, 3, 2, 2]
    assert [part.size for part in shares(2, 4)] == [1, 1]


@given(st.integers(0, 300), st.integers(1, 50), st.integers(1, 6))
def test_in_a_pipeline_the_first_and_the_last_are_smaller(
    total: int, num_parts: int, num_stages: int
) -> None:
    parts = shares(total, num_parts, num_stages)
    assert [sample for part in parts for sample in range(part.start, part.stop)] == list(
        range(total)
    )
    sizes = [part.size for part in parts]
    assert len(parts) == max(1, min(total, num_parts))
    assert all(sizes) or total == 0
    assert max(sizes) <= 2 * min(sizes) + 2
    middle = sizes[1:-1] or sizes
    assert max(middle) - min(middle) <= 1
    assert sizes[0] <= max(middle)
    assert sizes[-1] <= max(middle)


def test_ends_of_two_and_of_three_stages() -> None:
    assert [part.size for part in shares(128, 4, 2)] == [21, 41, 41, 25]
    assert [part.size for part in shares(128, 5, 2)] == [16, 31, 31, 31, 19]
    assert [part.size for part in shares(130, 5, 3)] == [20, 29, 30, 29, 22]
    assert [part.size for part in shares(7, 4, 2)] == [2, 2, 2, 1]
    assert [part.size for part in shares(128, 2, 2)] == [64, 64]


@given(st.integers(2, 300), st.integers(1, 50), st.integers(1, 6))
def test_none_has_one_sample_where_all_can_have_two(
    total: int, num_parts: int, num_stages: int
) -> None:
    """Batch norm cannot train on one: 8 samples in 4 were 1, 3, 3, 1."""
    smallest = min(part.size for part in shares(total, num_parts, num_stages))
    assert smallest >= min(2, total // min(total, num_parts))
    assert [part.size for part in shares(8, 4, 2)] == [2, 2, 2, 2]


def test_no_samples_are_one_empty_micro_batch() -> None:
    assert shares(0, 4) == [Share(0, 0, 0)]


def test_one_micro_batch_is_the_batch_itself() -> None:
    batch = batch_of(3)
    (only,) = split(batch, shares(3, 1))
    assert only is batch
    assert join([batch], shares(3, 1)) is batch


def test_pieces_are_no_copies() -> None:
    x = torch.zeros(4, 2)
    first, second = split(x, shares(4, 2))
    x.fill_(1)
    assert first.sum() == second.sum() == 4


def test_what_has_no_samples_goes_into_every_part() -> None:
    batch = {"x": torch.ones(4), "scale": torch.tensor(2.0), "n": 3}
    for piece in split(batch, shares(4, 3)):
        assert piece["scale"] is batch["scale"]
        assert piece["n"] == 3


def test_outputs_of_every_form_are_put_together() -> None:
    outputs = [{"logits": torch.ones(n, 2), "aux": (torch.zeros(n, dtype=int), 5)} for n in (3, 2)]
    whole = join(outputs, shares(5, 2))
    assert whole["logits"].shape == (5, 2)
    assert whole["aux"][0].shape == (5,)
    assert whole["aux"][1] == 5
    assert isinstance(whole["aux"], tuple)


@pytest.mark.parametrize(
    ("give", "says"),
    [
        (lambda x: x.mean(), r"the output came as \(\), \(\) for 3, 2 samples"),
        (lambda x: (x, {"loss": x.sum()}), r"the output\[1\]\['loss'\] came as \(\), \(\)"),
        (lambda x: x.sum(0), r"came as \(4,\), \(4,\) for"),
        (lambda x: x @ x.t(), r"came as \(3, 3\), \(2, 2\) for"),
        (lambda x: x.flatten(), r"came as \(12,\), \(8,\) for .* flatten outside the model"),
        (lambda x: (x, len(x)), "differs from one micro-batch to the next"),
    ],
)
def test_outputs_that_are_not_of_samples_are_refused(give: Any, says: str) -> None:
    """Of a number, the first micro-batch's was taken for all; other things were strung together."""
    parts = shares(5, 2)
    outputs = [give(piece) for piece in split(torch.arange(20.0).view(5, 4), parts)]
    with pytest.raises(ModelError, match=says):
        join(outputs, parts)


def test_a_number_that_has_nothing_to_do_with_the_batch() -> None:
    outputs = [(torch.ones(n), torch.tensor(0.5), None) for n in (3, 2)]
    whole = join(outputs, shares(5, 2))
    assert whole[1] == 0.5
    assert whole[2] is None


def test_what_has_another_number_of_samples_is_not_cut() -> None:
    """Of a target that was too long, the rest was left out."""
    with pytest.raises(ModelError, match=r"\(6, 2\) came with a batch of 5 samples"):
        split([torch.ones(5), torch.ones(6, 2)], shares(5, 2))


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(5, 2), 5),
        ([torch.ones(5, 2), torch.ones(5)], 5),
        ({"x": torch.ones(5), "scale": torch.tensor(1.0), "n": 2}, 5),
        (torch.ones(0, 2), 0),
    ],
)
def test_how_many_samples(batch: Any, size: int) -> None:
    assert num_samples(batch, "x") == size


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((torch.ones(5, 2), torch.ones(4)), "got (5, 2), (4,)"),
        ({"n": 3}, "got no tensor, but a dict."),
        (None, "got no tensor, but None."),
        (
            torch.ones(5, 2).numpy(),
            "got no tensor, but a ndarray (torch.from_numpy makes one of it).",
        ),
        (torch.tensor(1.0), "got ()"),
    ],
)
def test_a_batch_of_no_clear_size(batch: Any, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        num_samples(batch, "y")
    assert str(caught.value).startswith("y: the tensors of a batch must have the same number")
    assert says in str(caught.value)


@dataclass
class Given:
    y: torch.Tensor


@pytest.mark.parametrize("outputs", [[Given(torch.ones(2))] * 2, [(1, Given(torch.ones(2)))] * 2])
def test_an_output_that_nobody_can_be_given(outputs: list[Any]) -> None:
    with pytest.raises(ModelError, match=r"the model returns a Given.*tuples, lists and dicts"):
        join(outputs, shares(4, 2))
