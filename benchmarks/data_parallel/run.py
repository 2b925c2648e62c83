"""Data parallel, measured: speed against torch's DDP and a bare loop, traffic, import time.

    .venv/bin/python benchmarks/data_parallel/run.py            # or: make bench

What is compared takes turns within one run, and results are ratios: the machine may be busy, but
it is busy for all. Prints the tables of README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
NAMESPACE = f"shoal-bench-{os.getpid()}"


def json_from(argv: Sequence[str]) -> dict:
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=1200, check=True)
    return json.loads(done.stdout[done.stdout.index("{") :])


def shoal_run(workers: int, *script: str, prefix: Sequence[str] = ()) -> dict:
    options = ["--workers", str(workers), "--threads", "1"]
    return json_from([*prefix, sys.executable, "-m", "shoal", "run", *options, *script])


def spread(ratios: list[float]) -> str:
    quarters = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):.3f} ({quarters[0]:.3f}–{quarters[2]:.3f})"


def speed(rounds: int, steps: int) -> None:
    print("\n### 2 processes of 1 thread, global batch 128; speed relative to torch's DDP\n")
    script = [str(HERE / "race.py"), "--rounds", str(rounds), "--steps", str(steps)]
    result = shoal_run(2, *script)
    seconds = result["seconds"]
    print("| | ms a step | × DDP, median (quartiles) |\n|---|---|---|")
    for name, times in seconds.items():
        ratios = [ddp / own for ddp, own in zip(seconds["torch DDP"], times, strict=True)]
        print(f"| {name} | {1000 * statistics.median(times) / steps:.1f} | {spread(ratios)} |")


def alone(rounds: int, steps: int) -> None:
    print("\n### 1 process of 1 thread, batch 128; time relative to a bare loop\n")
    argv = [sys.executable, str(HERE / "solo.py"), "--rounds", str(rounds), "--steps", str(steps)]
    seconds = json_from(argv)["seconds"]
    print("| | ms a step | × bare loop, median (quartiles) |\n|---|---|---|")
    for name, times in seconds.items():
        ratios = [own / bare for bare, own in zip(seconds["bare loop"], times, strict=True)]
        print(f"| {name} | {1000 * statistics.median(times) / steps:.1f} | {spread(ratios)} |")


def traffic() -> None:
    print("\n### Bytes a rank sends in a step, in units of the gradient's size S\n")
    if os.geteuid() != 0 or not shutil.which("ip"):
        print("(needs root and `ip`: the kernel's counter is read in a namespace of its own)")
        return
    inside = ["ip", "netns", "exec", NAMESPACE]
    subprocess.run(["ip", "netns", "add", NAMESPACE], check=True)
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        print("| sync | N | 2(N-1)/N | counted by shoal | on the wire, headers and all |")
        print("|---|---|---|---|---|")
        for sync in ("ring", "all-reduce"):
            for n in (2, 3, 4):
                result = shoal_run(n, str(HERE / "traffic.py"), sync, prefix=inside)
                size = result["size"]
                print(
                    f"| {sync} | {n} | {2 * (n - 1) / n:.3f} | {result['counted'] / size:.3f} "
                    f"| {result['wire'] / size:.3f} |"
                )
    finally:
        subprocess.run(["ip", "netns", "delete", NAMESPACE], check=True)


def imports(rounds: int) -> None:
    print("\n### Seconds to import\n")
    code = {
        "import torch": "import torch",
        "import torch, shoal": "import torch, shoal",
        "import torch; shoal.join": "import torch, shoal; shoal.join",
        "the launcher (no torch)": "import shoal.cli.main",
    }
    seconds: dict[str, list[float]] = {name: [] for name in code}
    for _ in range(rounds):
        for name, line in code.items():
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-c", line], check=True)
            seconds[name].append(time.perf_counter() - begun)
    print("| | median |\n|---|---|")
    for name, times in seconds.items():
        print(f"| `{name}` | {statistics.median(times):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=1, help="steps in a turn")
    parser.add_argument("--only", choices=["speed", "alone", "traffic", "imports"])
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {sys.platform}")
    wanted = {
        "speed": lambda: speed(args.rounds, args.steps),
        "alone": lambda: alone(max(8, args.rounds // 10), 10 * args.steps),
        "traffic": traffic,
        "imports": lambda: imports(7),
    }
    for name, run in wanted.items():
        if args.only in (None, name):
            run()


if __name__ == "__main__":
    main()
