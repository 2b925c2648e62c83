"""`shoal` and `python -m shoal`."""

from __future__ import annotations

import sys

from shoal.errors import EXIT_INTERRUPTED


def main() -> None:
    """Ctrl-C during the imports, which take a moment, ends as quietly as later."""
    try:
        from shoal.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
