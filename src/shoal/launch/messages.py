"""What a launcher and its agents say to each other: one JSON object a line, over ssh."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from shoal.launch.outcome import RankEnd

# -- to the agent ----------------------------------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make the folder of this run."""

    run: str
    folder: str | None
    """In here; None: in the cache."""


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
    threads: int | None
    secrets: dict[str, str] = {}
    """Secret files of this run, by name. In arguments, {name} stands for the path of each."""


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """We are still here."""


class Clean(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The folders of this run are not needed any more."""


Order: TypeAlias = Prepare | FindPort | Start | Ping | Clean


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
    free_bytes: int
    """Of the disk that its runs are on."""
    has_rsync: bool


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    code: str
    results: str


class Port(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    port: int


class Line(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    rank: int
    stream: str
    text: str


class Said(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An event of a rank, as it came."""

    rank: int
    event: str


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All ranks there have ended; with the one to blame, if there is one."""

    cause: RankEnd | None


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was asked for cannot be done there."""

    reason: str


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing new."""


Report: TypeAlias = Here | Prepared | Port | Line | Said | Done | Refused | Alive


def encode(message: Order | Report) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def read_order(line: str) -> Order:
    return msgspec.json.decode(line, type=Order)  # type: ignore[no-any-return, unused-ignore]


def read_report(line: str) -> Report:
    return msgspec.json.decode(line, type=Report)  # type: ignore[no-any-return, unused-ignore]
