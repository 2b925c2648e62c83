"""A worker's life: find a boss, work for it, and when it leaves find the next."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable

import torch

from shoal.boss.applying import Employer, apply
from shoal.boss.hand import Hand
from shoal.errors import PeerLost, WireError
from shoal.pipeline.known import Allowed
from shoal.wire.link import HASTE_S


@functools.cache
def prepare() -> None:
    """The first optimizer of a process imports much: rather now than when a boss waits for it."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def serve(
    employer: Employer,
    *,
    allowed: Allowed,
    device: torch.device,
    once: bool,
    notify: Callable[[str], None],
    tell: Callable[[str], None],
) -> None:
    """For one boss after the other; `once`: for one.

    notify: is told whom we wait for. tell: what happens.
    """
    own_id = secrets.token_hex(16)
    while True:
        try:
            contract = apply(employer, own_id, str(device), notify, prepare)
        except (WireError, PeerLost) as error:  # others of this boss's, or it, did not come through
            if once:
                raise
            tell(f"could not work for the boss at {employer.endpoint}: {error}")
            continue
        boss = contract.names[0]
        tell(f"works for {boss} as worker {contract.link.rank} of {contract.link.size - 1}")
        try:
            reason = Hand(contract.link, allowed, device).work()
        except BaseException as error:
            contract.link.close_after(error)
            raise
        contract.link.close(HASTE_S)
        tell(reason)
        if once:
            return
