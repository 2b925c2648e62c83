"""What was found on the hosts and between them. No judgement: see `verdicts`."""

from __future__ import annotations

import msgspec

from shoal.launch.hosts import Host
from shoal.launch.messages import Address, Condition, Here, Measured


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """Why a host cannot be examined, or not to the end."""

    what: str
    said: str = ""
    """By its ssh, or by itself."""
    remedy: str = ""
    part: str = "ssh"
    """Which is at fault: ssh, python or shoal."""


class ClockFacts(msgspec.Struct, frozen=True, kw_only=True):
    offset_s: float
    """Of its clock against this host's; positive: it is ahead."""
    round_trip_s: float
    """Of the question. The offset may be wrong by half of it."""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    host: Host
    is_here: bool = False
    """Whether the doctor was called there."""
    lost: Lost | None = None
    hello: Here | None = None
    greeting: str = ""
    """A line that its shell prints at every login, terminal or not; empty: none."""
    clock: ClockFacts | None = None
    address: Address | None = None
    """By which the others find it."""
    why: str = ""
    """Why this address."""
    known_as: list[str] = []
    """Addresses at which ssh came through to it."""
    condition: Condition | None = None

    @property
    def name(self) -> str:
        return self.host.name


class PairFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The way from one host to another."""

    source: str
    target: str
    address: str = ""
    """The target's, which the source was sent to."""
    fixed_port: int | None = None
    """A port that was tried besides a free one."""
    skipped: str = ""
    """Why nothing was tried."""
    fault: str = ""
    """Why the target could not listen there."""
    measured: Measured | None = None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    shoal: str
    """The version that the doctor itself is of."""
    hosts: list[HostFacts]
    """The first one leads."""
    pairs: list[PairFacts] = []
    code: str | None = None
    """The hash of the project's files where the doctor was called; None: not compared."""
    project: str = ""

    def named(self, name: str) -> HostFacts:
        return next(host for host in self.hosts if host.name == name)

    @property
    def leader(self) -> HostFacts:
        return self.hosts[0]
