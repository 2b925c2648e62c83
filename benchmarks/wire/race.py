"""Links against bare pyzmq and bare gloo, taking turns inside the same two processes.

    shoal run --workers 2 --threads 1 benchmarks/wire/race.py --shape 128,128,3,3 --trips 20

A trip is a float32 tensor of rank 0's that goes to rank 1 and comes back. In every round each
contestant makes `--trips` of them after one that does not count, in an order that rotates, so that
a busy moment of the machine hits all of them alike. Rank 0 prints one JSON object: seconds of a
trip, of each contestant in each round.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import zmq

import shoal
from shoal.wire.dist_link import DistLink
from shoal.wire.keys import AuthorizedKeys, new_pair
from shoal.wire.link import Link
from shoal.wire.zmq_gate import Keys
from shoal.wire.zmq_link import Card, ZmqLink

COPY_BYTES = 64 * 1024
"""Bare pyzmq copies what is smaller, as the link does: that costs less than not to copy."""


class Contestant(ABC):
    """A way for a tensor to the other rank."""

    @abstractmethod
    def send(self, x: torch.Tensor) -> None: ...

    @abstractmethod
    def recv(self) -> torch.Tensor: ...


class RawZmq(Contestant):
    """One connection, one frame, no header: both sides know the shape."""

    def __init__(self, crew: shoal.JoinedCrew, shape: list[int], stack: ExitStack) -> None:
        self._shape = shape
        self._copy = 4 * math.prod(shape) < COPY_BYTES
        self._socket = stack.enter_context(zmq.Context()).socket(zmq.PAIR)
        stack.enter_context(self._socket)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1") if crew.rank == 0 else 0
        port = crew.exchange("port", port)[0]
        if crew.rank != 0:
            self._socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, x: torch.Tensor) -> None:
        self._socket.send(x.numpy(), copy=self._copy)

    def recv(self) -> torch.Tensor:
        frame = self._socket.recv(copy=False)
        return torch.frombuffer(frame, dtype=torch.float32).view(self._shape)


class RawGloo(Contestant):
    """Into a tensor that is there already, on the crew's own group."""

    def __init__(self, crew: shoal.JoinedCrew, shape: list[int]) -> None:
        self._other = 1 - crew.rank
        self._room = torch.empty(shape)

    def send(self, x: torch.Tensor) -> None:
        dist.send(x, self._other)

    def recv(self) -> torch.Tensor:
        dist.recv(self._room, self._other)
        return self._room


class ByLink(Contestant):
    """A dict with the tensor in it, of which the other side knows nothing beforehand."""

    def __init__(self, link: Link, room: torch.Tensor | None = None) -> None:
        self._link = link
        self._other = 1 - link.rank
        self._into = None if room is None else {"x": room}

    def send(self, x: torch.Tensor) -> None:
        self._link.send({"x": x}, to=self._other)

    def recv(self) -> torch.Tensor:
        return self._link.recv(self._other, into=self._into)["x"]


def link_that_sends(crew: shoal.JoinedCrew, stack: ExitStack, keys: Keys | None = None) -> Link:
    """As between two machines: no rank can read another's memory."""
    link = ZmqLink(crew.rank, crew.size, keys=keys)
    stack.callback(link.close)
    card = msgspec.structs.replace(link.card, lender=None)
    link.connect([msgspec.convert(each, Card) for each in crew.exchange("cards", card)])
    link.settle()
    return link


def dist_link_that_sends(crew: shoal.JoinedCrew, stack: ExitStack) -> Link:
    """The same over dist."""
    link = DistLink(crew.rank, crew.size, lends=False)
    stack.callback(link.close)
    link.join(crew.store_for("race"), "127.0.0.1")
    return link


def keys_of(crew: shoal.JoinedCrew, stack: ExitStack) -> Keys:
    """Every rank is known to every other."""
    pair = new_pair()
    welcome = Path(stack.enter_context(tempfile.TemporaryDirectory()), "authorized_keys")
    publics = crew.exchange("keys", pair.public)
    welcome.write_text("".join(f"{key} rank-{rank}\n" for rank, key in enumerate(publics)))
    return Keys(pair, AuthorizedKeys(welcome))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="128,128,3,3")
    parser.add_argument("--trips", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", action="append", help="a contestant; may be given again")
    args = parser.parse_args()
    shape = [int(extent) for extent in args.shape.split(",")]

    with shoal.join() as crew, ExitStack() as stack:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        by_zmq, by_dist = crew.link("zmq"), crew.link("dist")
        sent = link_that_sends(crew, stack)
        dist_sent = dist_link_that_sends(crew, stack)
        encrypted = link_that_sends(crew, stack, keys_of(crew, stack))
        contestants = {
            "raw pyzmq": RawZmq(crew, shape, stack),
            "raw gloo": RawGloo(crew, shape),
            "link zmq": ByLink(by_zmq),
            "link zmq into=": ByLink(by_zmq, torch.empty(shape)),
            "link zmq, sent": ByLink(sent),
            "link zmq, sent, into=": ByLink(sent, torch.empty(shape)),
            "link zmq + CURVE": ByLink(encrypted),
            "link dist": ByLink(by_dist),
            "link dist into=": ByLink(by_dist, torch.empty(shape)),
            "link dist, sent": ByLink(dist_sent),
            "link dist, sent, into=": ByLink(dist_sent, torch.empty(shape)),
        }

        if args.only:
            contestants = {name: contestants[name] for name in args.only}

        def trip(way: Contestant) -> torch.Tensor:
            if crew.rank == 0:
                way.send(x)
                return way.recv()
            back = way.recv()
            way.send(back)
            return back

        for name, way in contestants.items():  # warm up: connections, memory
            for _ in range(3):
                assert torch.equal(trip(way), x), name

        names = list(contestants)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(args.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                way = contestants[name]
                crew.barrier()
                trip(way)  # does not count: who was before is out of the caches now
                begun = time.perf_counter()
                for _ in range(args.trips):
                    trip(way)
                seconds[name].append(round((time.perf_counter() - begun) / args.trips, 8))
        crew.print(json.dumps({"shape": shape, "trips": args.trips, "seconds": seconds}))


main()
