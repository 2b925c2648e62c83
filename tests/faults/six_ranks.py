"""A script of six ranks, for test_wire_peers.py: two witnesses, and four that meet a fate.

ranks 0, 1       say what became of the others, as seen over links, and go on talking
ranks 2 to 5     leave, raise, are killed, freeze

There are two links over each transport: one to receive by, one to send by.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

import shoal
from shoal.wire.link import Job, Link

TRANSPORTS = ("zmq", "dist")
FATES = {2: "leaves", 3: "raises", 4: "is killed", 5: "freezes"}
HUNG_S = 2.0
LARGE = torch.arange(16 * 2**20, dtype=torch.float32)  # 64 MiB
LIMIT_S = 60.0
LINKS = ("shoal-dist", "shoal-gate")
"""Names of threads."""
NOTE = Path(sys.argv[-1])

Links = dict[str, list[Link]]


def meet_fate(crew: shoal.JoinedCrew, links: Links) -> None:
    for link in itertools.chain(*links.values()):
        for witness in (0, 1):
            link.recv(witness)  # until both have seen us alive
    match FATES[crew.rank]:
        case "leaves":
            for link in itertools.chain(*links.values()):
                link.close()
            NOTE.touch()
        case "raises":
            raise ValueError("a fate")
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freezes":
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(10 * LIMIT_S)  # whoever is still here waits to be ended


def bear_witness(crew: shoal.JoinedCrew, links: Links) -> None:
    other = 1 - crew.rank
    for victim in FATES:
        for link in itertools.chain(*links.values()):
            link.send("go", to=victim)
    for victim, fate in FATES.items():
        wait_for_fate(crew.roster[victim].pid, fate)
        # In turns, so that each transport is once the first that is waited for.
        turn = TRANSPORTS if victim % 2 else TRANSPORTS[::-1]
        for seen in what_is_seen(victim, {transport: links[transport] for transport in turn}):
            print(json.dumps({"rank": crew.rank, "fate": fate, **seen}), flush=True)
        for link in itertools.chain(*links.values()):
            sending = link.isend([LARGE, "we go on"], to=other)
            tensor, words = link.recv(other)
            sending.wait()
            assert torch.equal(tensor, LARGE)
            assert words == "we go on"
        print(json.dumps({"rank": crew.rank, "goes on after": fate}), flush=True)
    for link in itertools.chain(*links.values()):
        link.close()
    left = [thread.name for thread in threading.enumerate() if thread.name in LINKS]
    print(json.dumps({"rank": crew.rank, "threads left": left}), flush=True)


def what_is_seen(victim: int, links: Links) -> Iterator[dict[str, str | float]]:
    """Over all transports at once, one result for each."""
    begun = time.monotonic()
    jobs: dict[str, dict[str, Job | shoal.PeerLost]] = {}
    for transport, (receiving, sending) in links.items():
        jobs[transport] = {
            "while sending": begin(functools.partial(sending.isend, LARGE, to=victim)),
            "while receiving": begin(functools.partial(receiving.irecv, victim)),
        }
    for transport, both in jobs.items():
        words = {doing: end(job) for doing, job in both.items()}
        yield {"transport": transport, **words, "seconds": time.monotonic() - begun}


def begin(call: Callable[[], Job]) -> Job | shoal.PeerLost:
    try:
        return call()
    except shoal.PeerLost as lost:
        return lost


def end(job: Job | shoal.PeerLost) -> str:
    """What was said of the one who is lost; nothing, if all went well."""
    if isinstance(job, shoal.PeerLost):
        return str(job)
    try:
        job.wait()
    except shoal.PeerLost as lost:
        return str(lost)
    return ""


def wait_for_fate(pid: int, fate: str) -> None:
    """As seen by the system. Who only leaves stays as a process, and leaves a note."""
    wanted = psutil.STATUS_STOPPED if fate == "freezes" else psutil.STATUS_ZOMBIE
    deadline = time.monotonic() + LIMIT_S
    while not (NOTE.exists() if fate == "leaves" else status(pid) == wanted):
        assert time.monotonic() < deadline, f"{fate}: it is still {status(pid)}"
        time.sleep(0.01)


def status(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_ZOMBIE)


if __name__ == "__main__":
    with shoal.join(timeout_s=LIMIT_S) as joined:
        made = {
            transport: [joined.link(transport, hung_s=HUNG_S, timeout_s=LIMIT_S) for _ in range(2)]
            for transport in TRANSPORTS
        }
        (bear_witness if joined.rank < 2 else meet_fate)(joined, made)
