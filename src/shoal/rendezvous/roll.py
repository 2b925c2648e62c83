"""Calling the roll: everyone says who they are and what they brought; differences are named.

rank r      hello/r  :=  who I am            (compare-and-set: a second rank r is found out)
leader      reads every hello, compares      ── all here ──>  go   := the roster
anyone      finds a fault                    ── at once  ──>  fault := the sentence
everyone    polls go and fault until the deadline
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist

from shoal import network
from shoal.errors import MeetingError
from shoal.rendezvous.store import POLL_S, Notify, close_store
from shoal.rendezvous.ways import Way

LINGER_S = 2.0
"""How long the leader, after a fault, stays, so that the others can read of it."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What every rank must have brought alike."""

    shoal: str
    torch: str = field(default_factory=lambda: str(torch.__version__))
    settings: dict[str, str] = field(default_factory=dict)


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of itself. Another version may say more: its name must still be read."""

    rank: int
    size: int
    host: str
    pid: int
    machine: str
    """Equal for two ranks that share a loopback interface."""
    address: str
    device: str
    shoal: str
    torch: str
    settings: dict[str, str]

    @property
    def who(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


def make_hello(way: Way, address: str, device: str, mine: Fingerprint) -> Hello:
    return Hello(
        rank=way.rank,
        size=way.size,
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        address=address,
        device=device,
        shoal=mine.shoal,
        torch=mine.torch,
        settings=mine.settings,
    )


def _machine() -> str:
    """The boot and the network namespace: what `localhost` means to this process."""
    parts = [platform.node()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        source = Path(path)
        if source.is_symlink():
            parts.append(str(source.readlink()))
        elif source.exists():
            parts.append(source.read_text().strip())
    return "|".join(parts)


def call_roll(
    store: dist.Store, way: Way, hello: Hello, timeout_s: float, notify: Notify
) -> list[Hello]:
    """Everyone's hello, by rank; or a MeetingError that says the same on every rank."""
    roll = _Roll(dist.PrefixStore(f"shoal/{way.attempt}", store), way, hello)
    begun = time.monotonic()
    try:
        roll.enter()
        return roll.wait(begun, timeout_s, notify)
    except KeyboardInterrupt:
        roll.withdraw()
        raise
    except (dist.DistError, FileNotFoundError) as error:
        raise MeetingError(
            f"The leader at {way.place} left while {hello.who} was meeting it. "
            "Its own output says why."
        ) from error
    finally:
        notify("")


def read_hello(said: bytes, rank: int, place: str) -> Hello:
    """Raises MeetingError for what no shoal of this version says."""
    try:
        return msgspec.json.decode(said, type=Hello)
    except msgspec.MsgspecError as error:
        raise MeetingError(
            f"Rank {rank} at {place} speaks another language: {error}. It runs another version of "
            f"shoal, or another program uses {place}. It says: {said[:200]!r}"
        ) from error


def differences(mine: Hello, theirs: Hello) -> list[str]:
    """One sentence for each thing that two ranks must have alike and have not."""
    found = []
    if mine.size != theirs.size:
        found.append(
            f"{mine.who} has --world-size {mine.size}, {theirs.who} has {theirs.size}. "
            "Every rank needs the same."
        )
    for what, ours, other in (
        ("shoal", mine.shoal, theirs.shoal),
        ("torch", mine.torch, theirs.torch),
    ):
        if ours != other:
            found.append(
                f"{mine.who} runs {what} {ours}, {theirs.who} runs {other}. "
                f"Install the same {what} on both."
            )
    for key in sorted(mine.settings.keys() | theirs.settings.keys()):
        ours, other = mine.settings.get(key, "unset"), theirs.settings.get(key, "unset")
        if ours != other:
            option = "--" + key.replace("_", "-")
            found.append(
                f"{mine.who} has {option} {ours}, {theirs.who} has {option} {other}. "
                "Start every rank with the same settings."
            )
    return found


def unreachable(roster: Iterable[Hello]) -> str | None:
    """What is wrong with a crew of several machines of which one offers its loopback address."""
    ranks = sorted(roster, key=lambda hello: hello.rank)
    bound = [hello for hello in ranks if network.is_loopback(hello.address)]
    if not bound or len({hello.machine for hello in ranks}) == 1:
        return None
    return (
        f"The crew spans several machines, but {bound[0].who} would use {bound[0].address}, which "
        f"no other machine can reach. On {bound[0].host}, give --interface, or put the leader's "
        "network address into --init: its name may be mapped to 127.0.1.1 in /etc/hosts."
    )


class _Roll:
    def __init__(self, store: dist.Store, way: Way, hello: Hello) -> None:
        self.store = store
        self.way = way
        self.hello = hello
        self.seen = {hello.rank: hello}
        self.entered = False

    def enter(self) -> None:
        mine = msgspec.json.encode(self.hello)
        there = self.store.compare_set(f"hello/{self.hello.rank}", "", mine.decode())
        self.entered = there == mine
        if self.entered:
            return
        other = read_hello(there, self.hello.rank, self.way.place)
        met = self.store.check(["go"])
        text = (
            f"Two processes want to be rank {self.hello.rank}: {self.hello.who} and {other.who}"
            f"{', whose crew has already met' if met else ''}. Give each its own --rank, "
            f"from 0 to {self.hello.size - 1}."
        )
        if self.way.kind == "file":
            text += (
                f" If pid {other.pid} on {other.host} is of an earlier run, "
                f"remove the file it left: rm {self.way.path}."
            )
        elif not met:
            text += f" If pid {other.pid} on {other.host} was killed, start every rank again."
        raise MeetingError(text if met else self._publish(text))

    def withdraw(self) -> None:
        """Leave before the crew has met, so that this rank can be started again."""
        try:
            if self.entered and not self.store.check(["go"]):
                self.store.delete_key(f"hello/{self.hello.rank}")
        except dist.DistError:
            return  # the leader is gone, and the list with it

    def wait(self, begun: float, timeout_s: float, notify: Notify) -> list[Hello]:
        leader = self.hello.rank == 0
        # The leader gives up first, so that its sentence reaches the others before they give up.
        deadline = begun + timeout_s + (0 if leader else LINGER_S)
        looked = begun
        while True:
            if self.way.kind == "file":
                Path(self.way.path).stat()  # torch would wait for a file that is gone
            if self.store.check(["fault"]):
                self._fail(self.store.get("fault").decode())
            look = leader or time.monotonic() - looked > 1  # the others, to say who is missing
            looked = time.monotonic() if look else looked
            self._read_hellos(everyone=look)
            if leader and len(self.seen) == self.way.size and self._still_here():
                if text := unreachable(self.seen.values()):
                    self._fail(self._publish(text))
                self.store.set("go", "1")
            if self.store.check(["go"]):
                self.seen = {self.hello.rank: self.hello}
                self._read_hellos(everyone=True)
                return [self.seen[rank] for rank in range(self.way.size)]
            waited = time.monotonic() - begun
            if time.monotonic() > deadline:
                self._give_up(timeout_s)
            if waited > 1:
                notify(f"waiting for {self._missing()}, {waited:.0f} s")
            time.sleep(POLL_S)

    def _read_hellos(self, everyone: bool) -> None:
        for rank in range(self.way.size) if everyone else (0,):
            if rank in self.seen or not self.store.check([f"hello/{rank}"]):
                continue
            try:
                other = read_hello(self.store.get(f"hello/{rank}"), rank, self.way.place)
                if found := differences(self.hello, other):
                    raise MeetingError("\n".join(found))
            except MeetingError as error:
                self._fail(self._publish(str(error)))
            else:
                self.seen[rank] = other

    def _still_here(self) -> bool:
        """Forget those who withdrew since they were seen, or came again as another process."""
        for rank, hello in list(self.seen.items()):
            key = f"hello/{rank}"
            if not self.store.check([key]) or self.store.get(key) != msgspec.json.encode(hello):
                del self.seen[rank]
        return len(self.seen) == self.way.size

    def _missing(self) -> str:
        missing = [str(r) for r in range(self.way.size) if r not in self.seen]
        return f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {self.way.size}"

    def _give_up(self, timeout_s: float) -> NoReturn:
        here = ", ".join(h.who for _, h in sorted(self.seen.items()))
        text = (
            f"After {timeout_s:g} s the crew at {self.way.place} still waits for {self._missing()}."
            f" Here: {here}. Check that each missing rank was started with the same --init and "
            f"--world-size {self.way.size} and its own --rank, and "
        )
        if self.way.kind == "file":
            text += f"that it sees the same file {self.way.path}."
        else:
            text += f"that its machine can reach {self.way.host}:{self.way.port} (firewall?)."
            if self.hello.address.startswith("127.") and self.way.host != self.hello.address:
                text += (
                    f" {self.way.host} is {self.hello.address} on {self.hello.host}, which only "
                    "this machine can reach: look at /etc/hosts, or give the address itself."
                )
        self._fail(self._publish(text), others_may_come=False)

    def _publish(self, text: str) -> str:
        """The fault that the crew fails by: this one, or the one that somebody found before."""
        return str(self.store.compare_set("fault", "", text).decode())

    def _fail(self, text: str, others_may_come: bool = True) -> NoReturn:
        """Raise; but the first rank here, who holds the store, first lets the others read."""
        present = [
            rank
            for rank in range(self.way.size)
            if rank in self.seen or self.store.check([f"hello/{rank}"])
        ]
        # From here on only who holds the store looks at it: a shared file may be gone, and torch
        # would wait for it.
        self.store.set(f"told/{self.hello.rank}", "1")
        if self.hello.rank == min(present):
            waiting = time.monotonic() + LINGER_S
            listeners = range(self.way.size) if others_may_come else present
            while time.monotonic() < waiting and not all(
                self.store.check([f"told/{rank}"]) for rank in listeners
            ):
                time.sleep(POLL_S)
            close_store(self.way, holder=True)
        raise MeetingError(text)
