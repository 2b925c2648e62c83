"""Pipelines, measured: a net over two processes against one, and against torch's own 1F1B.

    .venv/bin/python benchmarks/pipeline/run.py            # or: make bench

What is compared takes turns within one run, and results are ratios: the machine may be busy, but
it is busy for all. Prints the tables of README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from machine import described  # noqa: E402

LOCAL, TORCH = "local", "torch 1F1B"
NUM_STAGES = 2


class Result(NamedTuple):
    """What race.py says of a contestant."""

    way: str
    microbatches: int
    cut: str | None
    loss: float
    seconds: list[float]
    """Of a step, in each round."""
    work_s: list[float]
    """By rank: forward, backward and update, as its timeline has them. Zero: it has none."""
    wall_s: list[float]
    """By rank: in which that work was done."""

    @property
    def is_timed(self) -> bool:
        return min(self.work_s) > 0

    @property
    def idle_shares(self) -> list[float]:
        return [1 - work / wall for work, wall in zip(self.work_s, self.wall_s, strict=True)]


class Aim(NamedTuple):
    way: str
    """Or how it begins: then the best of those."""
    rival: str
    most: float
    """The median of its time over its rival's, both with their best number of micro-batches."""
    words: str


AIMS = [
    Aim("sequential zmq", LOCAL, 1.02, "at most 1.02 × the time of local"),
    Aim("sequential dist", LOCAL, 1.02, "at most 1.02 × the time of local"),
    Aim("1f1b", LOCAL, 0.62, "at most 0.62 × the time of local"),
    Aim("1f1b", TORCH, 1.0, "faster than torch's 1F1B"),
]


def race(options: list[str]) -> list[Result]:
    argv = [sys.executable, "-m", "shoal", "run", "--workers", str(NUM_STAGES), "--threads", "1"]
    argv += [str(HERE / "race.py"), *options]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=3600, check=True)
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return [Result(**each) for each in found["contestants"]]


def ratios(own: Result, rival: Result) -> list[float]:
    return [a / b for a, b in zip(own.seconds, rival.seconds, strict=True)]


def best(results: list[Result], way: str) -> Result:
    """The number of micro-batches (and the transport, where `way` leaves it open) that is best."""
    local = results[0]
    fitting = [each for each in results if each.way.startswith(way)]
    return min(fitting, key=lambda each: statistics.median(ratios(each, local)))


def spread(values: list[float]) -> str:
    quarters = statistics.quantiles(values, n=4)
    return f"{statistics.median(values):.3f} ({quarters[0]:.3f}–{quarters[2]:.3f})"


def show_cuts(results: list[Result]) -> None:
    print("\n### Cuts: what stage 1 begins with, and each stage's share of the work\n")
    print("| stage 1 begins with | contestants | work of stage 0 | of stage 1 |")
    print("|---|---|---|---|")
    for cut in dict.fromkeys(each.cut for each in results if each.cut):
        named = [each for each in results if each.cut == cut]
        timed = [each for each in named if each.is_timed]
        share = statistics.median(each.work_s[0] / sum(each.work_s) for each in timed)
        ways: dict[str, list[int]] = {}
        for each in named:
            ways.setdefault(each.way, []).append(each.microbatches)
        words = "; ".join(f"{way} ({', '.join(map(str, ms))})" for way, ms in ways.items())
        print(f"| `{cut}` | {words} | {share:.0%} | {1 - share:.0%} |")


def show_times(results: list[Result]) -> None:
    print("\n### Time of a step, relative to local; the best of each way in bold\n")
    print("| | micro-batches | ms a step | × local, median (quartiles) |\n|---|---|---|---|")
    for way in dict.fromkeys(each.way for each in results):
        for each in results:
            if each.way == way:
                mark = "**" if way != LOCAL and each is best(results, way) else ""
                relative = spread(ratios(each, results[0])) if way != LOCAL else "1.000"
                ms = 1000 * statistics.median(each.seconds)
                print(f"| {way} | {each.microbatches} | {ms:.1f} | {mark}{relative}{mark} |")


def show_idle(results: list[Result]) -> None:
    print("\n### Idle share, from the timeline, beside the formula (p-1)/(m+p-1)\n")
    print("| | micro-batches | formula | both ranks | rank 0 | rank 1 |\n|---|---|---|---|---|---|")
    for each in sorted(results, key=lambda each: each.microbatches):
        if each.is_timed:
            bubble = (NUM_STAGES - 1) / (each.microbatches + NUM_STAGES - 1)
            shares = [statistics.mean(each.idle_shares), *each.idle_shares]
            cells = " | ".join(f"{share:.0%}" for share in shares)
            print(f"| {each.way} | {each.microbatches} | {bubble:.0%} | {cells} |")


def show_aims(results: list[Result]) -> None:
    print("\n### Aims, as ratios of time\n")
    print("| | aim | limit | this run | |\n|---|---|---|---|---|")
    for aim in AIMS:
        own, rival = best(results, aim.way), best(results, aim.rival)
        found = statistics.median(ratios(own, rival))
        verdict = "reached" if found <= aim.most else "missed"
        who = own.way if own.microbatches == 1 else f"{own.way}, {own.microbatches} micro-batches"
        against = f" (its {rival.microbatches})" if rival.microbatches > 1 else ""
        print(f"| {who} | {aim.words}{against} | {aim.most:.2f} | {found:.3f} | {verdict} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=3, help="in a turn")
    parser.add_argument("--microbatches", default="2,3,4,8", help="numbers to be tried")
    parser.add_argument("--cut", help="where stage 1 begins, instead of automatic cuts")
    args = parser.parse_args()
    with described():
        options = ["--rounds", str(max(2, args.rounds)), "--steps", str(args.steps)]
        options += ["--microbatches", args.microbatches]
        results = race(options if args.cut is None else [*options, "--cut", args.cut])
        show_cuts(results)
        show_times(results)
        show_idle(results)
        show_aims(results)


if __name__ == "__main__":
    main()
