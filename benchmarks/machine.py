"""What a benchmark says of the machine that it ran on, and of who else used it meanwhile."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def described() -> Iterator[None]:
    """Before: what machine it is. After: how much of it was busy with what is not ours."""
    cores = os.cpu_count() or 1
    print(f"{platform.processor() or platform.machine()}, {cores} cores, {sys.platform}")
    before, begun = _busy_elsewhere_s(), time.monotonic()
    yield
    others = (_busy_elsewhere_s() - before) / (time.monotonic() - begun) / cores
    print(f"\nMeanwhile, other work took {max(0.0, others):.0%} of this machine.")


def _busy_elsewhere_s() -> float:
    times = psutil.cpu_times()
    ours = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(use.ru_utime + use.ru_stime for use in ours)
    return float(sum(times) - times.guest - times.guest_nice - times.idle - times.iowait - own)
