"""Where to cut a model into stages, so that the slowest stage is as fast as it can be.

A model is a row of units, in the order they run. A value goes directly from the stage that makes
it to each stage that uses it, and its gradient comes back the same way:

    unit     0    1  |  2    3  |  4         cuts [2, 4]: stages [0, 2), [2, 4), [4, 5)
    value    o────────────────────>          skips stage 1: only stage 2 receives it

The receiver is charged for a value, both ways. What a stage costs then depends on its own two ends
and on no other cut, which is what makes dynamic programming exact.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil, inf

from shoal.errors import ModelError

# Seconds are added up as whole picoseconds: sums of floats depend on their order, and then equal
# stages would not be ties. Every rank must find the same cuts.
_TICKS_PER_S = 10**12

SMALLEST_SLACK = 0.03
"""What the clock cannot tell apart."""
LEAST_SHARE = 0.1
"""Of what each stage would have, were they equal: with less than that a rank is there in vain."""


@dataclass(frozen=True)
class Unit:
    """A layer, or what else is never cut apart."""

    name: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    weights_s: float = 0.0
    """The part of the backward pass that can wait, in stages after the first (late.py)."""
    parameter_bytes: int = 0
    kept_bytes: int = 0
    """What it keeps for the backward pass, of a micro-batch."""
    late_bytes: int = 0
    """What it keeps besides, in stages after the first, until it has its weights' gradients."""
    work_bytes: int = 0
    """What it needs while it computes, or its weights are changed, and then no more."""
    can_begin: bool = True
    """Whether a stage may begin with this unit. The first stage always begins with unit 0."""


@dataclass(frozen=True)
class Value:
    """What one unit makes and later units use."""

    made_by: int
    """Number of the unit. -1: a buffer, which every stage that uses it has: it crosses no link."""
    used_by: tuple[int, ...]
    size_bytes: int
    has_gradient: bool = True


@dataclass(frozen=True)
class Costs:
    """What links cost, and what memory there is."""

    seconds_per_byte: float = 0.0
    seconds_per_message: float = 0.0
    copying_s_per_byte: float = 8e-10
    """Of copying, at both ends of a link, however fast that is: twice the copying itself, since
    messages also wait for a core while all are busy."""
    memory_bytes: Sequence[int] | None = None
    """The limit of each stage, if there are limits."""
    bytes_per_parameter_byte: float = 4.0
    """Weights, gradients and optimizer state, per byte of weights."""
    num_kept: int = 1
    """The most micro-batches of which a stage keeps something at a time."""
    slack: float = 0.0
    """How much slower than it could be, as a share, the slowest stage may be where that makes the
    total smaller. Small: what the clock cannot tell apart. Large: stages take turns anyway."""


_FREE = Costs()
_Cost = Callable[[int, int, int], float]
"""Of stage number s over [first, last). Never falls as `last` grows; inf where not allowed."""


def stage_seconds(
    units: Sequence[Unit], values: Sequence[Value], first: int, last: int, costs: Costs
) -> float:
    """What a micro-batch takes in a stage [first, last): its compute, and what it receives.

    Each value made before `first` and used inside is one message in, and one back where it has a
    gradient, however many units of the stage use it.
    """
    return _running_ticks(units, _messages(values, costs), first)[last] / _TICKS_PER_S


def stage_bytes(
    units: Sequence[Unit], values: Sequence[Value], first: int, last: int, costs: Costs
) -> float:
    """The memory that the tensors of a stage [first, last) need, at most.

    Its buffers. Of every micro-batch that is under way: what came from other stages, and what units
    keep. One unit is at work.
    """
    return _memory(units, values, costs)(first, last)


def cut(
    units: Sequence[Unit],
    values: Sequence[Value],
    num_stages: int,
    costs: Costs = _FREE,
    together: Sequence[tuple[int, int]] = (),
) -> list[int]:
    """Numbers of the units that stages 1, 2, ... begin with. The slowest stage is minimal.

    Of cuts that are equal in that: the smallest total, then the fewest stages that compute nothing,
    then the earliest cuts. `together` are pairs of units that must share a stage.
    Raises ModelError where no cut will do.
    """
    places, faults = places_in(units, num_stages, together)
    limits = costs.memory_bytes
    if limits is not None and len(limits) != num_stages:
        faults.append(f"there are {len(limits)} memory limits for {num_stages} stages.")
    if faults:
        raise ModelError(faults)

    bounds = [0, *places, len(units)]
    messages = _messages(values, costs)
    ticks = {first: _running_ticks(units, messages, first) for first in bounds[:-1]}
    work = [0, *accumulate(_compute_ticks(unit) for unit in units)]
    memory = _memory(units, values, costs)

    def excess(stage: int, first: int, last: int) -> float:
        return -inf if limits is None else memory(first, last) - limits[stage]

    def seconds(stage: int, first: int, last: int) -> float:
        return inf if excess(stage, first, last) > 0 else ticks[first][last]

    slowest, _ = _search(num_stages, bounds, seconds, max)
    if slowest == inf:
        _, nearest = _search(num_stages, bounds, excess, max)
        raise ModelError(_tightest(units, nearest, excess))

    most = slowest * (1 + costs.slack)

    # The slowest stage must be known before totals are compared. In one pass, a start of the row
    # that is fast but dear would win over a cheap one, although a later stage is slower than both.
    def total(stage: int, first: int, last: int) -> float:
        own = seconds(stage, first, last)
        if own > most:
            return inf
        # As one number: all idle stages together never make up a tick.
        return own * (num_stages + 1) + (work[first] == work[last])

    return _search(num_stages, bounds, total, operator.add)[1]


def cut_for_turns(
    units: Sequence[Unit],
    values: Sequence[Value],
    num_stages: int,
    costs: Costs,
    together: Sequence[tuple[int, int]] = (),
) -> list[int]:
    """The same where one stage works at a time: less evenly, if then less has to cross.

    But so that every stage has something to do. Where no cut can give it that, the fastest slowest
    stage is what counts.
    """
    work = [0, *accumulate(_compute_ticks(unit) for unit in units)]
    least = work[-1] / num_stages * LEAST_SHARE
    slack = costs.slack
    while True:
        found = cut(units, values, num_stages, replace(costs, slack=slack), together)
        shares = (work[b] - work[a] for a, b in pairwise([0, *found, len(units)]))
        if slack == 0 or all(share >= least for share in shares):
            return found
        slack = 0.9 * slack if slack > SMALLEST_SLACK else 0.0


def _search(
    num_stages: int, bounds: Sequence[int], cost: _Cost, join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least joined cost of all stages, and its earliest cuts.

    Goes from the last stage to the first, so that of equal choices the first one met has the
    earliest cuts. `join(a, b)` is never less than `a`.
    """
    best = [cost(num_stages - 1, first, bounds[-1]) for first in bounds[:-1]]
    choices: list[list[int]] = []
    for stage in reversed(range(num_stages - 1)):
        rest, best = best, [inf] * len(best)
        choice = [0] * len(best)
        for begin, first in enumerate(bounds[:-1]):
            for end in range(begin + 1, len(best)):
                own = cost(stage, first, bounds[end])
                if own >= best[begin]:
                    break  # and every longer stage costs as much or more
                joined = join(own, rest[end])
                if joined < best[begin]:
                    best[begin], choice[begin] = joined, end
        choices.append(choice)
    at, cuts = 0, []
    for choice in reversed(choices):
        at = choice[at]
        cuts.append(bounds[at])
    return best[0], cuts


_Message = tuple[int, list[int], int]
"""The unit that makes a value, those that use it (sorted), and its ticks or bytes."""


def _messages(values: Sequence[Value], costs: Costs) -> list[_Message]:
    def ticks(value: Value) -> int:
        one_way = costs.seconds_per_message + max(value.size_bytes, 0) * costs.seconds_per_byte
        return _ticks(one_way) * (2 if value.has_gradient else 1)

    return [(v.made_by, sorted(v.used_by), ticks(v)) for v in _crossing(values)]


def _crossing(values: Sequence[Value]) -> list[Value]:
    return [value for value in values if value.made_by >= 0]


def _running_ticks(units: Sequence[Unit], messages: Sequence[_Message], first: int) -> list[int]:
    """Item `last` is what the stage [first, last) costs."""
    each = [0] * first + [_compute_ticks(unit) for unit in units[first:]]
    return _running(each, messages, first)


def _running(each: list[int], messages: Sequence[_Message], first: int) -> list[int]:
    """Sums up to each unit, and of what comes to a stage that begins with `first`."""
    for made_by, used_by, size in messages:
        if made_by < first and (use := bisect_left(used_by, first)) < len(used_by):
            each[used_by[use]] += size  # once: later uses find it there
    return [0, *accumulate(each)]


def _compute_ticks(unit: Unit) -> int:
    return _ticks(unit.forward_s) + _ticks(unit.backward_s)


def _ticks(seconds: float) -> int:
    return round(seconds * _TICKS_PER_S)


def _memory(
    units: Sequence[Unit], values: Sequence[Value], costs: Costs
) -> Callable[[int, int], float]:
    """`stage_bytes` for any stage, without going through the units each time."""
    parameters = [0, *accumulate(unit.parameter_bytes for unit in units)]
    kept = [0, *accumulate(unit.kept_bytes for unit in units)]
    late = [0, *accumulate(unit.late_bytes for unit in units)]
    arriving = [(v.made_by, sorted(v.used_by), max(v.size_bytes, 0)) for v in _crossing(values)]
    buffers = [(v.made_by, sorted(v.used_by), v.size_bytes) for v in values if v.made_by < 0]
    came: dict[int, list[int]] = {}
    """By the first unit of a stage: what comes to it from other stages, up to each unit."""
    held: dict[int, list[int]] = {}
    """In the same way: its buffers."""
    at_work: dict[int, list[int]] = {}
    """In the same way: what the unit needs that needs most."""

    def memory(first: int, last: int) -> float:
        if first not in came:
            came[first] = _running([0] * len(units), arriving, first)
            held[first] = _running([0] * len(units), buffers, first)
            needed = [0] * first + [unit.work_bytes for unit in units[first:]]
            at_work[first] = [0, *accumulate(needed, max)]
        of_each = kept[last] - kept[first] + came[first][last]
        if first:
            of_each += late[last] - late[first]
        weights = (parameters[last] - parameters[first]) * costs.bytes_per_parameter_byte
        return weights + held[first][last] + of_each * costs.num_kept + at_work[first][last]

    return memory


def places_in(
    units: Sequence[Unit], num_stages: int, together: Sequence[tuple[int, int]]
) -> tuple[list[int], list[str]]:
    """The units that a stage may begin with, and what is wrong where they are too few."""
    pairs = [(min(pair), max(pair)) for pair in together]
    free = [i for i, unit in enumerate(units) if i and unit.can_begin]
    places = [i for i in free if not any(a < i <= b for a, b in pairs)]
    if num_stages < 1:
        return places, [f"{num_stages} stages: a model is cut into 1 stage at least."]
    asked = f"{num_stages} stages were asked for, and"
    most, begins, possible = len(units), len(free) + 1, len(places) + 1
    faults = []
    if num_stages > most:
        faults.append(f"{asked} the model has {most} units: {most} stages are possible.")
    if min(num_stages, most) > begins:
        faults.append(f"{asked} only {begins} units may begin one: {begins} stages are possible.")
    if min(num_stages, most, begins) > possible:
        # Only pairs that take a place away: the others are no part of the reason.
        guilty = [(a, b) for a, b in pairs if any(a < i <= b for i in free)]
        names = ", ".join(f"{units[a].name!r} and {units[b].name!r}" for a, b in guilty)
        faults.append(
            f"{asked} units that share parameters or memory must be in one stage ({names}): "
            f"{possible} {'stage is' if possible == 1 else 'stages are'} possible. For more, "
            "give each weights of its own (a head that is not tied to its embedding) and new "
            "tensors instead of steps in place; or train replicas of the whole model."
        )
    return places, faults


def _tightest(units: Sequence[Unit], cuts: Sequence[int], excess: _Cost) -> str:
    """Why the cut that comes nearest to the memory limits does not meet them."""
    stages = list(enumerate(pairwise([0, *cuts, len(units)])))
    stage, (first, last) = max(stages, key=lambda item: excess(item[0], *item[1]))
    names = " to ".join(dict.fromkeys((repr(units[first].name), repr(units[last - 1].name))))
    return (
        f"no cut into {len(stages)} stages meets the memory limits: at best, stage {stage} "
        f"({names}) needs {ceil(excess(stage, first, last)):,} bytes more than its limit."
    )
