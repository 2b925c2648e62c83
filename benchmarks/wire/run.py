"""Links, measured: round trips between two processes against bare pyzmq and bare gloo.

    .venv/bin/python benchmarks/wire/run.py            # or: make bench

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
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from machine import described  # noqa: E402

ZMQ, GLOO = "raw pyzmq", "raw gloo"
PAIRS = 10

Seconds = dict[str, list[float]]
"""Of a round trip, by contestant, in each round."""


class Size(NamedTuple):
    shape: str
    trips: int
    """In a turn: as many as make a turn of some milliseconds."""
    rounds: float = 1.0
    """Of those asked for: large tensors take long, and vary less."""


SIZES = {
    "4KiB": Size("1024", trips=100),
    "576KiB": Size("128,128,3,3", trips=20),
    "16MiB": Size("2048,2048", trips=2),
    "64MiB": Size("4096,4096", trips=1, rounds=0.5),
}


class Aim(NamedTuple):
    size: str
    contestant: str
    rival: str
    most: float
    """Its time over its rival's, for the same number of trips."""
    words: str


AIMS = [
    Aim("4KiB", "link zmq", ZMQ, 1.5, "at most 1.5 × the time of raw pyzmq"),
    Aim("576KiB", "link zmq", ZMQ, 1.2, "at most 1.2 × the time of raw pyzmq"),
    Aim("576KiB", "link zmq", GLOO, 1.0, "faster than raw gloo"),
    Aim("64MiB", "link zmq", GLOO, 1 / 0.9, "at least 0.9 × the throughput of raw gloo"),
    Aim(
        "64MiB", "link zmq, sent, into=", GLOO, 1 / 0.9, "at least 0.9 × the throughput of raw gloo"
    ),
    *(
        Aim(size, contestant, GLOO, 1.1, "within 10 % of raw gloo")
        for size in ("576KiB", "16MiB", "64MiB")
        for contestant in ("link dist", "link dist into=")
    ),
]


def spoken(size: str) -> str:
    return size.replace("KiB", " KiB").replace("MiB", " MiB")


def race(size: Size, rounds: int) -> Seconds:
    """In several pairs of processes: where memory lies in one makes it fast or slow for good."""
    seconds: Seconds = {}
    for _ in range(PAIRS):
        options = ["--shape", size.shape, "--trips", str(size.trips)]
        options += ["--rounds", str(max(2, rounds // PAIRS))]
        argv = [sys.executable, "-m", "shoal", "run", "--workers", "2", "--threads", "1"]
        argv += [str(HERE / "race.py"), *options]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=1200, check=True)
        for name, times in json.loads(done.stdout[done.stdout.index("{") :])["seconds"].items():
            seconds.setdefault(name, []).extend(times)
    return seconds


def ratios(seconds: Seconds, contestant: str, rival: str) -> list[float]:
    return [own / its for own, its in zip(seconds[contestant], seconds[rival], strict=True)]


def in_all(seconds: Seconds, contestant: str, rival: str) -> float:
    """Of all rounds together: what counts where a rival is now fast and now slow."""
    return sum(seconds[contestant]) / sum(seconds[rival])


def compared(seconds: Seconds, contestant: str, rival: str) -> str:
    quarters = statistics.quantiles(ratios(seconds, contestant, rival), n=4)
    median = f"{quarters[1]:.2f} ({quarters[0]:.2f}–{quarters[2]:.2f})"
    return f"{in_all(seconds, contestant, rival):.2f}; {median}"


def show(name: str, seconds: Seconds) -> None:
    shape = SIZES[name].shape.replace(",", ", ")
    print(f"\n### {spoken(name)}: float32 ({shape}); time relative to the bare ones\n")
    print("| | ms a round trip | × raw pyzmq: in all; median (quartiles) | × raw gloo |")
    print("|---|---|---|---|")
    for contestant, times in seconds.items():
        by_zmq, by_gloo = (compared(seconds, contestant, rival) for rival in (ZMQ, GLOO))
        print(f"| {contestant} | {1000 * statistics.median(times):.3g} | {by_zmq} | {by_gloo} |")


def show_aims(results: dict[str, Seconds]) -> None:
    print("\n### Aims, as ratios of time\n")
    print("| | aim | limit | in all | | median of rounds |\n|---|---|---|---|---|---|")
    for aim in AIMS:
        if aim.size in results:
            of = results[aim.size], aim.contestant, aim.rival
            verdict = "reached" if in_all(*of) <= aim.most else "missed"
            print(
                f"| {spoken(aim.size)}, {aim.contestant} | {aim.words} | {aim.most:.2f} "
                f"| {in_all(*of):.2f} | {verdict} | {statistics.median(ratios(*of)):.2f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="turns of each contestant")
    parser.add_argument("--only", choices=list(SIZES), help="one size")
    args = parser.parse_args()
    with described():
        results: dict[str, Seconds] = {}
        for name, size in SIZES.items():
            if args.only in (None, name):
                results[name] = race(size, max(4, int(size.rounds * args.rounds)))
                show(name, results[name])
        show_aims(results)


if __name__ == "__main__":
    main()
