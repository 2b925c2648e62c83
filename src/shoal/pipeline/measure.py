"""What a cut costs besides computing: the link between stages, and the memory of their hosts."""

from __future__ import annotations

import time

import psutil
import torch

from shoal.crew import Crew
from shoal.layout import Layout
from shoal.pipeline.partition import SMALLEST_SLACK, Costs
from shoal.wire.link import Link

LARGE_BYTES = 1 << 20
REPEATS, MOST_REPEATS = 4, 40
ENOUGH_S = 0.1
"""Where it is fast, more repeats are made: one moment's disturbance must not decide on cuts."""
SLACK_IN_TURNS = 1.0
MEMORY_SHARE = 0.75
"""The part of free memory that tensors may take: the C library holds more than is in use."""


def measure_costs(crew: Crew, link: Link, layout: Layout, *, in_turns: bool) -> Costs:
    """Every rank must call this; what rank 0 returns is of use.

    in_turns: only one stage works at a time, so that transfers matter more than balance.
    """
    limits = crew.exchange("free memory", _free_bytes(crew))
    per_message = per_byte = 0.0
    is_lent = False
    if crew.rank in (0, 1) and layout.stages > 1:
        small = _round_trip_s(crew.rank, link, 1)
        large = _round_trip_s(crew.rank, link, LARGE_BYTES)
        per_message = small / 2
        per_byte = max(large - small, 0.0) / 2 / LARGE_BYTES
        is_lent = link.lends_to(1 - crew.rank)
    return Costs(
        seconds_per_byte=per_byte,
        seconds_per_message=per_message,
        # Where memory is lent, only the receiver copies, when it has nothing else to do.
        copying_s_per_byte=0.0 if is_lent else Costs.copying_s_per_byte,
        memory_bytes=[
            min(limits[rank] for rank in layout.ranks_of_stage(stage))
            for stage in range(layout.stages)
        ],
        slack=SLACK_IN_TURNS if in_turns else SMALLEST_SLACK,
    )


def _round_trip_s(rank: int, link: Link, size_bytes: int) -> float:
    """The fastest of a few; between ranks 0 and 1."""
    content = torch.zeros(size_bytes, dtype=torch.uint8)
    fastest, total, number = float("inf"), 0.0, 0
    is_last = False
    while not is_last:
        begun = time.perf_counter()
        number += 1
        if rank == 0:
            is_last = number >= (MOST_REPEATS if total < ENOUGH_S else REPEATS)
            link.isend([content, is_last], 1, "measure", lend=True).wait()
            link.recv(1, "measure")
        else:
            came = link.recv(0, "measure")
            is_last = came[1]
            link.isend(came, 0, "measure", lend=True).wait()
        took = time.perf_counter() - begun
        fastest, total = min(fastest, took), total + took
    return fastest


def _free_bytes(crew: Crew) -> int:
    """What this rank may use, of what its host has free and its neighbours want too."""
    if crew.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(crew.device)
        return int(free * MEMORY_SHARE)
    return int(psutil.virtual_memory().available * MEMORY_SHARE) // crew.num_here
