"""What torch.fx does not see when it reads a model: it notes steps on tensors, nothing around them.

A step inside `with torch.no_grad()` would be taken without it, a counter would stand still, and a
random number would be drawn once for all batches: training would go on, and be another one. So all
of that is looked for while a model is read (trace.py).
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from shoal.errors import ModelError

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


class Unseen(Exception):
    """A forward() does what would be lost. The message goes on after the forward's name."""


class LeftOver(ModelError):
    """What stands for a value in one reading is kept somewhere, and came up again after it."""

    def __init__(self) -> None:
        line = users_line(traceback.walk_stack(sys._getframe(1)))
        super().__init__(
            "the model keeps what it has computed for later calls, where nobody can put it back "
            "(functools.lru_cache, a dict outside of the model). It was read by torch.fx, and what "
            "is kept there now is no value. Ways out: compute that in __init__, as a buffer; or "
            "keep it in an attribute of the module." + (f"\n  {line}" if line else "")
        )


class Line(NamedTuple):
    """Of a source file."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {linecache.getline(*self).strip()}"


def users_line(frames: Iterable[tuple[FrameType, int]], until: object = None) -> Line | None:
    """The first in the user's own code. Frames after that of the code `until` are none of it."""
    for frame, number in frames:
        if frame.f_code is until:
            return None
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            return Line(frame.f_code.co_filename, number)
    return None


def is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_NOT_THE_USERS)


# -- around steps ----------------------------------------------------------------------------------


def surroundings() -> dict[str, object]:
    """What changes the steps inside it, by what a user calls it."""
    modes = [
        *torch.overrides._get_current_function_mode_stack(),
        *torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
    ]
    return {
        "torch.no_grad, torch.enable_grad or their like (a torch.autograd.Function has them, and "
        "so has torch.utils.checkpoint with use_reentrant=True)": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        ),
        "torch.autocast": [
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
        ],
        "torch.device or another mode of torch": [
            id(mode) for mode in modes if not isinstance(mode, WatchingWrites)
        ],
        "another default dtype": torch.get_default_dtype(),
        "torch.nn.attention.sdpa_kernel": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ),
    }


# -- what a model keeps ----------------------------------------------------------------------------


@contextmanager
def watching_attributes(told: Callable[[nn.Module, str], None]) -> Iterator[None]:
    """Meanwhile, each attribute of a module that is about to be set is told of."""
    before = nn.Module.__setattr__

    def tell_and_set(module: nn.Module, name: str, value: Any) -> None:
        told(module, name)
        before(module, name, value)

    nn.Module.__setattr__ = tell_and_set  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = before  # type: ignore[method-assign]


@contextmanager
def watching_reads(told: Callable[[nn.Module, str, Any], None]) -> Iterator[None]:
    """Meanwhile, each attribute of a module that it has itself is told of when read."""
    kind: Any = nn.Module
    read = object.__getattribute__

    def read_and_tell(module: nn.Module, name: str) -> Any:
        value = read(module, name)
        if name != "training" and (isinstance(value, _PLAIN) or name in vars(module)):
            told(module, name, value)
        return value

    kind.__getattribute__ = read_and_tell
    try:
        yield
    finally:
        del kind.__getattribute__


_PLAIN = (bool, int, float, complex, str, list, tuple, dict)


class WatchingWrites(TorchFunctionMode):
    """Meanwhile, each tensor that is about to get other values is told of, with all arguments.

    And each that the user's code asks whether it needs a gradient; and that random numbers are
    drawn from dice of the user's own, which may be anywhere.
    """

    def __init__(
        self,
        told: Callable[[torch.Tensor, tuple[Any, ...]], None],
        asked: Callable[[torch.Tensor], None] = lambda tensor: None,
        draws: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._told = told
        self._asked = asked
        self._draws = draws

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _ASKS and is_users(sys._getframe(1)):
            self._asked(args[0])
        if isinstance(kwargs.get("generator"), torch.Generator):
            self._draws()
        if func == _IS_META and sys._getframe(1).f_code.co_filename == nn.init.__file__:
            self._told(args[0], args)  # some of torch's initialisations do nothing on meta
        given = (*args, *kwargs.values())  # torch.nn.init gives its tensor by name
        written = [*(given[:1] if _writes(func) else ()), kwargs.get("out")]
        for each in written:
            for tensor in each if isinstance(each, list | tuple) else [each]:
                if isinstance(tensor, torch.Tensor):
                    self._told(tensor, given)
        return func(*args, **kwargs)


_ASKS = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_NO_WRITES = frozenset({"requires_grad_", "detach_", "share_memory_"})
_OTHER_WRITES = frozenset({torch.Tensor.__setitem__, torch.Tensor.data.__set__})  # type: ignore[attr-defined]


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name.endswith("__"):
        return func in _OTHER_WRITES or name in _OPERATORS
    return name.endswith("_") and name not in _NO_WRITES


_OPERATORS = frozenset(
    f"__i{name}__"
    for name in (
        "add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor",
        "lshift", "rshift",
    )
)  # fmt: skip


def memory_of(tensor: torch.Tensor) -> int:
    """The same for all tensors that lie in the same memory, also on the meta device."""
    if tensor.layout is not torch.strided or nn.parameter.is_lazy(tensor):
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def memory_in(model: nn.Module) -> set[int]:
    """Of all tensors that a model has, as parameters, buffers or plain attributes."""
    plain = [value for module in model.modules() for value in vars(module).values()]
    tensors = [*model.parameters(), *model.buffers(), *plain]
    return {memory_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)}


# -- what is done beside forward() -----------------------------------------------------------------


def fault_of_call(model: nn.Module) -> str:
    """What a call of `model` does beside its class's forward(), which is all that is read."""
    hooks = (
        model._forward_hooks,
        model._forward_pre_hooks,
        model._backward_hooks,
        model._backward_pre_hooks,
    )
    found = ""
    if any(hooks):
        found = "has hooks of its own"
    elif "forward" in vars(model):
        found = "has a forward of its own that is not its class's"
    elif type(model).__call__ is not nn.Module.__call__ and not isinstance(model, fx.GraphModule):
        found = "has a __call__ of its own"
    if not found:
        return ""
    return (
        f"{type(model).__name__} {found}. torch.fx reads only the forward() of a model's class, so "
        "that would be lost. Ways out: put the model into another one, nn.Sequential(model), which "
        "calls it as a whole; or do in forward() what is done there."
    )


# -- twice the same? -------------------------------------------------------------------------------


class Reading(NamedTuple):
    graph: fx.Graph
    constants: dict[str, Any]
    """Tensors that were made by the way, by the names that the graph has for them."""


def first_difference(one: Reading, other: Reading) -> fx.Node | None:
    """The first step that the same model did not take the second time, or otherwise."""
    nodes: list[fx.Node] = list(one.graph.nodes)
    others: list[fx.Node] = list(other.graph.nodes)
    for node, again in zip(nodes, others, strict=False):
        if _step(node) != _step(again):
            return node
        if node.op == "get_attr" and str(node.target) in one.constants:
            values = [each.constants[str(node.target)] for each in (one, other)]
            if not _equal(*values):
                return node
    return None


def _step(node: fx.Node) -> tuple[object, ...]:
    return node.op, node.name, node.target, repr(node.args), repr(node.kwargs)


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return True
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return a.is_meta or torch.equal(a.nan_to_num(), b.nan_to_num())
