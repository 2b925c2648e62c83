"""What a stage that came from elsewhere may name: operations, attributes and classes, in tables.

A worker looks a name up here and nowhere else. No name is followed from attribute to attribute, and
nothing is imported for it, but for classes of packages that the worker's owner has allowed, from
files that are the boss's to the byte.

    torch.nn.functional.relu          an operation
    torch.nn.modules.linear:Linear    a class of torch
    mynet.layers:Router               a class of the user's: only with --allow mynet

This is about what is called. It is no fence around torch: a stage may still ask for more memory or
time than there is, and see what was left in memory that it takes (torch.empty).
"""

from __future__ import annotations

import builtins
import functools
import importlib
import math
import operator
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from shoal.errors import ModelError
from shoal.pipeline.sources import NEVER, package_of, source_of

Operation = Callable[..., Any]


@dataclass(frozen=True)
class Allowed:
    """What the owner of a worker lets stages use, besides torch."""

    packages: frozenset[str] = frozenset()
    """Top-level packages (or modules) whose classes of nn.Module may be imported."""
    imported: WeakKeyDictionary[ModuleType, str] = field(
        default_factory=WeakKeyDictionary, compare=False
    )
    """The digest of each file when it was: what a process has imported stays as it was."""


# -- operations ------------------------------------------------------------------------------------

_SPACES = {
    "torch": torch,
    "torch.nn.functional": nn.functional,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
}
_REFUSED = re.compile(
    # Reach memory, other code or autograd itself ...
    r".*(hook|storage|_ptr|resize|numpy|dlpack|share|backward|apply|stream|load|subclass).*"
    r"|map2?_|new|set_|retain_grad"
    # ... or kernels for numbers that no stage has.
    r"|(fbgemm|quantized|miopen|cudnn|mkldnn|sym)_.*"
)
"""Of what torch counts among its operations, these do more than compute."""

_FURTHER_OPERATIONS = {
    "torch": (
        "arange", "as_strided", "bartlett_window", "blackman_window", "empty", "eye", "fill",
        "full", "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "normal",
        "ones", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
        "result_type", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "vander", "zeros",
    ),
    "torch.nn.functional": (
        "hardsigmoid", "hardswish", "sigmoid", "tanh", "upsample", "upsample_bilinear",
        "upsample_nearest",
    ),
    "torch.fft": ("fftfreq", "rfftfreq"),
}  # fmt: skip
"""What torch does not count among the operations that can be overridden."""

_OPERATORS = (
    "abs", "add", "and_", "concat", "contains", "eq", "floordiv", "ge", "getitem", "gt", "index",
    "inv", "invert", "is_", "is_not", "le", "lshift", "lt", "matmul", "mod", "mul", "ne", "neg",
    "not_", "or_", "pos", "pow", "rshift", "sub", "truediv", "truth", "xor",
    "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift",
    "isub", "itruediv", "ixor",
)  # fmt: skip
_BUILTINS = (
    "abs", "bool", "divmod", "float", "int", "len", "list", "max", "min", "pow", "round", "slice",
    "sum", "tuple",
)  # fmt: skip

GETATTR = "builtins.getattr"
"""The one operation with checks of its own: see `attribute_of`."""


@functools.cache
def operations() -> dict[str, Operation]:
    """What a step may call, by name."""
    everything = torch.overrides.get_overridable_functions()
    overridable = {f for space in _SPACES.values() for f in everything.get(space, [])}
    overridable |= set(everything[torch.functional])
    found: dict[str, Operation] = {}
    for space, module in _SPACES.items():
        for name, value in vars(module).items():
            plain = name.removesuffix("_")
            base = vars(module).get(plain)
            is_known = _is_in(value, overridable) or (plain != name and _is_in(base, overridable))
            is_known = is_known or name in _FURTHER_OPERATIONS.get(space, ())
            if is_known and not name.startswith("_") and not _REFUSED.fullmatch(name):
                found[f"{space}.{name}"] = value
    found |= {f"operator.{name}": getattr(operator, name) for name in _OPERATORS}
    found |= {f"math.{n}": f for n, f in vars(math).items() if callable(f) and n[0] != "_"}
    found |= {f"builtins.{name}": getattr(builtins, name) for name in _BUILTINS}
    found[GETATTR] = getattr
    found["torch._assert"] = torch._assert  # what a check in a forward() becomes (checks.py)
    return found


def _is_in(value: Any, known: set[Any]) -> bool:
    return callable(value) and not isinstance(value, type) and value in known


@functools.cache
def _names() -> dict[Operation, str]:
    return {operation: name for name, operation in reversed(operations().items())}


def name_of(operation: Any) -> str | None:
    """Under which workers know an operation, if they do."""
    try:
        if name := _names().get(operation):
            return name
    except TypeError:  # not hashable
        return None
    # Some of torch's functions are written around one of the same name in C.
    own = str(getattr(operation, "__name__", ""))
    is_inner = getattr(torch._C._VariableFunctions, own, None) is operation
    return f"torch.{own}" if is_inner and f"torch.{own}" in operations() else None


# -- methods and attributes ------------------------------------------------------------------------

_BINARY = (
    "add", "and", "div", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub",
    "truediv", "xor",
)  # fmt: skip
_OTHER_DUNDERS = (
    "abs", "bool", "contains", "eq", "float", "ge", "getitem", "gt", "index", "int", "invert", "le",
    "len", "lt", "ne", "neg", "pos", "setitem",
)  # fmt: skip
_DUNDERS = frozenset(
    f"__{name}__"
    for name in [*(p + name for name in _BINARY for p in ("", "r", "i")), *_OTHER_DUNDERS]
)
_FURTHER_METHODS = (
    "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "stride", "unflatten",
)  # fmt: skip

_PLAIN_METHODS: dict[type, tuple[str, ...]] = {
    torch.Size: ("count", "index", "numel"),
    tuple: ("count", "index"),
    list: ("copy", "count", "index"),
    dict: ("copy", "get", "items", "keys", "values"),
}


@functools.cache
def _methods() -> dict[type, dict[str, Operation]]:
    """By what they are called on."""
    overridable = set(torch.overrides.get_overridable_functions()[torch.Tensor])
    of_tensors = {}
    for name in dir(torch.Tensor):
        method = getattr(torch.Tensor, name)
        is_operation = _is_in(method, overridable) and not _REFUSED.fullmatch(name)
        is_public = name in _DUNDERS or not name.startswith("_")
        if is_public and (is_operation or name in _FURTHER_METHODS):
            of_tensors[name] = method
    others = {
        kind: {name: getattr(kind, name) for name in names}
        for kind, names in _PLAIN_METHODS.items()
    }
    return {torch.Tensor: of_tensors, **others}


def is_method(name: str) -> bool:
    """Whether a step may call it, on a tensor or on what else occurs in forward()."""
    return any(name in of_kind for of_kind in _methods().values())


def method_of(value: Any, name: str) -> Operation:
    """To be called with the value first. Raises ModelError where there is none of that name."""
    for kind, of_kind in _methods().items():
        if isinstance(value, kind) and name in of_kind:
            return of_kind[name]
    raise ModelError(f"a stage may call no method {name!r} of a {type(value).__name__}.")


@functools.cache
def _attributes() -> dict[type, frozenset[str]]:
    """By what they are read from."""
    returned = [kind for kind in vars(torch.return_types).values() if isinstance(kind, type)]
    fields = {field for kind in returned for field in getattr(kind, "__match_args__", ())}
    of_tensors = (
        "H", "T", "data", "device", "dtype", "imag", "is_cpu", "is_cuda", "is_leaf", "is_meta",
        "is_sparse", "itemsize", "layout", "mH", "mT", "nbytes", "ndim", "real", "requires_grad",
        "shape",
    )  # fmt: skip
    return {
        torch.Tensor: frozenset(of_tensors),
        tuple: frozenset(field for field in fields if not field.startswith("_")),
        torch.dtype: frozenset({"is_complex", "is_floating_point", "is_signed", "itemsize"}),
        torch.device: frozenset({"index", "type"}),
    }


def is_attribute(name: Any) -> bool:
    """Whether a step may read it, of a tensor or of what torch's operations return."""
    return isinstance(name, str) and any(name in of_kind for of_kind in _attributes().values())


def attribute_of(value: Any, name: str) -> Any:
    """Raises ModelError where a step may not read it."""
    for kind, of_kind in _attributes().items():
        if isinstance(value, kind) and name in of_kind:
            return getattr(value, name)
    raise ModelError(f"a stage may read no attribute {name!r} of a {type(value).__name__}.")


# -- classes ---------------------------------------------------------------------------------------

_CLASS = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*){0,20}):(?P<name>[A-Za-z_]\w*)", re.A)


@functools.cache
def classes() -> dict[str, type[nn.Module]]:
    """Of torch: those of torch.nn that are ready to compute."""
    inside = [m for m in vars(torch.nn.modules).values() if isinstance(m, ModuleType)]
    return {
        f"{module.__name__}:{name}": kind
        for module in inside
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and issubclass(kind, nn.Module)
        and kind.__module__ == module.__name__
        and not issubclass(kind, LazyModuleMixin)
        and not name.startswith("_")
    }


def name_of_class(kind: type[nn.Module]) -> tuple[str, str]:
    """Its name, and the module whose source must be the same; "" for torch's own."""
    module, name = kind.__module__, kind.__qualname__
    full = f"{module}:{name}"
    if classes().get(full) is kind:
        return full, ""
    if module in ("__main__", "__mp_main__"):
        raise ModelError(
            "it is defined in the script itself, which workers cannot import; move it into a "
            "file of its own."
        )
    if package_of(module) in NEVER:
        raise ModelError(f"{full} is none of the classes of torch.nn that workers know.")
    if not _CLASS.fullmatch(full) or getattr(sys.modules.get(module), name, None) is not kind:
        raise ModelError("workers find classes by name, at the top level of a file; move it there.")
    return full, module


def check_sources(sources: dict[str, str], allowed: Allowed) -> None:
    """Raises ModelError with all files of allowed packages that are not the boss's.

    sources: by module, the digest of the boss's file.
    """
    modules = [module for module in sources if package_of(module) in allowed.packages - NEVER]
    faults: dict[str, str] = {}
    for module in sorted(modules):  # packages first: they are imported to look into them
        if any(module.startswith(f"{other}.") for other in faults):
            continue
        try:
            file, digest = source_of(module)
        except ModelError as error:
            faults[module] = str(error)
            continue
        loaded = sys.modules.get(module)
        if digest != sources[module]:
            faults[module] = _differs(file, module)
        elif loaded and allowed.imported.get(loaded, digest) != digest:
            faults[module] = f"{file} has changed since this worker imported it: start it again."
    _remember({m: d for m, d in sources.items() if m not in faults}, allowed)
    if faults:
        raise ModelError(list(faults.values()))


def _remember(digests: dict[str, str], allowed: Allowed) -> None:
    for module, digest in digests.items():
        if loaded := sys.modules.get(module):
            allowed.imported.setdefault(loaded, digest)


def _differs(file: Path, module: str) -> str:
    return f"{file} is not the same as the boss's {module}. Bring both to the same version."


def find_class(full: str, sources: dict[str, str], allowed: Allowed) -> type[nn.Module]:
    """The class of that name. Nothing is imported that is not allowed, and the boss's source.

    sources: by module, the digest of the boss's file; `check_sources` has compared them.
    """
    if full in classes():
        return classes()[full]
    match = _CLASS.fullmatch(full)
    package = package_of(match["module"]) if match else ""
    if match is None or package in NEVER:
        raise ModelError(f"{full[:200]!r} is none of the classes of torch.nn that stages may use.")
    if package not in allowed.packages:
        raise ModelError(
            f"{full}: code of the model's own runs on a worker only if it is installed and allowed "
            f"there: start the worker with --allow {package}."
        )
    module = match["module"]
    file, digest = source_of(module)
    if digest != sources.get(module):
        raise ModelError(f"{full}: {_differs(file, module)}")
    try:
        found: Any = vars(importlib.import_module(module)).get(match["name"])
    except Exception as error:  # the module is the user's: it may raise anything
        raise ModelError(f"{full}: importing {module} failed: {error!r}") from error
    finally:
        _remember(sources, allowed)
    # Not what it has only imported itself: os.system is in many a module, under a name of its own.
    is_module = isinstance(found, type) and issubclass(found, nn.Module)
    if is_module and (found.__module__, found.__qualname__) == (module, match["name"]):
        kind: type[nn.Module] = found
        _check_bases(kind, full, sources)
        return kind
    raise ModelError(f"{full}: {file} defines no such class of nn.Module.")


def _check_bases(kind: type, full: str, sources: dict[str, str]) -> None:
    """Bases may be of packages that are not allowed: they are loaded now, whoever allowed it."""
    faults = []
    for module in dict.fromkeys(base.__module__ for base in kind.__mro__):
        if package_of(module) not in NEVER:
            file, digest = source_of(module)
            if digest != sources.get(module):
                faults.append(f"{full}: {_differs(file, module)}")
    if faults:
        raise ModelError(faults)
