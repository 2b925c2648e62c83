"""Asks every host, and sends one to the other. A host that is lost does not stop the others.

agents up -> clocks -> addresses -> the ways between them, one by one -> what each is like

The ways come before the long answers: where packets of full size are lost, those would be too.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path

import msgspec

from shoal.doctor.facts import ClockFacts, Facts, HostFacts, Lost, PairFacts
from shoal.errors import MeetingError
from shoal.launch.addresses import Site, meeting_address, seen_here
from shoal.launch.agents import Agents
from shoal.launch.fingerprint import fingerprint
from shoal.launch.hosts import Host
from shoal.launch.local import stop_signals
from shoal.launch.loss import Loss
from shoal.launch.messages import (
    Address,
    Clock,
    Condition,
    Examine,
    FindAddress,
    Here,
    Listen,
    Listening,
    Measure,
    Measured,
    TellTime,
)
from shoal.version import VERSION

CLOCK_TRIES = 3
"""Of which the quickest counts."""
LOOPBACK = "127.0.0.1"


def examine(
    hosts: Sequence[Host],
    *,
    project: Path | None = None,
    fixed_port: int | None = None,
    notify: Callable[[str], None] = lambda text: None,
) -> Facts:
    """project: a folder that all hosts have, to be compared. notify: is told what is being done."""
    with stop_signals(), Agents(hosts, keep_going=True) as agents:
        notify(f"waiting for {', '.join(host.name for host in hosts)}.")
        return _Examination(agents, hosts, project, fixed_port, notify).run()


class _Examination:
    def __init__(
        self,
        agents: Agents,
        hosts: Sequence[Host],
        project: Path | None,
        fixed_port: int | None,
        notify: Callable[[str], None],
    ) -> None:
        self._agents = agents
        self._hosts = hosts
        self._project = project
        self._fixed_port = fixed_port
        self._notify = notify
        self._hellos: dict[str, Here] = {}

    def run(self) -> Facts:
        self._hellos = self._agents.arrivals()
        clocks = {host.name: self._clock(host) for host in self._able()}
        whys, addresses = self._addresses()
        pairs = self._pairs(addresses)
        self._notify("asking each host about itself.")
        conditions = self._conditions()
        self._notify("")
        found = [
            HostFacts(
                host=host,
                is_here=self._agents.is_here(host),
                lost=_lost(self._agents.lost.get(host.name)),
                hello=self._hellos.get(host.name),
                greeting=self._agents.greeting(host),
                clock=clocks.get(host.name),
                address=addresses.get(host.name),
                why=whys.get(host.name, ""),
                known_as=self._known_as(host),
                condition=conditions.get(host.name),
            )
            for host in self._hosts
        ]
        code = None if self._project is None else fingerprint(self._project)
        folder = str(self._project or "")
        return Facts(shoal=VERSION, hosts=found, pairs=pairs, code=code, project=folder)

    def _able(self) -> list[Host]:
        """Those that are there and understand us: another shoal may not."""
        here = [host for host in self._hosts if host.name not in self._agents.lost]
        return [host for host in here if self._hellos[host.name].shoal == VERSION]

    def _clock(self, host: Host) -> ClockFacts | None:
        tries = []
        for _ in range(CLOCK_TRIES):
            asked_at, begun = time.time(), time.perf_counter()
            answer = self._agents.ask_each({host.name: TellTime()}, Clock).get(host.name)
            if answer is None:
                return None
            seconds = time.perf_counter() - begun
            offset_s = answer.now_s - (asked_at + seconds / 2)
            tries.append(ClockFacts(offset_s=offset_s, round_trip_s=seconds))
        return min(tries, key=lambda each: each.round_trip_s)

    # -- addresses ---------------------------------------------------------------------------------

    def _addresses(self) -> tuple[dict[str, str], dict[str, Address]]:
        able = self._able()
        if len(self._hosts) == 1:
            orders = {host.name: FindAddress() for host in able}
            whys = {host.name: "it is on the way to other machines" for host in able}
            return whys, self._agents.ask_each(orders, Address)
        first = self._hosts[0]
        meeting = self._meeting() if first in able and len(able) > 1 else None
        orders, whys = {}, {}
        for host in able:
            orders[host.name], whys[host.name] = _order_of(
                host, first, meeting, is_seen=meeting in self._known_as(host)
            )
        return whys, self._agents.ask_each(orders, Address)

    def _meeting(self) -> str | None:
        """Where the others find the leader; None: there is no way to them."""
        sites = [
            Site(host, self._hellos[host.name], self._agents.is_here(host), "", "", "")
            for host in self._able()
        ]
        try:
            return meeting_address(sites[0], sites)
        except MeetingError:
            return None

    def _known_as(self, host: Host) -> list[str]:
        hello = self._hellos.get(host.name)
        if hello is None:
            return []
        if not self._agents.is_here(host):
            return [hello.seen_as]
        return sorted(set(seen_here(list(self._hellos.values()))))

    # -- the ways between them ---------------------------------------------------------------------

    def _pairs(self, addresses: dict[str, Address]) -> list[PairFacts]:
        names = [host.name for host in self._hosts]
        if len(names) == 1:
            return [self._pair(names[0], names[0], Address(address=LOOPBACK))]
        return [self._pair(a, b, addresses.get(b)) for a, b in permutations(names, 2)]

    def _pair(self, source: str, target: str, address: Address | None) -> PairFacts:
        facts = PairFacts(source=source, target=target, fixed_port=self._fixed_port)
        able = {host.name for host in self._able()}
        if missing := [name for name in (source, target) if name not in able]:
            return msgspec.structs.replace(facts, skipped=f"{missing[0]} could not be asked")
        if address is None or not address.address:
            return msgspec.structs.replace(facts, skipped=f"{target} has no address for others")
        self._notify(f"measuring the way from {source} to {target}.")
        facts = msgspec.structs.replace(facts, address=address.address)
        token = secrets.token_hex(16)
        order = Listen(address=address.address, token=token, fixed_port=self._fixed_port)
        listening = self._agents.ask_each({target: order}, Listening).get(target)
        if listening is None or listening.fault:
            fault = listening.fault if listening else "no answer came"
            return msgspec.structs.replace(facts, fault=fault)
        visit = Measure(
            address=address.address,
            port=listening.port,
            token=token,
            fixed_port=self._fixed_port,
        )
        measured = self._agents.ask_each({source: visit}, Measured, 45.0).get(source)
        return msgspec.structs.replace(facts, measured=measured)

    # -- what each is like -------------------------------------------------------------------------

    def _conditions(self) -> dict[str, Condition]:
        names = [host.name for host in self._hosts]
        orders = {
            host.name: Examine(
                names=[name for name in names if name != host.name],
                folder=None if self._agents.is_here(host) else host.folder,  # where none is made
                project=None if self._project is None else str(self._project),
            )
            for host in self._able()
        }
        return self._agents.ask_each(orders, Condition, 60.0)


def _order_of(
    host: Host, leader: Host, meeting: str | None, *, is_seen: bool
) -> tuple[FindAddress, str]:
    """How a host finds its own address, and why so. is_seen: ssh meets it where the crew does."""
    if host.address:
        return FindAddress(address=host.address), f"{host.file} gives this address"
    if host is leader and meeting is not None:
        why = "it is where ssh finds it" if is_seen else "it is on the route to the others"
        return FindAddress(address=meeting), why
    if host.interface:
        return FindAddress(interface=host.interface), f"{host.file} gives this interface"
    if meeting is None:
        return FindAddress(), "it is on the way to other machines"
    return FindAddress(towards=meeting), f"it is on the route to {leader.name}"


def _lost(loss: Loss | None) -> Lost | None:
    if loss is None:
        return None
    return Lost(what=loss.what, said=loss.said.strip(), remedy=loss.remedy, part=loss.part)
