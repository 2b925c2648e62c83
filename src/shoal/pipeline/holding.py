"""What one pipeline holds of the network, and nobody else: given back when nobody uses it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from shoal.pipeline.replicas import Averages
from shoal.wire.link import Link


class Holding:
    """A link and the groups of replicas that were made for one pipeline."""

    def __init__(self, link: Link | None, averages: Averages | None) -> None:
        """link: None: it uses one of the script's."""
        self.link = link
        self._averages = averages
        self._user: Callable[[], object] = lambda: None  # nobody, if it cannot be made

    def is_of(self, user: object) -> None:
        self._user = weakref.ref(user)

    @property
    def is_unused(self) -> bool:
        return self._user() is None

    def give_back(self) -> None:
        if self.link is not None:
            self.link.close()
        if self._averages is not None:
            self._averages.leave()

    def close(self) -> None:
        """At the end of the crew, which closes links and groups itself."""
        if self._averages is not None:
            self._averages.close()
