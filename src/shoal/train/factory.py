"""`package.module:factory`: the user's own model or data, found by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def is_factory(name: str) -> bool:
    return ":" in name


def find_factory(name: str) -> Callable[[], Any]:
    """The callable that `name` stands for. Raises ImportError, or what the module raises."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ImportError("expected package.module:factory, with something on both sides of ':'")
    here = str(Path.cwd())
    if here not in sys.path:  # an installed command does not look in the folder it is called from
        sys.path.insert(0, here)
    found: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = ", ".join(n for n in dir(found) if not n.startswith("_"))[:200]
            raise ImportError(f"{module_name} has no {attribute!r}; it has: {known}")
        found = getattr(found, part)
    if not callable(found):
        raise ImportError(f"{name} is a {type(found).__name__}, not something to call")
    return found  # type: ignore[no-any-return]


def factory_faults(option: str, name: str) -> list[str]:
    """Import it now, so that a typo is found before any rank is started."""
    try:
        find_factory(name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything at all
        reason = str(error) or type(error).__name__
        if not isinstance(error, ImportError):
            reason = f"importing it raised {type(error).__name__}: {error}"
        return [f"{option} {name}: cannot be imported: {reason}"]
    return []
