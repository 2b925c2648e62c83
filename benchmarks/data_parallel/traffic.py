"""How many bytes a step of a sync puts on the network, by the kernel's own count.

    shoal run --workers 3 benchmarks/data_parallel/traffic.py ring

Run inside a network namespace with nothing else in it (run.py does that), the counter of the
loopback interface counts this crew alone: payload plus the headers of TCP/IP.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import shoal

COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")
STEPS = 20


def main(sync: str) -> None:
    with shoal.join() as crew:
        model = crew.replicate(nn.Linear(1024, 800, bias=False), sync=sync)
        size = 1024 * 800 * 4
        x = torch.ones(1, 1024)
        model(x).sum().backward()
        crew.barrier()
        counted, before = model.bytes_sent, int(COUNTER.read_text())
        for _ in range(STEPS):
            model(x).sum().backward()
        crew.barrier()
        wire = int(COUNTER.read_text()) - before
        crew.print(
            json.dumps(
                {
                    "size": size,
                    "counted": (model.bytes_sent - counted) / STEPS,
                    "wire": wire / STEPS / crew.size,
                }
            )
        )


main(sys.argv[1])
