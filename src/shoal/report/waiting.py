"""The line that says whom we wait for: rewritten in place on a terminal, now and then elsewhere."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import IO

LOG_TIMES_S = (2, 10, 30)
"""When a log (no terminal) gets the line; afterwards once a minute."""


def waiting_line(out: IO[str]) -> Callable[[str], None]:
    """A function to be told, about once a second, whom we wait for; '' ends the wait."""
    begun: float | None = None
    shown = 0
    on_screen = False

    def show(text: str) -> None:
        nonlocal begun, shown, on_screen
        if not text:
            if on_screen:
                out.write("\r\x1b[2K")
                out.flush()
            begun, shown, on_screen = None, 0, False
            return
        if out.isatty():
            # A line that wraps cannot be rewritten in place: it would fill the screen.
            # Some room is left for the ^C that a terminal shows.
            width = shutil.get_terminal_size().columns - 4
            out.write(f"\r\x1b[2K{text[:width]}")
            out.flush()
            on_screen = True
            return
        begun = time.monotonic() if begun is None else begun
        due = LOG_TIMES_S[shown] if shown < len(LOG_TIMES_S) else 60 * (shown - 2)
        if time.monotonic() - begun >= due - 1:
            print(text, file=out, flush=True)
            shown += 1

    return show
