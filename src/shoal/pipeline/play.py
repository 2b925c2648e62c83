"""Cuts compared by playing a step through: when each stage would do what, and wait for whom.

The slowest stage says how long a step takes only where there are many micro-batches. With few it
matters as well who waits at both ends, and for which messages; so the cut with the fastest slowest
stage is where the search begins (`partition.cut`), and each cut is then moved while that helps.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise

from shoal.pipeline.partition import Costs, Unit, Value, stage_bytes
from shoal.pipeline.schedule import BACKWARD, FORWARD, Schedule

LATE = "late"
REACH = 64
"""How many places to the left and to the right a cut is tried at."""


def step_seconds(
    units: Sequence[Unit],
    values: Sequence[Value],
    cuts: Sequence[int],
    costs: Costs,
    schedule: Schedule,
    weights: Sequence[float],
) -> float:
    """How long a step takes. weights: of each micro-batch, relative to what `units` was taken of.

    A link carries one message after the other. A stage begins with an action when it is done with
    the one before and all that it needs has come. Weight gradients that can wait are computed when
    there is nothing else to do, or no further micro-batch may be kept, as `Runner` does.
    """
    work, sizes = _work(units, cuts), _messages(values, cuts)
    free_at = [0.0] * schedule.num_stages
    kept = [0] * schedule.num_stages
    owed: list[deque[float]] = [deque() for _ in range(schedule.num_stages)]
    """By stage, of each micro-batch that went backward: seconds of what was put off."""
    most_kept = schedule.most_alive(0)
    link_free_at: dict[tuple[int, int], float] = defaultdict(float)
    arrives_at: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    for row in schedule.ticks():
        for action in filter(None, row):
            stage, kind, number = action
            weight = weights[number]
            came, goes = (0, 1) if kind == FORWARD else (1, 0)
            copying = sum(
                size for way, size in sizes[kind].items() if stage in (way[came], way[goes])
            )
            busy_s = work[kind][stage] + copying * costs.copying_s_per_byte
            begin = max([free_at[stage], *arrives_at[stage, kind, number]])
            late = owed[stage]
            free_at[stage] += _work_off(late, begin - free_at[stage])
            if kind == FORWARD:
                while late and kept[stage] + len(late) >= most_kept:
                    free_at[stage] += late.popleft()
                kept[stage] += 1
            else:
                kept[stage] -= 1
                if late_s := work[LATE][stage] * weight:
                    late.append(late_s)
            free_at[stage] = max(begin, free_at[stage]) + busy_s * weight
            for way, size in sizes[kind].items():
                if way[came] == stage:
                    leaves_at = max(free_at[stage], link_free_at[way])
                    link_free_at[way] = leaves_at + size * weight * costs.seconds_per_byte
                    arrival = link_free_at[way] + costs.seconds_per_message
                    arrives_at[way[goes], kind, number].append(arrival)
    return max(free + sum(late) for free, late in zip(free_at, owed, strict=True))


def _work_off(late: deque[float], limit_s: float) -> float:
    """What was put off, the oldest first, for so long; how long it took."""
    left = limit_s
    while late and left > 0:
        done = min(late[0], left)
        left -= done
        late[0] -= done
        if not late[0]:
            late.popleft()
    return limit_s - left


def refine(
    units: Sequence[Unit],
    values: Sequence[Value],
    cuts: Sequence[int],
    places: Sequence[int],
    costs: Costs,
    schedule: Schedule,
    weights: Sequence[float],
) -> list[int]:
    """The same cuts, each moved while a step gets shorter by it. places: where one may be."""
    best = list(cuts)

    def seconds(tried: list[int]) -> float:
        return step_seconds(units, values, tried, costs, schedule, weights)

    shortest = seconds(best)
    while True:
        before = list(best)
        for number in range(len(best)):
            for place in _near(best, number, places):
                tried = [*best[:number], place, *best[number + 1 :]]
                if _fits(units, values, tried, costs) and (took := seconds(tried)) < shortest:
                    best, shortest = tried, took
        if best == before:
            return best


def _near(cuts: Sequence[int], number: int, places: Sequence[int]) -> list[int]:
    """Where a cut could be instead, between its neighbours."""
    first = cuts[number - 1] if number else 0
    last = cuts[number + 1] if number + 1 < len(cuts) else float("inf")
    at = places.index(cuts[number])
    near = places[max(at - REACH, 0) : at + REACH + 1]
    return [place for place in near if first < place < last and place != cuts[number]]


def _fits(
    units: Sequence[Unit], values: Sequence[Value], cuts: Sequence[int], costs: Costs
) -> bool:
    if costs.memory_bytes is None:
        return True
    stages = pairwise([0, *cuts, len(units)])
    return all(
        stage_bytes(units, values, first, last, costs) <= limit
        for (first, last), limit in zip(stages, costs.memory_bytes, strict=True)
    )


def _work(units: Sequence[Unit], cuts: Sequence[int]) -> dict[str, list[float]]:
    """By kind of action, and of what can wait: the seconds of computing in each stage."""
    stages = [units[first:last] for first, last in pairwise([0, *cuts, len(units)])]
    late = [0.0, *(sum(unit.weights_s for unit in stage) for stage in stages[1:])]
    return {
        FORWARD: [sum(unit.forward_s for unit in stage) for stage in stages],
        BACKWARD: [
            sum(unit.backward_s for unit in stage) - put_off
            for stage, put_off in zip(stages, late, strict=True)
        ],
        LATE: late,
    }


def _messages(
    values: Sequence[Value], cuts: Sequence[int]
) -> dict[str, dict[tuple[int, int], int]]:
    """By kind of action: from which stage to which later one, the bytes of the values it uses.

    Gradients go the other way.
    """
    sizes: dict[str, dict[tuple[int, int], int]] = {
        FORWARD: defaultdict(int),
        BACKWARD: defaultdict(int),
    }
    for value in values:
        if value.made_by < 0:
            continue
        source = _stage_of(value.made_by, cuts)
        for target in {_stage_of(use, cuts) for use in value.used_by} - {source}:
            sizes[FORWARD][source, target] += max(value.size_bytes, 0)
            if value.has_gradient:
                sizes[BACKWARD][source, target] += max(value.size_bytes, 0)
    return sizes


def _stage_of(unit: int, cuts: Sequence[int]) -> int:
    return sum(cut <= unit for cut in cuts)
