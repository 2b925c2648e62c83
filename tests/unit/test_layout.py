"""Sharing a batch out: nothing lost, nothing twice, nobody ahead by more than one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.layout import Layout, Share, share

totals = st.integers(0, 10_000)
crews = st.integers(1, 64)


def all_shares(total: int, num_ranks: int) -> list[Share]:
    return [share(total, rank, num_ranks) for rank in range(num_ranks)]


@given(totals, crews)
def test_every_sample_falls_to_one_rank_and_in_order(total: int, num_ranks: int) -> None:
    shares = all_shares(total, num_ranks)
    assert [sample for s in shares for sample in range(s.start, s.stop)] == list(range(total))
    assert {s.total for s in shares} == {total}


@given(totals, crews)
def test_sizes_differ_by_one_at_most_and_the_larger_come_first(total: int, num_ranks: int) -> None:
    sizes = [s.size for s in all_shares(total, num_ranks)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(st.integers(1, 10_000), crews)
def test_weights_make_up_for_dividing_by_the_ranks(total: int, num_ranks: int) -> None:
    weights = [s.weight_over_mean(num_ranks) for s in all_shares(total, num_ranks)]
    assert sum(weights) == pytest.approx(num_ranks)
    if total % num_ranks == 0:
        assert set(weights) == {1.0}  # exactly: the sync then leaves gradients as they are


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=40), st.integers(1, 9))
def test_weighted_means_of_ranks_are_the_mean_of_all(values: list[int], num_ranks: int) -> None:
    total = 0.0
    for s in all_shares(len(values), num_ranks):
        mine = values[s.start : s.stop] or values[:1]  # an empty rank works on a stand-in
        total += sum(mine) / len(mine) * s.weight_over_mean(num_ranks) / num_ranks
    assert total == pytest.approx(sum(values) / len(values))


def test_by_hand() -> None:
    assert all_shares(10, 4) == [
        Share(0, 3, 10),
        Share(3, 6, 10),
        Share(6, 8, 10),
        Share(8, 10, 10),
    ]
    assert [s.size for s in all_shares(1, 3)] == [1, 0, 0]
    assert share(10, 0, 4).weight_over_mean(4) == 1.2


def test_a_layout_counts_its_ranks() -> None:
    assert Layout(replicas=3).num_ranks == 3
    assert Layout(replicas=3, stages=2).num_ranks == 6
