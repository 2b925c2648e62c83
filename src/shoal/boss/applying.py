"""How a worker comes to a boss: knock until it is hired; and how anybody asks how it is going."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import psutil
import torch

from shoal import network
from shoal.boss.calls import (
    LINK_S,
    MAX_REASON_LETTERS,
    Answer,
    Application,
    Full,
    Hired,
    Question,
    Ready,
    Roster,
    Status,
    Unable,
    Wait,
    encode,
    read_answer,
)
from shoal.errors import KeyFileError, MeetingError, WireError
from shoal.version import VERSION
from shoal.wire.keys import KEY_LENGTH, Z85
from shoal.wire.open_link import LinkSettings, read_keys
from shoal.wire.zmq_call import ZmqCall
from shoal.wire.zmq_gate import Keys
from shoal.wire.zmq_link import ZmqLink

CALL_S = 1.0
"""Between two calls."""
SILENCE_S = 3 * CALL_S
"""Who says nothing for so long is not there any more."""
PREPARE_AFTER_S = 2 * CALL_S
WAY_S = 1.5
"""How long a boss has, at least, to answer to one key of several."""


@dataclass(frozen=True)
class Employer:
    """Where the boss is, and how it is known."""

    endpoint: str
    host: str
    settings: LinkSettings
    key: str = ""
    """The boss's public key: whoever has another one is not it."""


@dataclass(frozen=True)
class Contract:
    """A worker that was hired: its link, on which the boss is rank 0."""

    link: ZmqLink
    names: list[str]


def apply(
    employer: Employer,
    own_id: str,
    device: str,
    notify: Callable[[str], None],
    prepare: Callable[[], None] = lambda: None,
) -> Contract:
    """Wait for a boss, and for its other workers. Never gives up by itself.

    own_id: the same for all applications of this worker, which may come by several connections.
    prepare: what may take a second or two; done where the wait is long enough for it.
    """
    application = Application(
        host=socket.gethostname(),
        pid=os.getpid(),
        device=device,
        memory_bytes=psutil.virtual_memory().available,
        shoal=VERSION,
        torch=str(torch.__version__),
        id=own_id,
    )
    keys = _keys(employer)
    address = network.resolve(employer.host)
    own = "127.0.0.1" if network.is_loopback(address) else network.address_towards(address)
    link: ZmqLink | None = None
    round_ = 0
    begun = time.monotonic()
    try:
        with _line(employer, keys) as line:
            call_at, last = begun, None
            while True:
                if time.monotonic() >= call_at:
                    line.say(encode(application))  # now and then: it says that we are here, too
                    call_at = time.monotonic() + CALL_S
                answer = _hear(line, call_at - time.monotonic())
                if answer is None:
                    call_at = 0.0  # it was not heard, or it is time
                if answer is not None or line.silent_s > SILENCE_S:
                    last = answer
                notify(_waiting(employer, last, line.fault, time.monotonic() - begun))
                if time.monotonic() - begun > PREPARE_AFTER_S and not isinstance(answer, Hired):
                    prepare()
                if isinstance(answer, Hired) and answer.round != round_:
                    if link is not None:  # some other worker did not answer: all begin again
                        link.close(farewell_s=0)
                    link, round_ = _listen(answer, own, keys, employer.settings), answer.round
                if isinstance(answer, Hired) and link is not None:
                    line.say(encode(Ready(answer.round, link.card)))
                if isinstance(answer, Roster) and link is not None and answer.round == round_:
                    break
            _link_up(link, answer, employer, line)
        return Contract(link, answer.names)
    except BaseException:
        if link is not None:
            link.close(farewell_s=0)
        raise
    finally:
        notify("")


def _link_up(link: ZmqLink, roster: Roster, employer: Employer, line: ZmqCall) -> None:
    """With the boss and with all others; where that fails, the boss is told why."""
    boss, *others = roster.cards
    is_connected = False
    try:
        link.connect(
            [msgspec.structs.replace(boss, endpoint=employer.endpoint), *others], roster.names
        )
        is_connected = True
        link.settle(LINK_S)
    except WireError as error:
        reason = str(error)[:MAX_REASON_LETTERS]
        line.say(encode(Unable(roster.round, reason, is_consequence=is_connected)))
        raise


def ask(endpoint: str, settings: LinkSettings, key: str = "", limit_s: float = 5.0) -> Status:
    """How a boss is doing. Raises MeetingError if none answers."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    ways = _ways(Employer(endpoint, host, settings, key))
    fault = ""
    for keys, server_key in ways:
        deadline = time.monotonic() + max(limit_s / len(ways), WAY_S)
        with ZmqCall(endpoint, keys, server_key) as line:
            while not line.fault and time.monotonic() < deadline:
                line.say(encode(Question()))
                answer = _hear(line, min(CALL_S, max(deadline - time.monotonic(), 0)))
                if isinstance(answer, Status):
                    return answer
            fault = line.fault or fault
    raise MeetingError(f"{endpoint}: {fault or 'no boss answers there'}.")


def _ways(employer: Employer) -> list[tuple[Keys | None, str]]:
    """How a boss may be asked: without keys, or with ours and the key that it may have.

    On this host that may be our own, and then loopback may want keys, too.
    """
    address = network.resolve(employer.host)
    bare: list[tuple[Keys | None, str]] = [(None, "")]
    if employer.settings.insecure:
        return bare
    ways = bare if network.is_loopback(address) else []
    try:
        keys = read_keys(employer.settings)
        others = list(keys.authorized.all_names())
    except KeyFileError:
        if ways:
            return ways
        raise
    if employer.key:
        return [*ways, (keys, _pinned(employer, keys))]
    own = [keys.pair.public]
    is_here = network.interface_with(address) is not None
    return [*ways, *((keys, key) for key in (own + others if is_here else others + own))]


def _keys(employer: Employer) -> Keys | None:
    if employer.settings.insecure or network.is_loopback(network.resolve(employer.host)):
        return None
    return read_keys(employer.settings)


def _listen(hired: Hired, address: str, keys: Keys | None, settings: LinkSettings) -> ZmqLink:
    return ZmqLink(
        hired.rank,
        hired.size,
        address,
        keys=keys,
        insecure=settings.insecure,
        timeout_s=hired.timeout_s,
        limit_bytes=settings.limit_bytes,
        hung_s=hired.hung_s,
    )


def _waiting(employer: Employer, answer: Answer | None, fault: str, waited_s: float) -> str:
    where = f"at {employer.endpoint}, {waited_s:.0f} s"
    match answer:
        case Wait(missing=missing) if missing:
            return f"waiting for {missing} more worker{'s' * (missing > 1)} of the boss {where}."
        case Full(reason=reason):
            return f"waiting for a boss {where}: {reason}."
    return f"waiting for a boss {where}" + (f": {fault}." if fault else ".")


def _line(employer: Employer, keys: Keys | None) -> ZmqCall:
    return ZmqCall(employer.endpoint, keys, "" if keys is None else _pinned(employer, keys))


def _pinned(employer: Employer, keys: Keys) -> str:
    """The one key that the boss must have."""
    known = keys.authorized.all_names()
    if employer.key:
        named = [key for key, name in known.items() if name == employer.key]
        if not named and (len(employer.key) != KEY_LENGTH or not set(employer.key) <= set(Z85)):
            raise MeetingError(
                f"--boss-key {employer.key}: is no public key (of {KEY_LENGTH} letters), nor a "
                f"name in {keys.authorized.path}, which has: {', '.join(known.values()) or 'none'}."
            )
        return named[0] if named else employer.key
    if len(known) == 1:
        return next(iter(known))
    if not known:
        raise MeetingError(
            f"{keys.authorized.path} has no key: append the boss's public line to it (on the boss: "
            "shoal keygen)."
        )
    raise MeetingError(
        f"{keys.authorized.path} has {len(known)} keys: which one is the boss's? Say --boss-key, "
        "with its public key or the name behind it."
    )


def _hear(line: ZmqCall, limit_s: float) -> Answer | None:
    content = line.hear(limit_s)
    if content is None:
        return None
    try:
        return read_answer(content)
    except WireError as error:
        line.fault = str(error)
        return None
