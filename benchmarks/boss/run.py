"""A boss and its workers, measured: against one process, against gpipe, and as workers grow many.

    .venv/bin/python benchmarks/boss/run.py            # or: make bench

What is compared takes turns within one run, and results are ratios: the machine may be busy, but
it is busy for all. Prints the tables of README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from machine import described  # noqa: E402

LOCAL, BOSS, TRAIN_STEP = "local", "boss", "boss.train_step"
RANKS = ("gpipe zmq", "gpipe dist")
TINY_BATCH = 8


class Result(NamedTuple):
    """What race.py says of a contestant."""

    way: str
    microbatches: int
    cuts: list[str]
    seconds: list[float]
    """Of a step, in each round."""
    wall_s: float
    """Of all rounds together, as the rest is."""
    cpu_s: float
    """Of rank 0, which is the boss."""
    workers_cpu_s: float
    work_s: list[float]
    """By stage: forward, backward and update, as its timeline has them."""

    @property
    def ms(self) -> float:
        return 1000 * statistics.median(self.seconds)

    def ms_a_step(self, seconds: float) -> float:
        """Of what was spent in all steps."""
        return 1000 * seconds / self.wall_s * statistics.fmean(self.seconds)

    @property
    def is_boss(self) -> bool:
        return self.way in (BOSS, TRAIN_STEP)


class Staffed(NamedTuple):
    """A run of race.py."""

    join_s: float
    leave_s: float
    results: list[Result]

    def of(self, way: str, microbatches: int = 1) -> Result:
        return next(r for r in self.results if (r.way, r.microbatches) == (way, microbatches))


def race(command: Sequence[str], options: Sequence[str]) -> Staffed:
    argv = [sys.executable, *command, str(HERE / "race.py"), *options]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=3600, check=True)
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    results = [Result(**each) for each in found["contestants"]]
    return Staffed(found["join_s"], found["leave_s"], results)


def ratios(own: Result, rival: Result) -> list[float]:
    return [a / b for a, b in zip(own.seconds, rival.seconds, strict=True)]


def spread(values: list[float]) -> str:
    quarters = statistics.quantiles(values, n=4)
    return f"{statistics.median(values):.3f} ({quarters[0]:.3f}–{quarters[2]:.3f})"


def show_times(run: Staffed, counts: list[int]) -> None:
    print("\n### Time of a step, relative to local and to gpipe with as many micro-batches\n")
    heads = ["× local, median (quartiles)", *(f"× {way}" for way in RANKS)]
    print(f"| | micro-batches | stage 1 begins with | ms a step | {' | '.join(heads)} |")
    print("|---|---|---|---|---|---|---|")
    for each in run.results:
        rivals = [run.of(LOCAL)]
        if each.microbatches in counts:
            rivals += [run.of(way, each.microbatches) for way in RANKS]
        cells = ["1" if each is rival else spread(ratios(each, rival)) for rival in rivals]
        cells += [""] * (1 + len(RANKS) - len(cells))
        cut = f"`{each.cuts[0]}`" if each.cuts else ""
        row = [each.way, str(each.microbatches), cut, f"{each.ms:.1f}", *cells]
        print(f"| {' | '.join(row)} |")


def show_work(run: Staffed) -> None:
    print("\n### Where the time of a step goes, in ms (means)\n")
    print("| | micro-batches | step | work of stage 0 | of stage 1 | idle | CPU time of the boss |")
    print("|---|---|---|---|---|---|---|")
    for each in run.results:
        if each.work_s:
            work = " | ".join(f"{each.ms_a_step(seconds):.1f}" for seconds in each.work_s)
            idle = 1 - statistics.fmean(each.work_s) / each.wall_s
            boss = f"{each.ms_a_step(each.cpu_s):.1f}" if each.is_boss else ""
            step = f"{each.ms_a_step(each.wall_s):.1f}"
            print(f"| {each.way} | {each.microbatches} | {step} | {work} | {idle:.0%} | {boss} |")


def show_aims(run: Staffed, counts: list[int]) -> None:
    print("\n### Aims, as ratios of time\n")
    print("| | aim | limit | this run | |\n|---|---|---|---|---|")
    aims = [(run.of(BOSS), run.of(LOCAL), 1.03, "at most 1.03 × the time of local")]
    aims += [
        (run.of(BOSS, count), run.of(way, count), 1.10, f"within 10 % of {way}, as many")
        for count in counts
        for way in RANKS
    ]
    for own, rival, most, words in aims:
        found = statistics.median(ratios(own, rival))
        verdict = "reached" if found <= most else "missed"
        print(
            f"| {own.way}, micro-batches: {own.microbatches} | {words} | {most:.2f} "
            f"| {found:.3f} | {verdict} |"
        )


def show_growth(counts: list[int], options: list[str]) -> None:
    """One after the other: all at once they would not fit."""
    print("\n### Many workers, each with one Linear(8, 8); of a step, in ms\n")
    print(
        "| workers | local | boss | CPU time of the boss | for each worker | CPU time of a worker "
        "| boss.train_step | CPU time of the boss | s to join | to leave |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for count in counts:
        run = race([], [*options, "--net", "chain", "--workers", str(count)])
        plain, train_step = run.of(BOSS), run.of(TRAIN_STEP)
        own, own_1f1b = (each.ms_a_step(each.cpu_s) for each in (plain, train_step))
        worker = plain.ms_a_step(plain.workers_cpu_s) / count
        print(
            f"| {count} | {run.of(LOCAL).ms:.2f} | {plain.ms:.1f} | {own:.2f} | {own / count:.2f} "
            f"| {worker:.2f} | {train_step.ms:.1f} | {own_1f1b:.2f} "
            f"| {run.join_s:.0f} | {run.leave_s:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=3, help="in a turn")
    parser.add_argument("--microbatches", default="4,8", help="numbers to be tried")
    parser.add_argument("--cut", help="where stage 1 begins, instead of automatic cuts")
    parser.add_argument(
        "--workers", default="2,4,8,16,32", help="numbers to be tried, of tiny stages"
    )
    parser.add_argument("--tiny-rounds", type=int, default=10, help="turns, with many workers")
    parser.add_argument("--tiny-steps", type=int, default=20, help="in a turn, with many workers")
    parser.add_argument("--only", choices=["race", "growth"])
    args = parser.parse_args()
    with described():
        if args.only != "growth":
            options = ["--rounds", str(max(2, args.rounds)), "--steps", str(args.steps)]
            options += ["--microbatches", args.microbatches]
            options += [] if args.cut is None else ["--cut", args.cut]
            run = race(["-m", "shoal", "run", "--workers", "2", "--threads", "1"], options)
            counts = [int(count) for count in args.microbatches.split(",")]
            show_times(run, counts)
            show_work(run)
            show_aims(run, counts)
        if args.only != "race":
            tiny = ["--rounds", str(args.tiny_rounds), "--steps", str(args.tiny_steps)]
            tiny += ["--batch-size", str(TINY_BATCH)]
            show_growth([int(count) for count in args.workers.split(",")], tiny)


if __name__ == "__main__":
    main()
