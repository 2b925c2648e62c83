"""How a boss comes to its workers: listen, wait until enough have applied, link up with them."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal import network
from shoal.boss.address import Address
from shoal.boss.applying import ask
from shoal.boss.calls import LINK_S, Application, Status
from shoal.boss.reception import Reception
from shoal.errors import MeetingError, WireError
from shoal.settings import MAX_TIMEOUT_S
from shoal.wire.open_link import LinkSettings, read_keys
from shoal.wire.zmq_link import ZmqLink

log = logging.getLogger("shoal.boss")
TURN_S = 0.5
MAX_NAMED = 4
"""Of more workers that have come, we say how many there are."""
READY_S = 10.0
"""How long those who are hired have to listen and say where."""
MAX_HUNG_S = 1e6
"""ZeroMQ counts milliseconds in 32 bits."""
WORD_S = 1.0
"""How long workers may take to say why they could not link up."""


@dataclass(frozen=True)
class Staff:
    """The workers of a boss, and the link to them."""

    link: ZmqLink
    names: list[str]
    """By rank; the boss is rank 0."""
    applications: list[Application]
    """By rank, from rank 1 on."""


def option_faults(workers: int, *, timeout_s: float, hung_s: float, wait_s: float) -> list[str]:
    """What a boss cannot begin with."""
    faults = []
    if not isinstance(workers, int) or workers < 1:
        faults.append(f"workers={workers!r}: a boss needs a number of them, at least one.")
    limits = {"timeout_s": MAX_TIMEOUT_S, "hung_s": MAX_HUNG_S, "wait_s": math.inf}
    given = {"timeout_s": timeout_s, "hung_s": hung_s, "wait_s": wait_s}
    for name, seconds in given.items():
        if not isinstance(seconds, int | float) or not 0 < seconds <= limits[name]:
            faults.append(
                f"{name}={seconds!r}: must be a positive number of seconds, "
                f"{limits[name]:g} at most."
            )
    return faults


def hire(
    listen: str,
    num_workers: int,
    settings: LinkSettings,
    status: Callable[[], Status],
    *,
    wait_s: float,
    notify: Callable[[str], None],
) -> Staff:
    """Listen at once; return when there are so many workers, all linked with each other."""
    address = Address.read(listen)
    host = network.resolve(address.host)
    keys = None if settings.insecure or network.is_loopback(host) else read_keys(settings)
    if keys is not None and not keys.authorized.all_names():
        log.warning(
            "%s has no key: append the public line of every worker to it (there: shoal keygen). "
            "Until then none is let in.",
            keys.authorized.path,
        )
    reception = Reception(
        num_workers,
        str(torch.__version__),
        timeout_s=settings.timeout_s,
        hung_s=settings.hung_s,
        status=status,
    )
    try:
        link = ZmqLink(
            0,
            num_workers + 1,
            host,
            keys=keys,
            insecure=settings.insecure,
            timeout_s=settings.timeout_s,
            limit_bytes=settings.limit_bytes,
            hung_s=settings.hung_s,
            port=address.port,
            on_call=reception.on_call,
        )
    except WireError as error:
        if "in use" not in str(error):
            raise
        raise MeetingError(_who_has(address, settings)) from None
    try:
        staff = _gather(link, reception, wait_s, notify)
    except BaseException as error:
        link.close_after(error)  # some may be linked up: they hear why nothing comes of it
        raise
    finally:
        notify("")
    return staff


def _gather(
    link: ZmqLink, reception: Reception, wait_s: float, notify: Callable[[str], None]
) -> Staff:
    begun = time.monotonic()

    def wait_until(condition: Callable[[], bool], limit_s: float = math.inf) -> bool:
        """Whatever it is that we wait for: we say so, and not longer than wait_s in all."""
        deadline = time.monotonic() + limit_s
        while not link.tend(condition, TURN_S):
            waited = time.monotonic() - begun
            text = _waiting(link, reception, waited)
            notify(text)
            if waited >= wait_s:
                raise MeetingError(f"{text} That was long enough.")
            if time.monotonic() >= deadline:
                return False
        return True

    while True:
        wait_until(lambda: not reception.missing)
        for caller, offer in reception.hire():
            link.answer(caller, offer)
        if wait_until(lambda: reception.are_ready, READY_S):
            break
        reception.release()
    name = f"the boss ({socket.gethostname()})"
    roster, offers = reception.roster(link.card, name)
    applications = [each.application for each in reception.hired]
    for caller, offer in offers:
        link.answer(caller, offer)
    try:
        link.connect(roster.cards, roster.names)
        link.settle(LINK_S, lambda: bool(reception.troubles))
    except WireError as error:
        link.tend(lambda: len(reception.troubles) == reception.wanted, WORD_S)
        raise MeetingError(_why_not(reception, roster.names, error)) from None
    reception.dismiss()
    return Staff(link, roster.names, applications)


def _why_not(reception: Reception, names: list[str], error: WireError) -> str:
    """Why those who came could not be linked up; where a worker knows the cause, in its words."""
    told = sorted(reception.troubles.items())
    causes = [each for each in told if not each[1].is_consequence] or told
    reasons = [f"{names[rank]}: {trouble.reason}" for rank, trouble in causes] or [str(error)]
    return "the workers came, but not all could be linked up.\n" + "\n".join(reasons)


def _waiting(link: ZmqLink, reception: Reception, waited_s: float) -> str:
    silent = [each.application.who for each in reception.unready]
    here = [each.application.who for each in reception.present]
    here = [who for who in here if who not in silent]
    text = (
        f"waiting for {reception.missing + len(silent)} of {reception.wanted} workers at "
        f"{link.card.endpoint}, {waited_s:.0f} s"
    )
    if len(here) > MAX_NAMED:
        text += f"; {len(here)} are here"
    elif here:
        text += f"; here: {'; '.join(here)}"
    if silent:
        text += f"; hired, and no word since from: {'; '.join(silent)}"
    for who, why in reception.turned_away.items():
        text += f"; turned away: {who} ({why})"
    return text + "."


def _who_has(address: Address, settings: LinkSettings) -> str:
    """Whose port it is that we cannot have."""
    taken = f"{address.endpoint} is taken"
    host = "127.0.0.1" if address.host == "0.0.0.0" else address.host
    try:
        other = ask(Address(host, address.port).endpoint, settings)
    except (WireError, MeetingError):
        return f"{taken} by some other program. Listen on another port."
    names = ", ".join(f"{w.host} (pid {w.pid})" for w in other.workers) or "no worker yet"
    return (
        f"{taken} by another boss: {other.script} (pid {other.pid} of {other.user} on "
        f"{other.host}), with {names}, at step {other.step}. Wait for it, or listen on another "
        "port and start workers for that."
    )
