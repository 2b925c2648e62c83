"""A step that is played through: how long it takes, and where that puts the cuts."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pipeline.micro_batches import shares
from shoal.pipeline.partition import Costs, Unit, Value, cut, stage_bytes
from shoal.pipeline.play import refine, step_seconds
from shoal.pipeline.schedule import make_schedule

FREE = Costs()


def row(*seconds: tuple[float, float]) -> list[Unit]:
    return [Unit(f"unit_{i}", forward, backward) for i, (forward, backward) in enumerate(seconds)]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5, 8])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_stages_and_free_links_have_the_idle_share_of_the_formula(
    name: str, num_stages: int, num_micro_batches: int
) -> None:
    units = row(*[(1.0, 1.0)] * num_stages)
    schedule = make_schedule(name, num_stages, num_micro_batches)
    cuts = range(1, num_stages)
    took = step_seconds(units, [], cuts, FREE, schedule, [1.0] * num_micro_batches)
    # Without messages nobody waits; with them, who comes first is waited for.
    assert took == pytest.approx(2.0 * num_micro_batches)
    values = [Value(i, (i + 1,), 0) for i in range(num_stages - 1)]
    took = step_seconds(units, values, cuts, FREE, schedule, [1.0] * num_micro_batches)
    assert took == pytest.approx(2.0 * (num_micro_batches + num_stages - 1))


def test_stages_in_turn_take_as_long_as_one_after_the_other() -> None:
    units = row((1.0, 2.0), (3.0, 4.0), (0.5, 0.25))
    values = [Value(0, (1,), 0), Value(1, (2,), 0)]
    schedule = make_schedule("sequential", 3, 4)
    took = step_seconds(units, values, [1, 2], FREE, schedule, [1.0] * 4)
    assert took == pytest.approx(4 * 10.75)


def test_a_message_takes_its_time_both_ways_and_both_ends_copy_it() -> None:
    units = row((1.0, 2.0), (3.0, 4.0))
    size = 10**9
    costs = Costs(seconds_per_byte=1e-9, seconds_per_message=0.1)
    once = make_schedule("1f1b", 2, 1)
    took = step_seconds(units, [Value(0, (1,), size)], [1], costs, once, [1.0])
    copies = 4 * size * costs.copying_s_per_byte
    assert took == pytest.approx(10.0 + 2 * 1.1 + copies)
    one_way = Value(0, (1,), size, has_gradient=False)
    took = step_seconds(units, [one_way], [1], costs, once, [1.0])
    # Nothing comes back, so stage 0 goes backward while stage 1 is still at work.
    assert took == pytest.approx(1.0 + copies / 4 + 1.1 + copies / 4 + 7.0)


def test_weight_gradients_wait_until_nobody_waits_for_the_others() -> None:
    first, second = row((1.0, 1.0), (1.0, 2.0))
    both = [Value(0, (1,), 0)]

    def seconds(units: list[Unit], count: int, name: str = "1f1b") -> float:
        schedule = make_schedule(name, 2, count)
        return step_seconds(units, both, [1], FREE, schedule, [1.0] * count)

    # stage 0   F . . B          stage 1   . F B W: at the same time as B
    late = replace(second, weights_s=1.0)
    assert seconds([first, second], 1) == pytest.approx(5.0)
    assert seconds([first, late], 1) == pytest.approx(4.0)
    # The first stage puts nothing off.
    assert seconds([replace(first, weights_s=1.0), second], 1) == pytest.approx(5.0)
    # Nothing is saved by it where the second stage has no rest, but everything is done.
    idle = replace(first, forward_s=0.0, backward_s=0.0)
    for count in (2, 3, 5):
        assert seconds([idle, late], count) == pytest.approx(3.0 * count)
    # stage 0   F F . B F B . . B       At most two micro-batches are kept: the first W has to be
    # stage 1   . F B F B W F B W W     done before the third F.
    assert seconds([first, late], 3) == pytest.approx(10.0)
    assert seconds([first, second], 3) == pytest.approx(11.0)


def test_a_link_carries_one_message_after_the_other() -> None:
    units = row((0.0, 0.0), (0.0, 0.0))
    costs = Costs(seconds_per_byte=1.0)
    values = [Value(0, (1,), 2, has_gradient=False)]
    took = step_seconds(units, values, [1], costs, make_schedule("gpipe", 2, 3), [1.0, 0.5, 1.0])
    assert took == pytest.approx(2 + 1 + 2, rel=1e-6)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 6])
@pytest.mark.parametrize("num_micro_batches", [4, 5, 8, 12])
@pytest.mark.parametrize("backward", [1.0, 1.5, 2.0])
def test_smaller_micro_batches_at_both_ends_make_a_step_shorter(
    num_stages: int, num_micro_batches: int, backward: float
) -> None:
    units = row(*[(1.0, backward)] * num_stages)
    values = [Value(i, (i + 1,), 0) for i in range(num_stages - 1)]
    total = 128 * num_stages * num_micro_batches

    def seconds(parts: list[int]) -> float:
        schedule = make_schedule("1f1b", num_stages, len(parts))
        weights = [part / total for part in parts]
        return step_seconds(units, values, range(1, num_stages), FREE, schedule, weights)

    even = seconds([part.size for part in shares(total, num_micro_batches)])
    tapered = seconds([part.size for part in shares(total, num_micro_batches, num_stages)])
    assert tapered < even


few_seconds = st.integers(0, 20).map(float)
units_of = st.lists(st.tuples(few_seconds, few_seconds), min_size=4, max_size=8)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Unit], list[Value]]:
    units = row(*draw(units_of))
    values = []
    for made_by in range(len(units) - 1):
        later = st.integers(made_by + 1, len(units) - 1)
        uses = draw(st.lists(later, min_size=1, max_size=3, unique=True))
        values.append(Value(made_by, tuple(uses), draw(st.integers(0, 5)), draw(st.booleans())))
    return units, values


@given(graphs(), st.integers(1, 5), st.sampled_from(["1f1b", "gpipe"]))
def test_two_stages_are_cut_where_brute_force_cuts_them(
    graph: tuple[list[Unit], list[Value]], num_micro_batches: int, name: str
) -> None:
    units, values = graph
    costs = Costs(seconds_per_byte=0.5, seconds_per_message=0.25)
    schedule = make_schedule(name, 2, num_micro_batches)
    weights = [1.0] * num_micro_batches
    places = list(range(1, len(units)))
    found = refine(units, values, cut(units, values, 2, costs), places, costs, schedule, weights)
    shortest = min(step_seconds(units, values, [p], costs, schedule, weights) for p in places)
    assert step_seconds(units, values, found, costs, schedule, weights) == shortest


@given(graphs(), st.integers(1, 5))
def test_more_stages_are_never_slower_than_where_the_search_began(
    graph: tuple[list[Unit], list[Value]], num_micro_batches: int
) -> None:
    units, values = graph
    costs = Costs(seconds_per_byte=0.5, seconds_per_message=0.25)
    schedule = make_schedule("1f1b", 3, num_micro_batches)
    weights = [1.0] * num_micro_batches
    places = list(range(1, len(units)))
    begun = cut(units, values, 3, costs)
    found = refine(units, values, begun, places, costs, schedule, weights)
    assert found == sorted(set(found))
    assert step_seconds(units, values, found, costs, schedule, weights) <= step_seconds(
        units, values, begun, costs, schedule, weights
    )
    every = [
        step_seconds(units, values, c, costs, schedule, weights) for c in combinations(places, 2)
    ]
    assert min(every) <= step_seconds(units, values, found, costs, schedule, weights)


def test_a_cut_moves_only_to_where_it_may_be_and_memory_suffices() -> None:
    units = [replace(unit, parameter_bytes=10) for unit in row(*[(1.0, 1.0)] * 6)]
    schedule = make_schedule("1f1b", 2, 4)
    ones = [1.0] * 4
    values = [Value(i, (i + 1,), 0) for i in range(5)]
    roomy = Costs(bytes_per_parameter_byte=1.0)
    assert refine(units, values, [1], [1, 2, 3, 4, 5], roomy, schedule, ones) == [3]
    assert refine(units, values, [1], [1, 2, 5], roomy, schedule, ones) == [2]
    tight = replace(roomy, memory_bytes=[20, 60])
    assert refine(units, values, [1], [1, 2, 3, 4, 5], tight, schedule, ones) == [2]
    assert stage_bytes(units, values, 0, 3, tight) > 20
