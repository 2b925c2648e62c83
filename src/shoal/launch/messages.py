"""What a launcher and its agents say to each other: one JSON object a line, over ssh."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from shoal.launch.outcome import RankEnd

AGENT = "shoal.launch.agent"
"""The module that they are."""

# -- to the agent ----------------------------------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make the folder of this run."""

    run: str
    folder: str | None
    """In here; None: in the cache."""
    needed_bytes: int
    """That must be free there."""
    project: str | None = None
    """A folder that must be there, for code that is not copied; None: none must."""
    advice: str
    """How another folder for runs is given."""


class FindPort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Which port is free there?"""


class RankTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rank: int
    arguments: list[str]
    """Behind the interpreter."""
    environment: dict[str, str]


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start these ranks."""

    folder: str
    """Where they begin."""
    ranks: list[RankTask]
    threads: str | None
    """Compute threads of each, where the launcher's user said something of them."""
    run: str = ""
    """A name of its own: the mark of all that its ranks start."""
    secrets: dict[str, str] = {}
    """Keys of this run: files that its ranks find where a user's keys are else."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the ranks: some other one has failed."""


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """We are still here."""


class Clean(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The results of this run are not needed there any more."""


class Sweep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The agent of this run can do it no more: end what is left, and remove what it would."""

    run: str
    folder: str | None
    """As it was told to `Prepare`."""
    agent: int | None = None
    """That agent's process id, where it hangs; else it is gone."""


class TellTime(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What does the clock say there?"""


class FindAddress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """By which address do the others find this host? The first that is given decides."""

    address: str | None = None
    """A name, or an address."""
    interface: str | None = None
    towards: str | None = None
    """Where the leader is. Without any of the three: on the way to anywhere else."""


class Listen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Expect one visitor, who knows the token, on any free port; for some seconds."""

    address: str
    token: str
    fixed_port: int | None = None
    """Listen on this one as well."""


class Measure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Be that visitor, and measure the way."""

    address: str
    port: int
    token: str
    fixed_port: int | None = None


class Examine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What is this host like?"""

    names: list[str]
    """What do these names stand for there?"""
    folder: str | None
    """Where runs have their folders; None: in the cache."""
    project: str | None
    """A folder whose files are compared; None: they are not."""


Probe: TypeAlias = TellTime | FindAddress | Listen | Measure | Examine
"""What only the doctor asks."""

Order: TypeAlias = Prepare | FindPort | Start | Stop | Ping | Clean | Sweep | Probe


# -- from the agent --------------------------------------------------------------------------------


class Here(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An agent is up, on this host."""

    host: str
    pid: int
    python: str
    python_version: str
    shoal: str
    torch: str
    seen_as: str
    """The address that the launcher reached it at; empty on the launcher's own host."""
    seen_from: str
    """The launcher's address as this host sees it."""
    cores: int
    has_rsync: bool


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    code: str
    results: str


class Port(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    port: int


class Line(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Of a rank's output; with its end, or a piece of a long one."""

    rank: int
    stream: str
    data: bytes
    is_shown: bool = True
    """Else it is for the log alone."""


class Said(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An event of a rank, as it came."""

    rank: int
    event: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has, with exit code 0; others there may run on."""

    rank: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All ranks there have ended; with the one to blame, if there is one."""

    cause: RankEnd | None
    has_results: bool = False
    """Whether they left anything in the folder for it."""


class Swept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    ended: int
    """So many processes."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was asked for cannot be done there."""

    reason: str


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing new."""


class Clock(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    now_s: float
    """Since 1970."""


class Address(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    address: str = ""
    interface: str = ""
    """Which holds it; empty: none there does."""
    mtu: int = 0
    fault: str = ""
    """Why there is no address."""
    all_here: str = ""
    """Interfaces and addresses that it has, in words."""


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    port: int = 0
    fault: str = ""
    """Why nobody listens."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The way from here to there. What could not be measured any more is None."""

    error: str = ""
    """What is wrong with the connection: timeout, refused, rejected, absent, no-route, broken."""
    detail: str = ""
    """The system's own words for it."""
    latency_s: float | None = None
    """A round trip of a small message, the median."""
    large_bytes: int | None = None
    """Of LARGE_BYTES sent in one go, how many came in time."""
    bytes_per_s: float | None = None
    """Of payload, at the receiver; 0: the stream stopped."""
    fixed_error: str | None = None
    """As `error`, for the fixed port; None: there is none."""


class Condition(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a host is like."""

    own_name: str
    names: dict[str, str]
    """Of the hosts and of its own: the address that each stands for; empty: none."""
    addresses: dict[str, list[str]]
    """By interface."""
    memory_bytes: int
    free_memory_bytes: int
    gpus: int
    free_disk_bytes: int
    folder_fault: str = ""
    """Why runs can have no folder there; empty: they can."""
    firewalls: list[str]
    """Tools that set them up, as far as they are there."""
    code: str | None = None
    """A hash of the project's files; None: not asked for; empty: there is no such folder."""


Report: TypeAlias = (
    Here | Prepared | Port | Line | Said | Ended | Done | Swept | Refused | Alive
    | Clock | Address | Listening | Measured | Condition
)  # fmt: skip


# Made once: that takes fifty times as long as to read a line.
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_reports: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def encode(message: Order | Report) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def read_order(line: bytes) -> Order:
    return _orders.decode(line)


def read_report(line: bytes) -> Report:
    return _reports.decode(line)
