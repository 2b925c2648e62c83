"""A script of six ranks, for test_wire_peers.py: two witnesses, and four that meet a fate.

ranks 0, 1       say what became of the others, as seen over a link, and go on talking
ranks 2 to 5     leave, raise, are killed, freeze
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch

import shoal
from shoal.wire.link import Link

FATES = {2: "leaves", 3: "raises", 4: "is killed", 5: "freezes"}
HUNG_S = 2.0
LARGE = torch.arange(16 * 2**20, dtype=torch.float32)  # 64 MiB
LIMIT_S = 60.0
NOTE = Path(sys.argv[-1])


def meet_fate(crew: shoal.JoinedCrew, links: list[Link]) -> None:
    for link in links:
        for witness in (0, 1):
            link.recv(witness)  # until both have seen us alive
    match FATES[crew.rank]:
        case "leaves":
            for link in links:
                link.close()
            NOTE.touch()
        case "raises":
            raise ValueError("a fate")
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freezes":
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(10 * LIMIT_S)  # whoever is still here waits to be ended


def bear_witness(crew: shoal.JoinedCrew, links: list[Link]) -> None:
    other = 1 - crew.rank
    for victim in FATES:
        for link in links:
            link.send("go", to=victim)
    for victim, fate in FATES.items():
        wait_for_fate(crew.roster[victim].pid, fate)
        seen = {"fate": fate, "while sending": "", "while receiving": ""}
        begun = time.monotonic()
        sending = None
        try:
            sending = links[1].isend(LARGE, to=victim)
        except shoal.PeerLost as lost:
            seen["while sending"] = str(lost)
        try:
            links[0].recv(victim)
        except shoal.PeerLost as lost:
            seen["while receiving"] = str(lost)
        try:
            if sending is not None:
                sending.wait()
        except shoal.PeerLost as lost:
            seen["while sending"] = str(lost)
        seen["seconds"] = time.monotonic() - begun
        for link in links:
            sending = link.isend([LARGE, "we go on"], to=other)
            tensor, words = link.recv(other)
            sending.wait()
            assert torch.equal(tensor, LARGE)
            assert words == "we go on"
        print(json.dumps({"rank": crew.rank, **seen}), flush=True)
    raise shoal.PeerLost("all that was to be seen has been seen")


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
        made = [joined.link(sys.argv[1], hung_s=HUNG_S, timeout_s=LIMIT_S) for _ in range(2)]
        (bear_witness if joined.rank < 2 else meet_fate)(joined, made)
