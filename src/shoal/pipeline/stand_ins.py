"""Stand for values while a model is read: steps note themselves, other questions are refused."""

from __future__ import annotations

import abc
import dis
import itertools
import linecache
import operator
import sys
import typing
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import fx

from shoal.pipeline.nodes import OPERATORS_IN_PLACE
from shoal.pipeline.unseen import is_users


class StepProxy(fx.Proxy):
    """A value while a model is read, of which nobody knows what kind of thing it will be.

    torch.fx itself would say that it is no tensor, and no tuple, and take it for different from
    all that is in a set: the wrong branch would be read, and trained. It also takes `a += b` for
    `a = a + b`, which is another thing where the same tensor is used by another name.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type[fx.Proxy]:  # type: ignore[override]
        """What isinstance() asks for."""
        if _asks_for_a_kind(sys._getframe(1)):
            self.tracer._refuse("asks what kind of thing a value is (isinstance)")  # type: ignore[attr-defined]
        return type(self)

    def __hash__(self) -> int:
        if is_users(frame := sys._getframe(1)) and _instruction(frame) == "CONTAINS_OP":
            self.tracer._refuse("looks for a value in a set or a dict")  # type: ignore[attr-defined]
        return id(self)

    def __getattr__(self, name: str) -> fx.Proxy:  # type: ignore[override]
        if is_users(frame := sys._getframe(1)) and _calls(frame, "hasattr"):
            self.tracer._refuse("asks what kind of thing a value is (hasattr)")  # type: ignore[attr-defined]
        if name in _VIEWS:  # a step where it is named; torch.fx has one where it is first used
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return StepAttribute(self, name)

    def __setitem__(self, key: Any, value: Any) -> None:
        """A step in place, as x.fill_ is."""
        self.tracer.create_proxy("call_method", "__setitem__", (self, key, value), {})


_VIEWS = ("T", "mT", "H", "mH", "real", "imag")
"""Attributes that are tensors: in which order values are used is that of their gradients' sum."""


class StepAttribute(StepProxy, fx.proxy.Attribute):
    """An attribute of a value, as x.shape; or a method, which is called next."""


_ON_BEHALF = {torch.is_tensor.__code__, torch.is_storage.__code__}
_IN_BETWEEN = ("<frozen abc>", abc.__file__, typing.__file__)
"""isinstance(x, Sequence) comes by there."""


def _asks_for_a_kind(frame: FrameType | None) -> bool:
    """Whether the user's code, or that of a library, does; torch and we ask for our own ends."""
    while frame is not None and frame.f_code.co_filename.startswith(_IN_BETWEEN):
        frame = frame.f_back
    if frame is None or frame.f_code in _ON_BEHALF:
        return frame is not None
    if not is_users(frame):
        return False
    # Functions of torch that are written in C ask too, of all that they are given.
    return _instruction(frame) in ("LOAD_ATTR", "MATCH_CLASS") or _calls(frame, "isinstance")


def _instruction(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


def _calls(frame: FrameType, name: str) -> bool:
    """Whether it is at a call of that function; where its text is lost: whether it has any."""
    if not _instruction(frame).startswith(("CALL", "PRECALL")):
        return False
    code = frame.f_code
    line, _, begin, _ = next(
        itertools.islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4
    )
    text = linecache.getline(code.co_filename, line) if line else ""
    if not text or begin is None:
        return name in code.co_names
    return name in text.encode()[begin:].decode(errors="replace").partition("(")[0]


def _in_place(name: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    function = getattr(operator, name)

    def change(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return change


for _name in OPERATORS_IN_PLACE:
    setattr(StepProxy, f"__{_name}__", _in_place(_name))


class BufferProxy(StepProxy):
    """A buffer while a model is read: its form is known, its values are not.

    So `self.mask[:n, :n]` can be read where n comes with the batch, as can steps that change a
    buffer; and a forward() cannot branch on a value that is another one later.
    """

    def __init__(self, node: fx.Node, tracer: fx.Tracer, buffer: torch.Tensor) -> None:
        super().__init__(node, tracer)
        self.shape = buffer.shape
        self.ndim = buffer.ndim
        self.dtype = buffer.dtype
        self.device = buffer.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (operator.getitem(self, index) for index in range(len(self)))
