"""Cutting a row of units: as good as trying every cut, and clear about why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from shoal.errors import ModelError
from shoal.pipeline.partition import Costs, Unit, Value, cut, stage_bytes, stage_seconds


def row(*seconds: float) -> list[Unit]:
    """Units 'a', 'b', ... that take so long."""
    return [Unit(chr(ord("a") + i), forward_s=s) for i, s in enumerate(seconds)]


def chain(*sizes: int) -> list[Value]:
    """Value i goes from unit i to unit i + 1."""
    return [Value(i, (i + 1,), size) for i, size in enumerate(sizes)]


def faults(*args: object, **kwargs: object) -> list[str]:
    with pytest.raises(ModelError) as raised:
        cut(*args, **kwargs)  # type: ignore[arg-type]
    return raised.value.faults


# Against every cut there is. Whole numbers, so that both sides add up exactly.


@dataclass(frozen=True)
class Problem:
    units: list[Unit]
    values: list[Value]
    num_stages: int
    costs: Costs
    together: list[tuple[int, int]]

    def seconds(self, first: int, last: int) -> float:
        """Said anew, straight from the definition."""
        compute = sum(u.forward_s + u.backward_s for u in self.units[first:last])
        for value in self.values:
            if 0 <= value.made_by < first and any(first <= u < last for u in value.used_by):
                message = self.costs.seconds_per_message
                message += self.costs.seconds_per_byte * value.size_bytes
                compute += message * (1 + value.has_gradient)
        return compute

    def fits(self, stage: int, first: int, last: int) -> bool:
        limits = self.costs.memory_bytes
        return limits is None or self.bytes(first, last) <= limits[stage]

    def bytes(self, first: int, last: int) -> float:
        """Said anew, too."""
        units = self.units[first:last]
        weights = sum(u.parameter_bytes * self.costs.bytes_per_parameter_byte for u in units)
        kept = sum(u.kept_bytes + (u.late_bytes if first else 0) for u in units)
        for value in self.values:
            if 0 <= value.made_by < first and any(first <= u < last for u in value.used_by):
                kept += value.size_bytes
        at_work = max((u.work_bytes for u in units), default=0)
        buffers = sum(
            value.size_bytes
            for value in self.values
            if value.made_by < 0 and any(first <= u < last for u in value.used_by)
        )
        return weights + buffers + self.costs.num_kept * kept + at_work

    def allowed(self, cuts: tuple[int, ...]) -> bool:
        stages = list(pairwise([0, *cuts, len(self.units)]))
        return (
            all(self.units[c].can_begin for c in cuts)
            and all(self.fits(s, *stage) for s, stage in enumerate(stages))
            and not any(min(pair) < c <= max(pair) for c in cuts for pair in self.together)
        )

    def key(self, cuts: tuple[int, ...]) -> tuple[float, float, int, tuple[int, ...]]:
        stages = list(pairwise([0, *cuts, len(self.units)]))
        seconds = [self.seconds(*stage) for stage in stages]
        idle = [not any(u.forward_s + u.backward_s for u in self.units[a:b]) for a, b in stages]
        return max(seconds), sum(seconds), sum(idle), cuts

    def best(self, every: list[tuple[int, ...]]) -> tuple[int, ...]:
        """The smallest total among those whose slowest stage is fast enough."""
        keys = [self.key(cuts) for cuts in every]
        most = min(keys)[0] * (1 + self.costs.slack)
        return min(key[1:] for key in keys if key[0] <= most)[-1]

    def every_cut(self) -> list[tuple[int, ...]]:
        places = combinations(range(1, len(self.units)), self.num_stages - 1)
        return [cuts for cuts in places if self.allowed(cuts)]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_units = draw(st.integers(1, 8))
    num_stages = draw(st.integers(1, 4))
    small, numbers = st.integers(0, 4), st.integers(0, num_units - 1)
    units = [
        Unit(
            f"u{i}",
            draw(small),
            draw(small),
            parameter_bytes=draw(small),
            kept_bytes=draw(small),
            late_bytes=draw(st.integers(0, 2)),
            work_bytes=draw(small),
            can_begin=draw(st.integers(0, 5)) > 0,
        )
        for i in range(num_units)
    ]
    values = []
    for made_by in draw(st.lists(st.integers(-1, num_units - 2), max_size=10)):
        later = st.integers(made_by + 1, num_units - 1)
        used_by = draw(st.lists(later, min_size=1, max_size=3, unique=True))  # in any order
        values.append(Value(made_by, tuple(used_by), draw(small), draw(st.booleans())))
    limits = st.lists(st.integers(5, 90), min_size=num_stages, max_size=num_stages)
    costs = Costs(
        draw(small),
        draw(small),
        draw(st.none() | limits),
        bytes_per_parameter_byte=draw(st.sampled_from([1, 4])),
        num_kept=draw(st.integers(1, 3)),
        slack=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    together = draw(st.lists(st.tuples(numbers, numbers), max_size=2))
    return Problem(units, values, num_stages, costs, together)


def one_slow_stage(units: list[Unit], made_by: int) -> Problem:
    """The other two stages take 6 and 5 seconds, or 2 and 8: faster but dearer, or the reverse.

    Beside a stage of 18 seconds the cheap ones are better. A search that keeps one best start (or
    one best rest) for each place, by (slowest, total), has thrown them away by then.
    """
    value = Value(made_by, (made_by + 1,), 1, has_gradient=False)
    return Problem(units, [value], 3, Costs(seconds_per_byte=1), [])


@given(problems())
@example(one_slow_stage(row(2, 4, 4, 18), made_by=1))
@example(one_slow_stage(row(18, 2, 4, 4), made_by=2))
def test_no_cut_is_better(problem: Problem) -> None:
    p = problem
    every = p.every_cut()
    event(f"possible: {bool(every)}, stages: {p.num_stages}")
    if not every:
        assert faults(p.units, p.values, p.num_stages, p.costs, p.together)
        return
    cuts = cut(p.units, p.values, p.num_stages, p.costs, p.together)
    assert tuple(cuts) == p.best(every)


@given(problems())
def test_what_a_stage_costs(problem: Problem) -> None:
    p = problem
    for first, last in combinations(range(len(p.units) + 1), 2):
        seconds = stage_seconds(p.units, p.values, first, last, p.costs)
        assert seconds == p.seconds(first, last)
        assert stage_bytes(p.units, p.values, first, last, p.costs) == p.bytes(first, last)


# Cuts that one can see.


def test_equal_units_make_equal_parts() -> None:
    assert cut(row(*[0.1] * 12), [], 4) == [3, 6, 9]
    assert cut(row(1, 1, 1), [], 3) == [1, 2]
    assert cut(row(1, 1, 1), [], 1) == []


def test_forward_and_backward_both_count() -> None:
    units = [Unit("a", 1, 5), Unit("b", 1, 1), Unit("c", 1, 1), Unit("d", 1, 1)]
    assert cut(units, [], 2) == [1]


def test_ties_are_ties_although_floats_do_not_add_up() -> None:
    # 0.4 + 0.2 + 0.1 > 0.1 + 0.4 + 0.2: by floats, [1] would lose to [3] by the last bit.
    assert cut(row(0.1, 0.4, 0.2, 0.1), [], 2, together=[(1, 2)]) == [1]
    assert stage_seconds(row(0.1, 0.2), [], 0, 2, Costs()) == 0.3


def test_a_skip_that_makes_a_cut_dearer_is_avoided() -> None:
    units, links = row(2, 2, 2, 2), Costs(seconds_per_byte=1)
    skip = Value(0, (2,), 3)
    assert cut(units, chain(1, 1, 1), 2, links) == [2]
    assert cut(units, [*chain(1, 1, 1), skip], 2, links) == [3]


def test_a_skip_over_a_stage_is_no_cost_of_that_stage() -> None:
    units, skip = row(1, 1, 1), [Value(0, (2,), 10)]
    links = Costs(seconds_per_byte=1)
    assert stage_seconds(units, skip, 1, 2, links) == 1
    assert stage_seconds(units, skip, 2, 3, links) == 1 + 10 + 10
    assert stage_seconds(units, skip, 0, 3, links) == 3


def test_a_value_is_received_once_and_goes_back_only_as_a_gradient() -> None:
    units, links = row(0, 0, 0, 0), Costs(seconds_per_byte=1, seconds_per_message=100)
    both, one_way = Value(0, (3, 1, 2), 5), Value(0, (1,), 5, has_gradient=False)
    assert stage_seconds(units, [both], 1, 4, links) == 210
    assert stage_seconds(units, [one_way], 1, 4, links) == 105


def test_inputs_of_the_model_cross_no_link() -> None:
    links = Costs(seconds_per_byte=1, seconds_per_message=1)
    assert stage_seconds(row(1, 1), [Value(-1, (0, 1), 1000)], 1, 2, links) == 1


def test_over_a_slow_link_the_cut_is_at_the_narrowest_place() -> None:
    units, values = row(1, 1, 1, 1, 1, 1), chain(50, 40, 30, 2, 30)
    assert cut(units, values, 2) == [3]
    assert cut(units, values, 2, Costs(seconds_per_byte=10)) == [4]


def test_with_slack_a_narrow_place_is_worth_a_slower_stage() -> None:
    units, values = row(1, 1, 1, 1, 1, 1), chain(9, 9, 9, 1, 9)
    costs = Costs(seconds_per_byte=0.01)
    assert cut(units, values, 2, costs) == [3]
    assert cut(units, values, 2, replace(costs, slack=0.5)) == [4]


def test_a_memory_limit_moves_the_cut() -> None:
    units = [Unit(name, 1, parameter_bytes=10, kept_bytes=5) for name in "abcd"]
    assert stage_bytes(units, [], 1, 3, Costs()) == 2 * (10 * 4 + 5)
    assert cut(units, [], 2, Costs(memory_bytes=[90, 90])) == [2]
    assert cut(units, [], 2, Costs(memory_bytes=[89, 135])) == [1]
    assert cut(units, [], 2, Costs(memory_bytes=[135, 89])) == [3]


def test_what_comes_to_a_stage_and_what_it_puts_off_needs_memory() -> None:
    """Of every micro-batch that is under way; and the unit that is at work needs some once."""
    units = [Unit(name, 1, kept_bytes=5, late_bytes=4, work_bytes=9) for name in "abcd"]
    values = [Value(0, (1, 2, 3), 100), *chain(20, 20, 20)]
    costs = Costs(num_kept=2)
    assert stage_bytes(units, values, 0, 2, costs) == 2 * (5 + 5) + 9
    assert stage_bytes(units, values, 2, 4, costs) == 2 * (100 + 20 + 2 * (5 + 4)) + 9


def test_what_shares_parameters_stays_together() -> None:
    units = row(1, 1, 1, 1)
    assert cut(units, [], 2, together=[(2, 1)]) == [1]
    assert cut(units, [], 2, together=[(0, 1), (1, 2)]) == [3]


def test_a_stage_begins_only_where_it_may() -> None:
    units = row(1, 1, 1, 1)
    units[2] = replace(units[2], can_begin=False)
    assert cut(units, [], 2) == [1]
    units[0] = replace(units[0], can_begin=False)  # it begins all the same: something must
    assert cut(units, [], 2) == [1]


def test_of_equal_cuts_the_one_where_every_stage_works() -> None:
    assert cut(row(0, 9, 1, 1), [], 3) == [2, 3]
    assert cut(row(9, 0, 0, 1), [], 3) == [1, 2]  # no way around: then the earliest


# No cut at all.


def test_more_stages_than_units() -> None:
    assert faults(row(1, 1, 1), [], 4) == [
        "4 stages were asked for, and the model has 3 units: 3 stages are possible."
    ]


def test_more_stages_than_places_to_cut() -> None:
    units = [replace(unit, can_begin=unit.name == "c") for unit in row(1, 1, 1, 1)]
    assert faults(units, [], 3) == [
        "3 stages were asked for, and only 2 units may begin one: 2 stages are possible."
    ]


def test_shared_parameters_leave_too_few_stages_and_are_named() -> None:
    assert faults(row(1, 1, 1, 1), [], 3, together=[(0, 2), (1, 1)]) == [
        "3 stages were asked for, and units that share parameters or memory must be in one stage "
        "('a' and 'c'): 2 stages are possible. For more, give each weights of its own (a head that "
        "is not tied to its embedding) and new tensors instead of steps in place; or train "
        "replicas of the whole model."
    ]


def test_memory_limits_that_no_cut_meets() -> None:
    units = [
        Unit(name, kept_bytes=size) for name, size in zip("abc", [1000, 300, 2500], strict=True)
    ]
    assert faults(units, [], 2, Costs(memory_bytes=[1200, 1300])) == [
        "no cut into 2 stages meets the memory limits: "
        "at best, stage 1 ('c') needs 1,200 bytes more than its limit."
    ]
    assert faults(units, [], 2, Costs(memory_bytes=[1200, 2500])) == [
        "no cut into 2 stages meets the memory limits: "
        "at best, stage 0 ('a' to 'b') needs 100 bytes more than its limit."
    ]


def test_every_fault_at_once() -> None:
    units = row(1, 1, 1, 1)
    units[3] = replace(units[3], can_begin=False)
    found = faults(units, [], 5, Costs(memory_bytes=[1]), together=[(0, 1)])
    assert [fault.partition(" For more")[0].rpartition(": ")[2] for fault in found] == [
        "4 stages are possible.",
        "3 stages are possible.",
        "2 stages are possible.",
        "there are 1 memory limits for 5 stages.",
    ]


def test_no_stages_and_no_units() -> None:
    assert "1 stage at least" in faults(row(1), [], 0)[0]
    assert "0 stages are possible" in faults([], [], 1)[0]


@pytest.mark.parametrize("num_stages", [2, 8, 64])
def test_hundreds_of_units_with_a_skip_from_each_to_all(num_stages: int) -> None:
    units = [Unit(f"u{i}", (i * 7919 % 101) / 1e3, 0.05, kept_bytes=1) for i in range(400)]
    values = [Value(i, tuple(range(i + 1, 400)), i % 13) for i in range(399)]
    costs = Costs(1e-5, 1e-6, memory_bytes=[4000] * num_stages)
    cuts = cut(units, values, num_stages, costs)
    assert cuts == sorted(set(cuts))
    assert len(cuts) == num_stages - 1
