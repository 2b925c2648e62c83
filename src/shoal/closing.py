"""Things that are closed when a `with` block ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A context manager for whatever has a close()."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held. Closing twice is no error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.close_after(error)

    def close_after(self, error: BaseException) -> None:
        """The same, where the block ended with an error."""
        self.close()
