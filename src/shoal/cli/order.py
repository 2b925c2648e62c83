"""What the launcher hands to a rank that it starts: all that the rank must know, as one JSON."""

from __future__ import annotations

import msgspec

from shoal.rendezvous.ways import Way
from shoal.settings import TrainSettings


class RankOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    settings: TrainSettings
    way: Way
    interface: str | None
    boss_port: int = 0
    """Where this rank listens as a boss; 0: it is none."""
