"""Which files make a class what it is, each with a digest: two hosts compare them.

They are those of the class and of all its bases, and of the class's own package all that these
import, directly or not, as far as it is loaded here.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import ModelError

NEVER = frozenset({"torch", "shoal", "__main__", "__mp_main__", *sys.stdlib_module_names})
"""Packages whose classes are no code of the user's."""


def package_of(module: str) -> str:
    """The one at the top."""
    return module.partition(".")[0]


def sources_of(kind: type) -> dict[str, str]:
    """By module: the digest of its file. Raises ModelError where a class has no file."""
    modules = [base.__module__ for base in kind.__mro__]
    modules = [module for module in modules if package_of(module) not in NEVER]
    found: dict[str, str] = {}
    while modules:
        module = modules.pop()
        if module in found:
            continue
        file, found[module] = source_of(module)
        if package_of(module) == package_of(kind.__module__):
            modules += filter(_is_loaded_file, _imported(module, file))
    return found


def source_of(module: str) -> tuple[Path, str]:
    """The file that defines a module, and its digest. The module is not executed for this."""
    try:
        spec = importlib.util.find_spec(module)
    except Exception as error:  # packages around it are imported
        raise ModelError(f"the module {module} cannot be found: {error!r}") from error
    if spec is None:
        raise ModelError(f"there is no module {module} here; install it, or set PYTHONPATH.")
    if not spec.has_location or spec.origin is None:
        raise ModelError(f"{module} has no source file to compare.")
    file = Path(spec.origin)
    try:
        return file, hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ModelError(f"{file}, the source of {module}, cannot be read: {error}") from error


def _is_loaded_file(module: str) -> bool:
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return spec is not None and spec.has_location and spec.origin is not None


def _imported(module: str, file: Path) -> Iterator[str]:
    """Names that may be modules of the same package: what is imported, and packages around it."""
    around = file.name == "__init__.py"
    package = module if around else module.rpartition(".")[0]
    for name in [module, *_import_statements(file, package)]:
        if package_of(name) == package_of(module):
            parts = name.split(".")
            yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _import_statements(file: Path, package: str) -> Iterator[str]:
    if file.suffix != ".py":
        return
    try:
        read = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} has changed since it was imported: {error}") from error
    for node in ast.walk(read):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            # What comes from a package may be a module of it, or something else.
            base = "." * node.level + (node.module or "")
            try:
                base = importlib.util.resolve_name(base, package)
            except ImportError:  # of what lies above all packages, which was never executed
                continue
            yield from (f"{base}.{each.name}" for each in node.names)
