"""Two ranks talk, first blocking, then not; neither knows beforehand what will come.

shoal run --workers 2 examples/point_to_point.py      # two ranks of this machine

# two machines, one line on each
python examples/point_to_point.py --init tcp://192.168.0.1:23456 --rank 0 --world-size 2
python examples/point_to_point.py --init tcp://192.168.0.1:23456 --rank 1 --world-size 2

# but first, once, on both machines (or --insecure above, on a network that you trust):
shoal keygen                                          # prints a public line, for the other machine
echo 'THE LINE OF THE OTHER' >> ~/.config/shoal/authorized_keys
chmod go-w ~/.config/shoal/authorized_keys
"""

import argparse
import socket
import sys
import time
from collections.abc import Callable

import torch

import shoal

parser = argparse.ArgumentParser(description="Two ranks talk, blocking and non-blocking.")
parser.add_argument("--init")
parser.add_argument("--rank", type=int)
parser.add_argument("--world-size", type=int)
parser.add_argument("--transport", choices=["zmq", "dist"], default="zmq")
parser.add_argument("--insecure", action="store_true", help="zmq between machines, without keys")
args = parser.parse_args()


def since(begun: float) -> str:
    return f"{1000 * (time.perf_counter() - begun):.1f} ms"


def compute_until(done: Callable[[], bool]) -> int:
    """Steps of something else that were computed meanwhile."""
    a, count = torch.randn(1000), 0
    while not done():
        a, count = torch.tanh(a), count + 1
    return count


with shoal.join(args.init, rank=args.rank, world_size=args.world_size) as crew:
    if crew.size != 2:
        sys.exit(f"Two ranks talk here, not {crew.size}: shoal run --workers 2 {sys.argv[0]}")
    link = crew.link(args.transport, insecure=args.insecure)

    # Blocking. recv is told neither a shape nor a dtype, nor that it is a dict that comes. It waits
    # at most for its timeout_s, and Ctrl-C ends it, whether or not the other rank is there.
    crew.print(f"1. blocking, over {args.transport}")
    crew.barrier()
    begun = time.perf_counter()
    if crew.rank == 0:
        time.sleep(0.2)  # rank 1 can only wait for this
        message = {"x": torch.randn(128, 128, 3, 3), "step": 7, "from": socket.gethostname()}
        begun = time.perf_counter()
        link.send(message, to=1)
        print(f"send came back after {since(begun)}: x may be changed again")
        reply = link.recv(source=1)
        print(f"the reply was here after {since(begun)}: {reply}")
    else:
        message = link.recv(source=0, timeout_s=60)
        what = f"x {tuple(message['x'].shape)}, step {message['step']}, from {message['from']}"
        print(f"recv came back after {since(begun)} with {what}")
        link.send({"mean": message["x"].mean(), "next step": message["step"] + 1}, to=0)

    # Non-blocking. Both calls come back at once, with a job: done() asks, wait() waits.
    crew.barrier()
    crew.print("2. non-blocking, 64 MiB")
    crew.barrier()
    begun = time.perf_counter()
    if crew.rank == 0:
        message = {"weights": torch.randn(4096, 4096), "epoch": 3}  # takes a while to make
        begun = time.perf_counter()
        job = link.isend(message, to=1)
        print(f"isend came back after {since(begun)}: the weights must stay as they are for now")
        count = compute_until(job.done)
        job.wait()  # at once, as the job is done; raises if rank 1 was lost
        print(f"they had left after {since(begun)}, and {count:,} steps were computed meanwhile")
    else:
        job = link.irecv(source=0)
        print(f"irecv came back after {since(begun)}, with nothing yet")
        count = compute_until(job.done)
        weights = job.wait()["weights"]
        print(f"{weights.nbytes:,} bytes were here after {since(begun)}, {count:,} steps meanwhile")
