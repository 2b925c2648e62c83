"""In what order each stage works on the micro-batches. Pure: no tensor, no message.

All three schedules are one shape: a stage runs some forwards ahead (its warm-up), then alternates
one forward and one backward, then drains. Only the length of the warm-up differs:

    sequential   0                        one micro-batch alive, the others wait
    gpipe        all micro-batches        all alive at once
    1f1b         stages that come after   as fast as gpipe, at most num_stages alive

`print(make_schedule("1f1b", 3, 4))` draws one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from shoal.errors import ModelError
from shoal.settings import SCHEDULES, unknown

FORWARD = "F"
BACKWARD = "B"

_Waits = dict[int, tuple["Action", list["Action"]]]  # by stage: where it is, what it waits for


class Action(NamedTuple):
    """What a stage does in one tick; "1F3" is stage 1, forward, micro-batch 3."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The order of every stage. `check_schedule` says whether it can be run."""

    name: str
    num_stages: int
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    """By stage, in the order in which this stage does them."""

    def ticks(self) -> list[list[Action | None]]:
        """What happens when, as [tick][stage], if every action takes one tick. None is idle.

        Raises ModelError where the stages would wait for each other forever.
        """
        ticks, waits = _simulate(self.actions)
        if waits:
            raise ModelError(_deadlock(waits))
        return ticks

    def __str__(self) -> str:
        """The table of ticks. Where it deadlocks, a last column shows what is never reached."""
        ticks, waits = _simulate(self.actions)
        stages = range(len(self.actions))
        columns = [["tick ", *(f"stage {stage} " for stage in stages)]]
        columns += [[str(tick), *map(_cell, row)] for tick, row in enumerate(ticks)]
        if waits:
            columns.append(["stuck", *(_cell(waits.get(stage, (None,))[0]) for stage in stages)])
        widths = [max(map(len, column)) for column in columns]
        return "\n".join(
            " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in zip(*columns, strict=True)
        )

    def most_alive(self, stage: int) -> int:
        """The most micro-batches that `stage` had forwarded and not yet gone backward with.

        With gradients, that many sets of activations are in memory.
        """
        steps = (1 if action.kind == FORWARD else -1 for action in self.actions[stage])
        return max(accumulate(steps, initial=0))

    def idle_share(self) -> float:
        """The part of ticks × stages in which nothing is done, also called the bubble."""
        cells = [action for row in self.ticks() for action in row]
        return cells.count(None) / len(cells) if cells else 0.0


def make_schedule(name: str, num_stages: int, num_micro_batches: int) -> Schedule:
    """The schedule of that name, one of SCHEDULES."""
    faults = unknown("schedule", name, SCHEDULES) + _size_faults(num_stages, num_micro_batches)
    if faults:
        raise ModelError(faults)

    def order(stage: int) -> tuple[Action, ...]:
        warm_up = {
            "sequential": 0,
            "gpipe": num_micro_batches,
            "1f1b": min(num_stages - stage - 1, num_micro_batches),
        }[name]
        forwards = _all_of(stage, FORWARD, num_micro_batches)
        backwards = _all_of(stage, BACKWARD, num_micro_batches)
        steady = zip(forwards[warm_up:], backwards, strict=False)
        return (
            *forwards[:warm_up],
            *(action for pair in steady for action in pair),
            *backwards[num_micro_batches - warm_up :],
        )

    return Schedule(name, num_stages, num_micro_batches, tuple(map(order, range(num_stages))))


def forward_only(num_stages: int, num_micro_batches: int) -> Schedule:
    """For inference: no backwards, the micro-batches in order."""
    if faults := _size_faults(num_stages, num_micro_batches):
        raise ModelError(faults)
    orders = (tuple(_all_of(stage, FORWARD, num_micro_batches)) for stage in range(num_stages))
    return Schedule("forward_only", num_stages, num_micro_batches, tuple(orders))


def backward_only(num_stages: int, num_micro_batches: int) -> Schedule:
    """After a forward_only whose activations were kept: the micro-batches in order."""
    if faults := _size_faults(num_stages, num_micro_batches):
        raise ModelError(faults)
    orders = (tuple(_all_of(stage, BACKWARD, num_micro_batches)) for stage in range(num_stages))
    return Schedule("backward_only", num_stages, num_micro_batches, tuple(orders))


def check_schedule(schedule: Schedule) -> None:
    """Raise ModelError with every fault, unless every stage does all its work and none hangs.

    A schedule without any backward is for inference, and is complete without them.
    """
    num_stages, num_micro_batches = schedule.num_stages, schedule.num_micro_batches
    faults = _size_faults(num_stages, num_micro_batches)
    if len(schedule.actions) != num_stages:
        faults.append(f"num_stages is {num_stages}, but {len(schedule.actions)} stages have work")
    backward = any(action.kind == BACKWARD for order in schedule.actions for action in order)
    kinds = (FORWARD, BACKWARD) if backward else (FORWARD,)
    known_orders: list[list[Action]] = []
    missing: set[Action] = set()
    for stage in range(num_stages):
        order = schedule.actions[stage] if stage < len(schedule.actions) else ()
        expected = [a for kind in kinds for a in _all_of(stage, kind, num_micro_batches)]
        faults += _order_faults(stage, order, expected)
        known = set(expected)
        known_orders.append([action for action in order if action in known])
        missing |= known.difference(order)
    # What is missing was reported already: nobody waits for it here, so that a deadlock that is
    # reported as well is one that would remain after the missing actions were added.
    _, waits = _simulate(known_orders, done=missing)
    if waits:
        faults.append(_deadlock(waits))
    if faults:
        raise ModelError(faults)


def _order_faults(stage: int, order: Sequence[Action], expected: Sequence[Action]) -> list[str]:
    """What is wrong with one stage's order, whatever the other stages do."""
    counts = Counter(order)
    first = {action: place for place, action in reversed(list(enumerate(order)))}
    known = set(expected)
    faults = [
        f"stage {stage} does {a}, which is not among its actions ({expected[0]} to {expected[-1]})"
        for a in counts
        if expected and a not in known
    ]
    for action in expected:
        if counts[action] == 0:
            faults.append(f"stage {stage} never does {action}")
        elif counts[action] > 1:
            faults.append(f"stage {stage} does {action} {counts[action]} times")
        forward = action._replace(kind=FORWARD)
        if action in first and forward in first and first[action] < first[forward]:
            faults.append(f"stage {stage} does {action} before {forward}")
    return faults


def _simulate(
    orders: Sequence[Sequence[Action]], done: Iterable[Action] = ()
) -> tuple[list[list[Action | None]], _Waits]:
    """The ticks until nothing moves, and by stage what is stuck then and what it waits for.

    Receives block and sends do not, so an action that can run can always run later as well: one
    run that ends shows that every run ends, however fast each stage is.
    """
    finished = set(done)
    ahead = [deque(order) for order in orders]
    ticks: list[list[Action | None]] = []
    while True:
        waits = {
            stage: (order[0], [a for a in _needs(order[0], len(orders)) if a not in finished])
            for stage, order in enumerate(ahead)
            if order
        }
        ready = {stage for stage, (_, needs) in waits.items() if not needs}
        if not ready:
            return ticks, waits
        row = [order.popleft() if stage in ready else None for stage, order in enumerate(ahead)]
        ticks.append(row)
        finished.update(action for action in row if action is not None)


def _needs(action: Action, num_stages: int) -> list[Action]:
    """All earlier stages for a forward, all later ones for a backward: values may skip stages."""
    forward = action.kind == FORWARD
    sources = range(action.stage) if forward else range(action.stage + 1, num_stages)
    return [action._replace(stage=stage) for stage in sources]


def _deadlock(waits: _Waits) -> str:
    return "deadlock: " + "; ".join(
        f"stage {stage} waits at {action} for {', '.join(map(str, needs))}"
        for stage, (action, needs) in waits.items()
    )


def _all_of(stage: int, kind: str, num_micro_batches: int) -> list[Action]:
    return [Action(stage, kind, micro_batch) for micro_batch in range(num_micro_batches)]


def _cell(action: Action | None) -> str:
    return "." if action is None else f"{action.kind}{action.micro_batch}"


def _size_faults(num_stages: int, num_micro_batches: int) -> list[str]:
    sizes = {"num_stages": num_stages, "num_micro_batches": num_micro_batches}
    return [f"{name} is {size}, at least 1 is needed" for name, size in sizes.items() if size < 1]
