"""A link between all ranks of a crew, over the transport of one's choice.

Every rank does its part and tells the others how it went; what failed on one is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.crew import Crew
from shoal.errors import ShoalError, WireError
from shoal.network import is_loopback
from shoal.wire.dist_link import DistLink
from shoal.wire.dist_meeting import MakeLane
from shoal.wire.gpu_lane import GpuLane
from shoal.wire.header import DEFAULT_LIMIT_BYTES
from shoal.wire.keys import (
    AuthorizedKeys,
    default_authorized_keys_path,
    default_key_path,
    read_pair,
)
from shoal.wire.link import Link
from shoal.wire.memory import MemoryLink
from shoal.wire.terms import check_seconds, check_size
from shoal.wire.zmq_gate import Keys
from shoal.wire.zmq_link import ZmqLink
from shoal.wire.zmq_sockets import Card

TRANSPORTS = ("zmq", "dist", "memory")
LEAST_S = 0.1
"""Nobody answers sooner on a busy machine."""
LEAST_SILENCE_S = 3.0
"""A busy machine may be silent for so long, whatever is waited for."""
T = TypeVar("T")


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the user may say about a link."""

    key: str | None = None
    """The secret key's file. Default: the one that `shoal keygen` writes."""
    authorized_keys: str | None = None
    insecure: bool = False
    """Go beyond loopback without keys."""
    timeout_s: float = 60.0
    """The longest wait, where a wait is not told otherwise."""
    hung_s: float = 10.0
    """Who gave no sign of life for so long is lost; see `silent_s`."""
    limit_bytes: int = DEFAULT_LIMIT_BYTES
    """The largest message that is taken."""

    @property
    def silent_s(self) -> float:
        """`hung_s`, but shorter where waits are: who is frozen is to be named, not waited for."""
        return min(self.hung_s, max(LEAST_SILENCE_S, 0.75 * self.timeout_s))


def open_link(crew: Crew, transport: str, settings: LinkSettings) -> Link:
    """Every rank must call this."""
    crew.agree("the transport of a link", transport)
    _together(crew, "terms", lambda: _check(settings))
    match transport:
        case "zmq":
            return _open_zmq(crew, settings)
        case "dist":
            return _open_dist(crew, settings)
        case "memory" if crew.size == 1:
            return MemoryLink.crew(1, settings.timeout_s)[0]
        case "memory":
            raise WireError(
                f"memory links join threads of one process, and this crew has {crew.size} "
                "processes: use zmq or dist here, MemoryLink.crew(n) between threads."
            )
    raise WireError(f"there is no transport {transport!r}; there are: {', '.join(TRANSPORTS)}")


def _check(settings: LinkSettings) -> None:
    check_seconds("timeout_s", settings.timeout_s, LEAST_S)
    check_seconds("hung_s", settings.hung_s, LEAST_S)
    check_size("limit_bytes", settings.limit_bytes)


def _open_zmq(crew: Crew, settings: LinkSettings) -> Link:
    link = _together(crew, "listening", lambda: _listen(crew, settings))
    with _closed_on_failure(link):
        cards = [msgspec.convert(each, Card) for each in crew.exchange("links", link.card)]
        _together(crew, "connecting", lambda: link.connect(cards, _names(crew)))
        _together(crew, "settling", link.settle)
    return link


def _listen(crew: Crew, settings: LinkSettings) -> ZmqLink:
    address = _address(crew)
    keys = None if is_loopback(address) or settings.insecure else read_keys(settings)
    return ZmqLink(
        crew.rank,
        crew.size,
        address,
        keys=keys,
        insecure=settings.insecure,
        timeout_s=settings.timeout_s,
        limit_bytes=settings.limit_bytes,
        hung_s=settings.silent_s,
    )


def read_keys(settings: LinkSettings) -> Keys:
    """This host's key, and whom it trusts."""
    authorized = settings.authorized_keys or default_authorized_keys_path()
    return Keys(
        read_pair(Path(settings.key or default_key_path())), AuthorizedKeys(Path(authorized))
    )


def _open_dist(crew: Crew, settings: LinkSettings) -> Link:
    link = DistLink(
        crew.rank,
        crew.size,
        timeout_s=settings.timeout_s,
        limit_bytes=settings.limit_bytes,
        hung_s=settings.silent_s,
    )
    if crew.size > 1:
        with _closed_on_failure(link):
            store = crew.store_for("link")
            lane = _gpu_lane(crew)
            _together(crew, "joining", lambda: link.join(store, _address(crew), _names(crew), lane))
    return link


def _gpu_lane(crew: Crew) -> MakeLane | None:
    """Where every rank has a GPU of its own, tensors on it go from GPU to GPU."""
    if not crew.gpu_collectives:
        return None
    return lambda store, rank: GpuLane(store, rank, crew.device)


def _address(crew: Crew) -> str:
    """Where this rank listens: on loopback, unless some rank is on another machine."""
    here = crew.roster[crew.rank]
    alone = all(hello.machine == here.machine for hello in crew.roster)
    return "127.0.0.1" if alone else here.address


def _names(crew: Crew) -> list[str]:
    return [hello.who for hello in crew.roster]


def _together(crew: Crew, doing: str, do: Callable[[], T]) -> T:
    """What `do` gives; raises on every rank if it failed on one, there with the error itself."""
    mine: ShoalError | None = None
    try:
        result = do()
    except ShoalError as error:
        mine = error
    faults = crew.exchange(f"links ({doing})", str(mine) if mine else "")
    if mine is not None:
        raise mine
    if any(faults):
        raise WireError(
            "\n".join(_whose(crew, r, fault) for r, fault in enumerate(faults) if fault)
        )
    return result


def _whose(crew: Crew, rank: int, fault: str) -> str:
    """Most begin with it; but "the key is missing" is to be mended where it is missing."""
    return fault if fault.startswith(f"rank {rank}") else f"{crew.roster[rank].who}: {fault}"


@contextmanager
def _closed_on_failure(link: Link) -> Iterator[None]:
    try:
        yield
    except BaseException:
        link.close(farewell_s=0)
        raise
