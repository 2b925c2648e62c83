"""Where a script of the project is in a copy of the project."""

from __future__ import annotations

import os
from pathlib import Path


def as_copied(script: str, project: Path) -> str | None:
    """Its path from the project's folder; None: it is outside, and does not come along.

    First as it is written: a link inside the project is copied as a link.
    """
    written = Path(os.path.normpath(project / script))
    real = written.parent.resolve() / written.name
    for path, folder in ((written, project), (real, project.resolve())):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return None
