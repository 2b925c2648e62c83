"""How a process that ran a rank ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def exit_now(code: int) -> NoReturn:
    """End this process without waiting for threads that are blocked inside torch.

    After a failure or Ctrl-C an operation may still be under way there; an ordinary exit would
    wait for it, or abort when it comes back.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
