"""Memory that is used again: never while anybody has it, and not for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.wire.blocks import LEAST_BYTES, MOST_BYTES, MOST_KEPT, Blocks
from shoal.wire.slots import ALIGNMENT, Slot, allocate

SIZE = LEAST_BYTES + 4


def taken(blocks: Blocks, size: int = SIZE) -> torch.Tensor:
    return allocate(Slot("float32", [size // 4]), blocks)


def test_what_nobody_has_any_more_is_used_again() -> None:
    blocks = Blocks()
    first, second = taken(blocks), taken(blocks)
    where = first.data_ptr()
    del first
    third = taken(blocks)
    assert third.data_ptr() == where
    assert third.data_ptr() % ALIGNMENT == 0
    assert second.data_ptr() != where


@pytest.mark.parametrize(
    "part_of",
    [
        lambda whole: whole[5:9],
        lambda whole: whole.detach(),
        lambda whole: whole.numpy()[5:9],
        lambda whole: whole.view(-1, 1).t().view(torch.int32),
        lambda whole: whole.untyped_storage(),
        lambda whole: memoryview(whole.numpy())[5:9],
    ],
)
def test_whoever_has_a_part_has_all_of_it(part_of: Callable[[torch.Tensor], Any]) -> None:
    blocks = Blocks()
    taken(blocks)
    part = part_of(taken(blocks))
    where = (part if hasattr(part, "data_ptr") else torch.as_tensor(part)).data_ptr()
    others = [taken(blocks) for _ in range(3)]
    assert not any(o.data_ptr() <= where < o.data_ptr() + SIZE for o in others)


def test_only_what_was_asked_for_twice_in_a_row_is_kept() -> None:
    blocks = Blocks()
    for size in (SIZE, SIZE + 4) * 3:
        taken(blocks, size)
        assert num_kept(blocks) == 0
    taken(blocks, SIZE + 4)
    assert num_kept(blocks) == 1
    taken(blocks, SIZE)  # another: nothing of the old is kept any more
    assert num_kept(blocks) == 0


def test_no_more_than_two_are_kept() -> None:
    blocks = Blocks()
    many = [taken(blocks) for _ in range(MOST_KEPT + 2)]
    del many
    assert num_kept(blocks) == MOST_KEPT


@pytest.mark.parametrize("size", [LEAST_BYTES - 4, MOST_BYTES + 4])
def test_what_is_too_little_and_what_is_too_much_are_not_kept(size: int) -> None:
    blocks = Blocks()
    for _ in range(3):
        taken(blocks, size)
    assert num_kept(blocks) == 0


def num_kept(blocks: Blocks) -> int:
    return len(blocks._free)
