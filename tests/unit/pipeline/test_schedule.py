"""Schedules: complete, free of deadlock, as fast and as frugal as they claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ModelError
from shoal.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    Action,
    Schedule,
    check_schedule,
    forward_only,
    make_schedule,
)

every_size = pytest.mark.parametrize(
    ("num_stages", "num_micro_batches"), [(p, m) for p in range(1, 7) for m in range(1, 13)]
)


def actions(text: str) -> tuple[Action, ...]:
    """ "0F0 0B0" as actions."""
    return tuple(Action(int(word[0]), word[1], int(word[2:])) for word in text.split())


def by_hand(num_micro_batches: int, *orders: str) -> Schedule:
    return Schedule("by hand", len(orders), num_micro_batches, tuple(map(actions, orders)))


def faults_of(schedule: Schedule) -> list[str]:
    with pytest.raises(ModelError) as caught:
        check_schedule(schedule)
    return caught.value.faults


def text_of(order: Sequence[Action]) -> str:
    return " ".join(map(str, order))


# What is made


@every_size
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_run(name: str, num_stages: int, num_micro_batches: int) -> None:
    schedule = make_schedule(name, num_stages, num_micro_batches)
    check_schedule(schedule)
    for stage, order in enumerate(schedule.actions):
        for kind in (FORWARD, BACKWARD):
            mine = [action for action in order if action.kind == kind]
            assert mine == [Action(stage, kind, i) for i in range(num_micro_batches)]


@every_size
def test_memory(num_stages: int, num_micro_batches: int) -> None:
    for stage in range(num_stages):
        alive = {
            name: make_schedule(name, num_stages, num_micro_batches).most_alive(stage)
            for name in SCHEDULES
        }
        assert alive == {
            "sequential": 1,
            "gpipe": num_micro_batches,
            "1f1b": min(num_stages - stage, num_micro_batches),
        }


@every_size
def test_idle_time(num_stages: int, num_micro_batches: int) -> None:
    bubble = (num_stages - 1) / (num_micro_batches + num_stages - 1)
    idle = {
        name: make_schedule(name, num_stages, num_micro_batches).idle_share() for name in SCHEDULES
    }
    assert idle == {
        "sequential": (num_stages - 1) / num_stages,  # one stage works at a time
        "gpipe": bubble,
        "1f1b": bubble,
    }


@every_size
def test_inference_is_forwards_only(num_stages: int, num_micro_batches: int) -> None:
    schedule = forward_only(num_stages, num_micro_batches)
    check_schedule(schedule)
    assert len(schedule.ticks()) == num_stages + num_micro_batches - 1
    assert {action.kind for order in schedule.actions for action in order} == {FORWARD}


def test_orders_by_hand() -> None:
    orders = {name: text_of(make_schedule(name, 2, 3).actions[0]) for name in SCHEDULES}
    assert orders == {
        "sequential": "0F0 0B0 0F1 0B1 0F2 0B2",
        "gpipe": "0F0 0F1 0F2 0B0 0B1 0B2",
        "1f1b": "0F0 0F1 0B0 0F2 0B1 0B2",
    }


def test_ticks_name_the_action_of_each_stage() -> None:
    assert make_schedule("sequential", 2, 1).ticks() == [
        [Action(0, "F", 0), None],
        [None, Action(1, "F", 0)],
        [None, Action(1, "B", 0)],
        [Action(0, "B", 0), None],
    ]


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(0, 4), (2, 0), (-1, 1)])
def test_nothing_to_schedule(num_stages: int, num_micro_batches: int) -> None:
    with pytest.raises(ModelError, match="at least 1 is needed"):
        make_schedule("gpipe", num_stages, num_micro_batches)
    with pytest.raises(ModelError, match="at least 1 is needed"):
        forward_only(num_stages, num_micro_batches)
    with pytest.raises(ModelError, match="at least 1 is needed"):
        check_schedule(Schedule("by hand", num_stages, num_micro_batches, ()))


def test_an_unknown_name_is_answered_with_the_nearest_and_with_the_other_faults() -> None:
    with pytest.raises(ModelError, match="Did you mean gpipe") as caught:
        make_schedule("gpip", 0, 0)
    assert len(caught.value.faults) == 3


# What is drawn


def test_1f1b_drawn() -> None:
    table = """\
tick     0  1  2  3  4  5  6  7  8  9  10 11
stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
"""
    assert str(make_schedule("1f1b", 3, 4)) + "\n" == table


def test_gpipe_drawn() -> None:
    table = """\
tick     0  1  2  3  4  5  6  7
stage 0  F0 F1 F2 .  .  B0 B1 B2
stage 1  .  F0 F1 F2 B0 B1 B2 .
"""
    assert str(make_schedule("gpipe", 2, 3)) + "\n" == table


DEADLOCK = by_hand(2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
"""Stage 1 wants a second forward before it gives a backward; stage 0 wants the backward first."""


def test_a_deadlock_drawn_as_far_as_it_goes() -> None:
    table = """\
tick     0  1  stuck
stage 0  F0 .  B0
stage 1  .  F0 F1
"""
    assert str(DEADLOCK) + "\n" == table


# What is rejected


def test_a_deadlock_says_who_waits_where_for_what() -> None:
    message = "deadlock: stage 0 waits at 0B0 for 1B0; stage 1 waits at 1F1 for 0F1"
    assert faults_of(DEADLOCK) == [message]
    with pytest.raises(ModelError, match=message):
        DEADLOCK.ticks()
    with pytest.raises(ModelError, match=message):
        DEADLOCK.idle_share()


def test_stages_that_are_not_neighbours_can_deadlock() -> None:
    """A value may skip a stage, so the last stage waits for the first as well."""
    schedule = by_hand(
        2, "0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1", "2F1 2F0 2B0 2B1"
    )  # stage 2 wants micro-batch 1 first, which nobody begins before 0 is done
    assert faults_of(schedule) == [
        "deadlock: stage 0 waits at 0B0 for 1B0, 2B0; stage 1 waits at 1B0 for 2B0; "
        "stage 2 waits at 2F1 for 0F1, 1F1"
    ]


@pytest.mark.parametrize(
    ("order", "fault"),
    [
        ("1F0 1B0 1B1", "stage 1 never does 1F1"),
        ("1F0 1B0 1F1", "stage 1 never does 1B1"),
        ("1F0 1B0 1F1 1B1 1B1", "stage 1 does 1B1 2 times"),
        ("1F0 1B0 1B1 1F1", "stage 1 does 1B1 before 1F1"),
        (
            "1F0 1B0 1F1 1B1 1F9",
            "stage 1 does 1F9, which is not among its actions (1F0 to 1B1)",
        ),
        (
            "1F0 1B0 1F1 1B1 0F1",
            "stage 1 does 0F1, which is not among its actions (1F0 to 1B1)",
        ),
        (
            "1F0 1B0 1F1 1B1 1X1",
            "stage 1 does 1X1, which is not among its actions (1F0 to 1B1)",
        ),
    ],
)
def test_one_fault_is_one_message(order: str, fault: str) -> None:
    """In particular: a missing action is not reported a second time as a deadlock."""
    assert faults_of(by_hand(2, "0F0 0F1 0B0 0B1", order)) == [fault]


def test_a_missing_forward_does_not_blame_those_who_wait_for_it() -> None:
    assert faults_of(by_hand(1, "0B0", "1F0 1B0")) == ["stage 0 never does 0F0"]


def test_ticks_do_wait_for_what_is_missing() -> None:
    with pytest.raises(ModelError, match="stage 1 waits at 1F0 for 0F0"):
        by_hand(1, "0B0", "1F0 1B0").ticks()


def test_inference_that_leaves_one_out() -> None:
    assert faults_of(by_hand(2, "0F0 0F1", "1F1")) == ["stage 1 never does 1F0"]


def test_one_backward_makes_all_of_them_due() -> None:
    assert faults_of(by_hand(1, "0F0", "1F0 1B0")) == ["stage 0 never does 0B0"]


def test_the_wrong_number_of_stages() -> None:
    three = make_schedule("gpipe", 3, 1)
    assert faults_of(replace(three, num_stages=2)) == ["num_stages is 2, but 3 stages have work"]
    assert faults_of(replace(three, num_stages=4)) == [
        "num_stages is 4, but 3 stages have work",
        "stage 3 never does 3F0",
        "stage 3 never does 3B0",
    ]


def test_all_faults_at_once() -> None:
    schedule = by_hand(
        3,
        "0F0 0B0 0F1 0B1 0F2 0F2 0F7",
        "1F0 1F1 1B0 1B1 1B2 1F2",
    )
    assert faults_of(schedule) == [
        "stage 0 does 0F7, which is not among its actions (0F0 to 0B2)",
        "stage 0 does 0F2 2 times",
        "stage 0 never does 0B2",
        "stage 1 does 1B2 before 1F2",
        "deadlock: stage 0 waits at 0B0 for 1B0; stage 1 waits at 1F1 for 0F1",
    ]


# Against a judge that knows nothing of ticks


def can_be_run(schedule: Schedule) -> bool:
    """Whether "must come before" has no circle."""
    before: TopologicalSorter[Action] = TopologicalSorter()
    for order in schedule.actions:
        for earlier, later in pairwise(order):
            before.add(later, earlier)
        for action in order:
            if action.kind == BACKWARD:
                before.add(action, action._replace(kind=FORWARD))
                sources = range(action.stage + 1, schedule.num_stages)
            else:
                sources = range(action.stage)
            before.add(action, *(action._replace(stage=source) for source in sources))
    try:
        before.prepare()
    except CycleError:
        return False
    return True


@given(
    st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.data()
)
def test_swapped_actions(
    name: str, num_stages: int, num_micro_batches: int, num_swaps: int, data: st.DataObject
) -> None:
    schedule = make_schedule(name, num_stages, num_micro_batches)
    orders = [list(order) for order in schedule.actions]
    places = st.integers(0, 2 * num_micro_batches - 1)
    for _ in range(num_swaps):
        order = orders[data.draw(st.integers(0, num_stages - 1))]
        i, j = data.draw(places), data.draw(places)
        order[i], order[j] = order[j], order[i]
    swapped = replace(schedule, actions=tuple(map(tuple, orders)))

    str(swapped)  # can be drawn, runnable or not
    if can_be_run(swapped):
        check_schedule(swapped)
        done = [action for row in swapped.ticks() for action in row if action is not None]
        assert sorted(done) == sorted(action for order in orders for action in order)
    else:
        assert faults_of(swapped)
