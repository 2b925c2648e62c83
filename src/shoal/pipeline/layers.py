"""A model as a list of layers, with skips by name.

Layer 1 gives "res_1", layer 3 takes it and adds it to its input:

    x ─ 0 ─ 1 ─ 2 ─ (+) ─ 3 ─►
            └─res_1──┘
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import nn

from shoal.errors import ModelError
from shoal.pipeline.layer import Layer, combined, is_name, label_of
from shoal.pipeline.shapes import Shape, shape_faults

_ROUTING_WORDS = {"out_variables", "dependencies", "in_variables"}


Element: TypeAlias = Layer | nn.Module | tuple[Any, ...] | list[Any]


class _Listed(nn.Module):
    """The model that a list describes. Children are named "0", "1", ... as in nn.Sequential."""

    def __init__(self, modules: Sequence[nn.Module], layers: Iterable[Layer]) -> None:
        super().__init__()
        for number, module in enumerate(modules):
            self.add_module(str(number), module)
        self.layers = tuple(layers)

    def forward(self, x: Any) -> Any:
        # Nothing here depends on values, so torch.fx sees a straight line: layers and skips.
        kept: dict[str, Any] = {}
        for number, layer in enumerate(self.layers):
            module = self.get_submodule(str(number))
            taken = [kept[name] for name in layer.takes]
            if layer.combine == "args":
                x = module(x, *taken)
            else:
                x = module(combined(layer.combine, x, taken) if taken else x)
            kept.update(dict.fromkeys(layer.gives, x))
        return x


def model_of(layers: Sequence[Element], shape: Shape = None) -> nn.Module:
    """The model that `layers` describe, built here and in list order.

    shape: of a batch, where one is known.

    An element is a Layer, a module, or a tuple (class, kwargs) or (class, kwargs, shapes), whose
    kwargs may hold 'out_variables' (gives) and 'dependencies' or 'in_variables' (takes). Raises
    ModelError with every fault of the list.
    """
    modules: dict[int, nn.Module] = {}
    known: dict[int, Layer] = {}
    faults: list[str] = []
    cause: Exception | None = None
    for number, (layer, own_faults) in enumerate(map(_read, layers)):
        if layer is not None:
            known[number] = layer
            own_faults = own_faults + layer.faults()
        if layer is not None and not own_faults:
            try:
                modules[number] = layer.build()
            except Exception as error:  # the class is the user's: it may raise anything
                own_faults = [f"it cannot be built: {type(error).__name__}: {error}"]
                cause = cause or error
        faults += [f"{label_of(number, layer)}: {fault}" for fault in own_faults]
    if not modules and not faults:
        faults.append("the list of layers is empty: a model has one layer at least")
    faults += _skip_faults(known)
    faults += shape_faults(known, modules, shape)
    if faults:
        raise ModelError(faults) from cause
    return _Listed(list(modules.values()), known.values())


def needs_only_torch(layers: Sequence[Element]) -> list[str]:
    """Names of what the list needs from elsewhere than torch.nn; empty: torch alone can build it.

    Classes, and also functions (combine, factories) and values in the arguments. Elements that
    cannot be read are left to model_of.
    """
    known = [layer for layer, _ in map(_read, layers) if layer is not None]
    parts = [(layer.kind, layer.args, layer.kwargs, layer.combine) for layer in known]
    return list(dict.fromkeys(_foreign_in(parts)))


def _foreign_in(value: Any) -> Iterator[str]:
    """Names of the code in `value` that comes neither with torch nor with Python."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from _foreign_in(part)
    elif isinstance(value, dict):
        yield from _foreign_in(list(value.values()))
    elif isinstance(value, functools.partial):
        yield from _foreign_in([value.func, value.args, value.keywords])
    elif isinstance(value, nn.Module):
        yield from _foreign_in([type(module) for module in value.modules()])
    else:
        module = getattr(value, "__module__", None) or "builtins"
        root = module.partition(".")[0]
        known = root == "torch" or root in sys.stdlib_module_names
        if isinstance(value, type) and issubclass(value, nn.Module):
            known = module.startswith("torch.nn.")  # a torch.fx.GraphModule holds the user's code
        if not known:
            yield f"{module}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _read(element: object) -> tuple[Layer | None, list[str]]:
    """An element as a Layer, and its faults. With faults it may be a Layer for its names only."""
    if isinstance(element, Layer):
        return element, []
    if isinstance(element, nn.Module):
        return Layer(element), []
    if isinstance(element, tuple | list):
        return _read_tuple(element)
    if isinstance(element, type):
        name = element.__name__
        return None, [f"{name} is a class: write {name}(...) or Layer({name}, ...)"]
    return None, [f"{element!r} is no Layer, no nn.Module and no tuple (class, kwargs, shapes)"]


def _read_tuple(element: Sequence[Any]) -> tuple[Layer | None, list[str]]:
    if len(element) not in (2, 3) or not isinstance(element[1], dict):
        return None, [f"{element!r} is not (class, kwargs) or (class, kwargs, shapes)"]
    kind, kwargs, shapes = (*element, ())[:3]
    takes = kwargs.get("dependencies") or kwargs.get("in_variables") or ()
    layer = Layer(kind, gives=kwargs.get("out_variables") or (), takes=takes)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        return layer, [f"{kind!r} is not a class of nn.Module: a tuple begins with one"]
    # A class that was written for such tuples takes the values itself, if its forward has room.
    layer.combine = "args" if _has_room(kind, len(layer.takes)) else "add"
    required = {p.name for p in inspect.signature(kind).parameters.values() if p.default is p.empty}
    removed = _ROUTING_WORDS - required
    layer.kwargs = {key: value for key, value in kwargs.items() if key not in removed}
    faults = []
    if kwargs.get("dependencies") and kwargs.get("in_variables"):
        faults.append("'dependencies' and 'in_variables' are two words for one thing: keep one")
    try:
        layer.shapes = _shapes(shapes, 1 + len(layer.takes))
    except (TypeError, ValueError) as error:
        faults.append(f"{shapes!r} is not a shape for each input: {error}")
    return layer, faults


def _has_room(kind: type[nn.Module], num_taken: int) -> bool:
    """Whether forward can be called with the input and `num_taken` further arguments."""
    try:
        inspect.signature(kind.forward).bind("self", "input", *range(num_taken))
    except TypeError:
        return False
    return True


def _shapes(shapes: Any, num_inputs: int) -> tuple[tuple[int, ...], ...]:
    """One shape, of the input from the layer before, or a list of one for each input."""
    if all(isinstance(size, int) for size in shapes):
        return (tuple(shapes),) if shapes else ()
    if len(shapes) != num_inputs:
        raise ValueError(f"{len(shapes)} for {num_inputs}")
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        raise ValueError("sizes are whole numbers")
    return tuple(tuple(shape) for shape in shapes)


def _skip_faults(layers: dict[int, Layer]) -> Iterator[str]:
    givers: dict[str, int] = {}
    for number, layer in layers.items():
        for name in filter(is_name, layer.gives):
            first = givers.setdefault(name, number)
            if first != number:
                place = label_of(number, layer)
                yield f"{place}: gives {name!r}, which layer {first} gives already"
    for number, layer in layers.items():
        for name in filter(is_name, layer.takes):
            place = f"{label_of(number, layer)}: takes {name!r}"
            giver = givers.get(name)
            if giver is None:
                near = difflib.get_close_matches(name, givers)
                hint = f": did you mean {' or '.join(map(repr, near))}?" if near else ""
                yield f"{place}, which no layer gives{hint}"
            elif giver == number:
                yield f"{place}, which it gives itself: only earlier layers can be taken from"
            elif giver > number:
                yield f"{place} before it is given, by {label_of(giver, layers[giver])}"
