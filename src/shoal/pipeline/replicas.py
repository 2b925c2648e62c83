"""How replicas of a stage agree on its gradients; the door to `replicate`, which is beside us."""

from __future__ import annotations

from typing import Protocol

from torch import nn


class Averages(Protocol):
    """Replaces the gradients of a module by their mean over the replicas of its stage."""

    @property
    def bytes_sent(self) -> int: ...

    def check(self, model: nn.Module) -> None:
        """Raises ModelError where replicas of the whole model would not stay equal."""

    def average(self, module: nn.Module) -> None: ...

    def close(self) -> None: ...

    def leave(self) -> None:
        """As close(), and give back the connections, too, while the crew goes on."""


class Alone:
    """There is one replica."""

    bytes_sent = 0

    def check(self, model: nn.Module) -> None:
        """It is equal to itself."""

    def average(self, module: nn.Module) -> None:
        """Its gradients are the mean."""

    def close(self) -> None:
        """Nothing is held."""

    def leave(self) -> None:
        """Nothing, either."""
