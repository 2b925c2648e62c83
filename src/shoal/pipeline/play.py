"""Cuts compared by playing a step through: when each stage would do what, and wait for whom.

The slowest stage says how long a step takes only where there are many micro-batches. With few it
matters as well who waits at both ends, and for which messages; so the cut with the fastest slowest
stage is where the search begins (`partition.cut`), and each cut is then moved while that helps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

from shoal.pipeline.partition import Costs, Unit, Value, stage_bytes
from shoal.pipeline.schedule import BACKWARD, FORWARD, Schedule

COPY_BYTES_PER_S = 1.25e9
"""What copying costs at both ends of a link, however fast it is: twice the copying itself, since
messages also wait for a core while all are busy."""
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
    the one before and all that it needs has come.
    """
    work, sizes = _work(units, cuts), _messages(values, cuts)
    free_at = [0.0] * schedule.num_stages
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
            busy_s = work[kind][stage] + copying / COPY_BYTES_PER_S
            begin = max([free_at[stage], *arrives_at[stage, kind, number]])
            free_at[stage] = begin + busy_s * weight
            for way, size in sizes[kind].items():
                if way[came] == stage:
                    leaves_at = max(free_at[stage], link_free_at[way])
                    link_free_at[way] = leaves_at + size * weight * costs.seconds_per_byte
                    arrival = link_free_at[way] + costs.seconds_per_message
                    arrives_at[way[goes], kind, number].append(arrival)
    return max(free_at)


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
                if _fits(units, tried, costs) and (took := seconds(tried)) < shortest:
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


def _fits(units: Sequence[Unit], cuts: Sequence[int], costs: Costs) -> bool:
    if costs.memory_bytes is None:
        return True
    stages = pairwise([0, *cuts, len(units)])
    return all(
        stage_bytes(units, first, last, costs) <= limit
        for (first, last), limit in zip(stages, costs.memory_bytes, strict=True)
    )


def _work(units: Sequence[Unit], cuts: Sequence[int]) -> dict[str, list[float]]:
    """By kind of action, the seconds of computing in each stage."""
    stages = list(pairwise([0, *cuts, len(units)]))
    of: dict[str, Callable[[Unit], float]] = {
        FORWARD: lambda unit: unit.forward_s,
        BACKWARD: lambda unit: unit.backward_s,
    }
    return {
        kind: [sum(map(seconds, units[first:last])) for first, last in stages]
        for kind, seconds in of.items()
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
