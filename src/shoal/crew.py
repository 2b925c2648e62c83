"""Who is here: open, agree, wait for one another, close.

A `Crew` is one rank's view of all ranks of a run. It owns the process group and the store they
met at. A crew of one owns neither and does everything at once.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist

from shoal import network
from shoal.board import Board, HasLeft, Left
from shoal.errors import MeetingError, PeerLost, ShoalError, lost_peer, reason_of
from shoal.interrupts import prompt_interrupts
from shoal.layout import Share
from shoal.rendezvous.roll import Fingerprint, Hello, call_roll, make_hello
from shoal.rendezvous.store import (
    Notify,
    close_store,
    keep_store,
    kept_store,
    open_store,
    use_interface,
)
from shoal.rendezvous.ways import Way

ROLL_CALL_S = 2.0
"""After a failure: how long the others have to say that they are still here."""
FAREWELL_S = 0.5
"""How long a leader that fails stays, so that the others can read why."""
_NEVER_TAG = 2**30
"""Of messages that nobody sends."""

MUST_MATCH = "every rank must take the same number of steps, barriers and evaluations."


class Crew:
    """All ranks of a run, seen from this one. Close it, or use it as a context manager."""

    def __init__(
        self,
        way: Way,
        roster: list[Hello],
        store: dist.Store | None,
        device: torch.device,
        timeout_s: float,
        resources: ExitStack,
    ) -> None:
        self._way = way
        self.rank = way.rank
        self.size = way.size
        self.local_rank = way.local_rank
        self.local_size = way.local_size
        self.roster = roster
        self.device = device
        self.timeout_s = timeout_s
        self.share: Share | None = None
        """The part of the current global batch that this rank holds; its loader sets it."""
        self.gpu_collectives = way.size > 1 and _own_gpu_each(roster)
        """Whether collectives take tensors of GPUs; otherwise those are staged through the host."""
        self._board = Board(store, way.rank, way.size) if store is not None else None
        self._resources = resources
        self._process = os.getpid()
        self._open = True

    @classmethod
    def open(
        cls,
        way: Way,
        *,
        fingerprint: Fingerprint,
        interface: str | None = None,
        device: str = "cpu",
        timeout_s: float = 300.0,
        notify: Notify = lambda text: None,
    ) -> Self:
        """Meet the other ranks. Raises MeetingError, with the same sentence on every rank."""
        with ExitStack() as resources:
            resources.enter_context(prompt_interrupts())
            chosen = choose_device(device, way.local_rank)
            if way.kind == "alone":
                hello = make_hello(way, "127.0.0.1", str(chosen), fingerprint)
                return cls(way, [hello], None, chosen, timeout_s, resources.pop_all())
            if dist.is_initialized():
                raise MeetingError(
                    "This process already has a torch.distributed process group: from an earlier "
                    "shoal.join() that is still open (close it first), or from a call of "
                    "init_process_group (remove it: shoal makes the group)."
                )
            with ExitStack() as if_it_fails:
                if again := kept_store(way):
                    store, way = again
                else:
                    store = open_store(way, interface, timeout_s, notify)
                if_it_fails.callback(close_store, way)  # what was not opened is not ours to remove
                hello = make_hello(way, _own_address(way, interface), str(chosen), fingerprint)
                roster = call_roll(store, way, hello, timeout_s, notify)
                name = _common_interface(way, hello, roster, interface)
                resources.enter_context(use_interface(name))
                _init_group(store, way, roster, timeout_s)
                resources.callback(_leave_broken_group)
                keep_store(way, store)
                if_it_fails.pop_all()
            keys = dist.PrefixStore(f"shoal/{way.attempt}/crew", store)
            return cls(way, roster, keys, chosen, timeout_s, resources.pop_all())

    @property
    def num_here(self) -> int:
        """How many ranks are on this machine, however they were started."""
        mine = self.roster[self.rank].machine
        return sum(hello.machine == mine for hello in self.roster)

    # -- collectives, each bounded by the timeout and naming whom it lost --------------------------

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            with self.naming_the_lost("a barrier"):
                dist.barrier()

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace `tensor` on every rank by its sum over the ranks."""
        if self.size > 1:
            with self.naming_the_lost("a sum"):
                dist.all_reduce(tensor)
        return tensor

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Replace `tensor` on every rank by that of `source`."""
        if self.size > 1:
            with self.naming_the_lost("a broadcast"):
                dist.broadcast(tensor, source)
        return tensor

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's `value` (what JSON can hold), by rank. Every rank must call this."""
        mine = msgspec.json.encode([what, value])
        if self._board is None:
            return [msgspec.json.decode(mine)[1]]
        with self.naming_the_lost(f"the exchange of {what}"):
            told = list(
                map(msgspec.json.decode, self._board.exchange(mine.decode(), self.timeout_s))
            )
        for rank, (doing, _) in enumerate(told):
            if doing != what:
                raise ShoalError(
                    f"{self.roster[rank].who} is at the exchange of {doing}, and "
                    f"{self.roster[self.rank].who} at that of {what}: every rank must make the "
                    "same calls, in the same order."
                )
        return [value for _, value in told]

    def store_for(self, what: str) -> dist.Store:
        """A part of the store for one purpose. Every rank must ask for the same, in one order."""
        assert self._board is not None, "a crew of one meets nobody"
        return self._board.part_for(what)

    def agree(self, what: str, value: Any) -> None:
        """Raise on every rank, by name, unless all bring a `value` equal to rank 0's."""
        values = self.exchange(what, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                theirs, first = _differing(other, values[0])
                raise ShoalError(
                    f"{self.roster[rank].who} and {self.roster[0].who} do not agree on {what}:\n"
                    f"  {self.roster[rank].who}: {theirs[:300]}\n"
                    f"  {self.roster[0].who}: {first[:300]}\n"
                    "Do all ranks run the same script with the same settings, and seed?"
                )

    # -- when something breaks ---------------------------------------------------------------------

    @contextmanager
    def naming_the_lost(self, doing: str) -> Iterator[None]:
        """Turn torch's `Connection closed by peer` into a PeerLost that says which rank."""
        try:
            yield
        except ShoalError:
            raise
        except HasLeft as error:
            raise self._lost_with_reason(error.left, doing) from None
        except RuntimeError as error:
            # A plain error of this rank's own (a wrong shape, say) is not a lost peer.
            if not _is_lost_connection(error):
                raise
            raise self._who_is_lost(doing, error) from error

    def _who_is_lost(self, doing: str, error: RuntimeError) -> PeerLost:
        """Call the roll once more: who does not answer is lost."""
        me = self.roster[self.rank].who
        reason = _plain_reason(error)
        assert self._board is not None
        try:
            silent, left = self._board.call_the_roll(ROLL_CALL_S)
        except dist.DistError:
            silent, left = [0], None  # the store lives in the leader's process
        if left is not None:
            return self._lost_with_reason(left, doing)
        if not silent:
            return PeerLost(
                f"{me} lost a connection during {doing}, though every rank is alive: {reason}. "
                + MUST_MATCH
            )
        names = ", ".join(self.roster[rank].who for rank in silent)
        text = (
            f"{me} lost {names} during {doing}: no sign of life within {ROLL_CALL_S:g} s. It was "
            f"killed, is frozen, or its machine is cut off. ({reason})"
        )
        if "timed out" in reason.lower():
            text += f" Or it is busy elsewhere and never came to {doing}: {MUST_MATCH}"
        return PeerLost(text)

    def _lost_with_reason(self, left: Left, doing: str) -> PeerLost:
        me, other = self.roster[self.rank].who, self.roster[left.rank].who
        return PeerLost(f"{me} lost {other} during {doing}: it ended with {left.why}")

    # -- closing -----------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """Leave together; or, after an error, alone and at once, telling the others why."""
        if not self._open or self._is_inherited:
            return
        self._open = False
        with self._resources:
            if error is None:
                error = self._gather()
            if error is None:
                if dist.is_initialized():
                    dist.destroy_process_group()
                return
            if lost_peer(error) is None:
                self._say_goodbye(error)
            close_store(self._way)

    @property
    def _is_inherited(self) -> bool:
        """Whether this process was forked from the rank: it is none, and leaves nobody."""
        return os.getpid() != self._process

    def _gather(self) -> BaseException | None:
        """Wait for all others, so as to leave with them; or why to leave alone."""
        self.barrier()
        return None

    def _say_goodbye(self, error: BaseException) -> None:
        if self._board is None:
            return
        try:
            self._board.leave(reason_of(error)[:2000])
        except dist.DistError:
            return  # the leader is gone already; there is nobody to tell
        if self.rank == 0:
            # The others notice when our connections close, then look into the store that we hold.
            _leave_broken_group()
            self._board.wait_until_read(FAREWELL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError) and self._open and _is_lost_connection(error):
            # Raised by torch inside the user's own lines (DDP's backward, say): name the rank.
            lost = self._who_is_lost("a step", error)
            self.close(lost)
            raise lost from error
        self.close(error)


def _is_lost_connection(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _differing(one: Any, other: Any) -> tuple[str, str]:
    """Two values; of two lists only what the other has not."""
    if isinstance(one, list) and isinstance(other, list):
        own = ", ".join(str(each) for each in one if each not in other)
        its = ", ".join(str(each) for each in other if each not in one)
        if own or its:  # else they differ in order only
            return own or "nothing else", its or "nothing else"
    return str(one), str(other)


def _plain_reason(error: RuntimeError) -> str:
    """gloo's text without the source line it begins with and the advice it ends with."""
    text = str(error).strip().splitlines()[0]
    return re.sub(r"^\[\S+\] ", "", text).partition(". This is typically")[0]


def choose_device(name: str, local_rank: int) -> torch.device:
    """`auto` is a GPU where there is one; several ranks on a host share its GPUs out."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        host = socket.gethostname()
        raise MeetingError(
            f"device cuda: torch sees no GPU on {host}. Use the device cpu, or auto."
        )
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _own_address(way: Way, interface: str | None) -> str:
    if interface is not None:
        return network.address_of(interface)
    if way.kind == "file":
        return network.outward_address()
    leader = network.resolve(way.host)
    return leader if network.interface_with(leader) else network.address_towards(leader)


def _common_interface(way: Way, me: Hello, roster: list[Hello], interface: str | None) -> str:
    """The interface for this rank's traffic."""
    one_machine = all(h.machine == me.machine for h in roster)
    address = me.address
    if one_machine and way.kind == "file" and interface is None:
        address = "127.0.0.1"
    name = network.interface_with(address)
    if name is None:
        raise MeetingError(f"{me.who} lost its address {address} while the crew was meeting.")
    return name


def _own_gpu_each(roster: list[Hello]) -> bool:
    places = {(h.machine, h.device) for h in roster}
    return all(h.device != "cpu" for h in roster) and len(places) == len(roster)


def _leave_broken_group() -> None:
    """Destroy the process group, if it still stands, but wait for it no longer than a farewell.

    With an operation under way (after an error or Ctrl-C) gloo would block here, or when Python
    ends, until its timeout. After a barrier it does not, and must not be done on a thread that may
    be left behind: one that comes back from C++ while Python is shutting down aborts the process.
    """
    if dist.is_initialized():
        _end_what_is_under_way()
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(FAREWELL_S)


def _end_what_is_under_way() -> None:
    """gloo has one way to be told: it breaks a whole group when a wait in it times out."""
    for group in tuple(dist.distributed_c10d._world.pg_map):  # a script's own, and replicas' too
        with suppress(RuntimeError):
            gloo: Any = group._get_backend(torch.device("cpu"))
            if gloo.size() > 1:
                never = gloo.recv([torch.empty(1)], int(gloo.rank() == 0), _NEVER_TAG)
                never.wait(timedelta(milliseconds=1))


def _init_group(store: dist.Store, way: Way, roster: list[Hello], timeout_s: float) -> None:
    # Its functions have the group of the moment as a default. Imported later, as by the first
    # optimizer, it would keep ours for ever: gloo's threads abort a process that ends before them.
    importlib.import_module("torch.distributed.nn.functional")
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if _own_gpu_each(roster) else "gloo",
            store=dist.PrefixStore(f"group/{way.attempt}", store),
            rank=way.rank,
            world_size=way.size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        everyone = ", ".join(f"{h.who} at {h.address}" for h in roster)
        raise MeetingError(
            "All ranks met, but torch could not connect each with each. It needs ports of its own "
            f"choice open between all of these: {everyone}. Is there a firewall between them, or "
            f"is one of these addresses on the wrong network (--interface)? torch says: {error}"
        ) from error
