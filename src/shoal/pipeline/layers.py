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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shoal.errors import ModelError

COMBINES = ("add", "cat", "args")
_ROUTING_WORDS = {"out_variables", "dependencies", "in_variables"}


class Layer:
    """What to build (`kind`, called with the arguments), or a module already built; and its skips.

    gives: names under which its output is kept for later layers.
    takes: kept values that it takes, besides the output of the layer before.
    combine: how they come together. "add": input + each value, in order. "cat": torch.cat along
    dim 1, input first. "args": the layer is called with them as further arguments. Or a
    module-level function, (input, *taken) -> input, that torch.fx can trace.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the inputs, where the list says so: checked against what the layers make."""

    def __init__(
        self,
        kind: Callable[..., nn.Module],
        /,
        *args: Any,
        gives: str | Sequence[str] = (),
        takes: str | Sequence[str] = (),
        combine: str | Callable[..., Any] = "add",
        **kwargs: Any,
    ) -> None:
        # Nothing is checked here: model_of reports every fault of the list at once.
        self.kind, self.args, self.kwargs = kind, args, kwargs
        self.gives, self.takes, self.combine = _names(gives), _names(takes), combine

    def build(self) -> nn.Module:
        """The module. Raises whatever the class raises."""
        if isinstance(self.kind, nn.Module):
            if self.args or self.kwargs:
                raise TypeError("it is built already and can have no arguments")
            return self.kind
        made: Any = self.kind(*self.args, **self.kwargs)
        if not isinstance(made, nn.Module):
            raise TypeError(f"it makes a {type(made).__name__}, not an nn.Module")
        return made

    def faults(self) -> list[str]:
        """What is wrong with this layer by itself, short of building it."""
        bad_names = [name for name in self.gives + self.takes if not _is_name(name)]
        faults = [f"{name!r} is not a name: names are texts" for name in bad_names]
        if isinstance(self.combine, nn.Module):
            faults.append("combine is a module, whose weights nobody would train: use a function")
        elif self.combine not in COMBINES and not callable(self.combine):
            known = ", ".join(repr(name) for name in COMBINES)
            faults.append(f"combine is {self.combine!r}: it is one of {known} or a function")
        return faults


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
                x = module(_combined(layer.combine, x, taken) if taken else x)
            kept.update(dict.fromkeys(layer.gives, x))
        return x


def _combined(combine: str | Callable[..., Any], x: Any, taken: list[Any]) -> Any:
    if callable(combine):
        return combine(x, *taken)
    return torch.cat((x, *taken), dim=1) if combine == "cat" else sum(taken, start=x)


def model_of(layers: Sequence[Element]) -> nn.Module:
    """The model that `layers` describe, built here and in list order.

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
        faults += [f"{_label(number, layer)}: {fault}" for fault in own_faults]
    if not modules and not faults:
        faults.append("the list of layers is empty: a model has one layer at least")
    faults += _skip_faults(known)
    faults += _shape_faults(known, modules)
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
        for name in filter(_is_name, layer.gives):
            first = givers.setdefault(name, number)
            if first != number:
                yield f"{_label(number, layer)}: gives {name!r}, which layer {first} gives already"
    for number, layer in layers.items():
        for name in filter(_is_name, layer.takes):
            place = f"{_label(number, layer)}: takes {name!r}"
            giver = givers.get(name)
            if giver is None:
                near = difflib.get_close_matches(name, givers)
                hint = f": did you mean {' or '.join(map(repr, near))}?" if near else ""
                yield f"{place}, which no layer gives{hint}"
            elif giver == number:
                yield f"{place}, which it gives itself: only earlier layers can be taken from"
            elif giver > number:
                yield f"{place} before it is given, by {_label(giver, layers[giver])}"


# -- shapes ----------------------------------------------------------------------------------------

_Shape: TypeAlias = tuple[int, ...] | None
"""None: not known."""


def _shape_faults(layers: dict[int, Layer], modules: dict[int, nn.Module]) -> Iterator[str]:
    """Where shapes that the list says do not fit: each other, or the layer that they are for.

    Every layer goes by the shapes that are said of it, so that one fault does not hide the next.
    """
    kept: dict[str, _Shape] = {}
    made: dict[int, _Shape] = {}
    for number, layer in layers.items():
        label = _label(number, layer)
        taken = [kept.get(name) if _is_name(name) else None for name in layer.takes]
        coming = [made.get(number - 1), *taken]
        known = [shape if min(shape, default=0) >= 0 else None for shape in layer.shapes]
        said = [*known, *[None] * len(coming)][: len(coming)]
        for what, shape, own in zip(["its input", *layer.takes], coming, said, strict=True):
            if shape is not None and own is not None and shape[1:] != own[1:]:
                yield f"{label}: the list says that {what} is {own}, and it is {shape}"
        both = zip(coming, said, strict=True)
        inputs = [shape if own is None else own for shape, own in both]
        if number in modules and None not in inputs:
            try:
                made[number] = _shape_made(layer, modules[number], inputs)
            except _DoesNotFit as error:
                shown = ", ".join(map(str, inputs))
                yield f"{label}: does not take {shown}: {error.__cause__}"
        kept.update(dict.fromkeys(filter(_is_name, layer.gives), made.get(number)))


class _DoesNotFit(Exception):
    """Raised from what torch says about it."""


def _shape_made(layer: Layer, module: nn.Module, inputs: Sequence[Any]) -> _Shape:
    """Of the output, where that can be told without computing anything."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if any(map(is_lazy, tensors.values())):
        return None
    state = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    dtypes = [tensor.dtype for tensor in state.values() if tensor.dtype.is_floating_point]
    fault: RuntimeError | None = None
    for dtype in ((dtypes or [torch.float32])[0], torch.int64):  # an embedding takes numbers
        try:
            made = _called_on_meta(layer, module, state, inputs, dtype)
        except NotImplementedError:  # which is a RuntimeError, but none about shapes
            return None
        except RuntimeError as error:
            fault = fault or error
        except Exception:  # the code may be the user's, and may want more than a shape
            return None
        else:
            return tuple(made.shape) if isinstance(made, torch.Tensor) else None
    if not _is_plain(layer, module):
        return None
    raise _DoesNotFit from fault


def _called_on_meta(
    layer: Layer,
    module: nn.Module,
    state: dict[str, torch.Tensor],
    inputs: Sequence[Any],
    dtype: torch.dtype,
) -> Any:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        x, *taken = (torch.empty(shape, dtype=dtype, device="meta") for shape in inputs)
        if layer.combine != "args" and taken:
            x, taken = _combined(layer.combine, x, taken), []
        return torch.func.functional_call(module, state, (x, *taken))


def _is_plain(layer: Layer, module: nn.Module) -> bool:
    """Whether it takes one tensor, of which it needs no values: then its error is about shapes."""
    if callable(layer.combine) or (layer.combine == "args" and layer.takes):
        return False
    return all(type(each).__module__.startswith("torch.nn.") for each in module.modules())


def _names(names: Any) -> tuple[Any, ...]:
    return tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (names,)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name != ""


def _label(number: int, layer: Layer | None) -> str:
    if layer is None:
        return f"layer {number}"
    return f"layer {number} ({getattr(layer.kind, '__name__', type(layer.kind).__name__)})"
