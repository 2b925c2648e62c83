"""A deadline for calls that have none, and may be inside C, where no signal is heard."""

from __future__ import annotations

import threading
from collections.abc import Callable


def within(limit_s: float, do: Callable[[], object]) -> None:
    """Do it in a thread, which is left alone if it does not come back in time."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            do()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert not thread.is_alive(), f"after {limit_s:g} s still not back"
    if errors:
        raise errors[0]
