"""Launching, measured: from Enter to the first training step, beside torchrun.

    .venv/bin/python benchmarks/launch/run.py            # or: make bench

The same script (first_step.py) is started by each in turn, and results are ratios: the machine may
be busy, but it is busy for all. On three hosts, which are network namespaces with an sshd each
(tests/lab; needs root), torchrun is started on every host at the same moment, as by a person with
three terminals and fast fingers; shoal on one. Prints the tables of README.md in this folder.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "lab")]
SCRIPT = str(HERE / "first_step.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SHOAL = [sys.executable, "-m", "shoal"]
LIMIT_S = 120.0
Launch = Callable[[], list[list[str]]]
"""Commands, all of them to be started at once. The first one's output tells the time."""


def seconds_to_first_step(commands: list[list[str]], folder: Path) -> float:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begun = time.time()
    started = [
        subprocess.Popen(
            argv, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL, text=True,
        )
        for argv in commands
    ]  # fmt: skip
    said = [process.communicate(timeout=LIMIT_S) for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"{commands[0]}: {said}")
    match = re.search(r"first step at ([\d.]+)", "".join(out for out, _ in said))
    assert match, said
    return float(match.group(1)) - begun


def race(ways: dict[str, Launch], rounds: int, folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(-1, rounds):  # the first one does not count: files come into memory
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = seconds_to_first_step(ways[name](), folder)
            if number >= 0:
                found[name].append(seconds)
    return found


def show(title: str, found: dict[str, list[float]], rival: str) -> None:
    print(f"\n## {title}\n\n| | seconds to the first step | × torchrun, median (quartiles) |")
    print("|---|---|---|")
    for name, times in found.items():
        ratios = [own / its for own, its in zip(times, found[rival], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        print(
            f"| {name} | {statistics.median(times):.2f} | {median:.2f} ({low:.2f}–{high:.2f}) |",
            flush=True,
        )


def local(ranks: int) -> dict[str, Launch]:
    return {
        "torchrun": lambda: [[*TORCHRUN, f"--nproc-per-node={ranks}", SCRIPT]],
        "shoal run": lambda: [[*SHOAL, "run", "--workers", str(ranks), "--threads", "1", SCRIPT]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds: at least 2, since quartiles are shown")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "project").mkdir()
        show("4 ranks on this host", race(local(4), args.rounds, folder / "project"), "torchrun")
        from ssh_hosts import ssh_lab, why_not

        if reason := why_not():
            print(f"\nNo hosts: {reason}.")
            return
        with ssh_lab(folder / "lab", ("laptop", "desktop", "server")) as lab:
            names = [host.name for host in lab.hosts]
            first = lab.hosts[0].address
            project = folder / "project"
            (project / "first_step.py").write_text(Path(SCRIPT).read_text())

            def by_torchrun() -> list[list[str]]:
                words = [f"--nnodes={len(names)}", f"--master-addr={first}", "--master-port=23456"]
                return [
                    lab.command(host, *TORCHRUN, *words, f"--node-rank={number}", "first_step.py")
                    for number, host in enumerate(names)
                ]

            def by_shoal() -> list[list[str]]:
                words = ["run", "--hosts", ",".join(names), "--threads", "1", "first_step.py"]
                return [lab.command(names[0], *SHOAL, *words)]

            ways = {"torchrun": by_torchrun, "shoal run --hosts": by_shoal}
            found = race(ways, args.rounds, project)
            show("3 hosts, from one by ssh; torchrun by hand on each", found, "torchrun")


if __name__ == "__main__":
    main()
