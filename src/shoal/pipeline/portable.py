"""A stage as data, for a worker that has torch and shoal but none of the user's code; and back.

    boss                                               worker
    data, tensors = to_data(stage)
    pack(data) ── bytes ─────────────────────────────> module = from_data(unpack(...), allowed)
    tensors    ── a message ─────────────────────────> fill(module, ...)

Data says what there is (modules by class and attributes, tensors by dtype and shape, steps); it has
no values of tensors, and nothing in it is executed or unpickled. A worker refuses it before any
tensor is sent. Both modes of a stage are one module there: they share all that they use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shoal.errors import ModelError
from shoal.pipeline import known, literals
from shoal.pipeline.literals import Literal, NotPlain
from shoal.pipeline.sources import sources_of
from shoal.pipeline.staged import StageModule, graphs_of, stubborn_in
from shoal.pipeline.steps import Step, steps_of
from shoal.wire.slots import DTYPE_NAMES

INTERNALS = frozenset(vars(nn.Module()))
"""What every module keeps for itself: no attribute of those that travel."""
_REMADE = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes of recurrent layers that are made of others."""


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class TensorData(_Data, frozen=True, array_like=True):
    """A parameter or buffer, without its values."""

    dtype: str
    shape: list[int]
    is_parameter: bool
    requires_grad: bool


class ModuleData(_Data, frozen=True):
    """A module. What it has is named by number: one that has two names stays one."""

    kind: str
    """Its class, as `module:name`; nothing for the root."""
    training: bool
    attributes: dict[str, Literal]
    parameters: dict[str, int | None]
    buffers: dict[str, int | None]
    transient: list[str]
    """Buffers that are not part of the state."""
    children: dict[str, int | None]
    """Numbers below its own, so that no module is inside itself."""


class Data(_Data, frozen=True):
    """A stage."""

    tensors: list[TensorData]
    modules: list[ModuleData]
    """The last one is the root."""
    sources: dict[str, str]
    """Of modules that define classes of the user's, or are imported there: digests of their files
    (sources.py)."""
    training: list[Step]
    evaluating: list[Step] | None = None
    """None: the same."""
    stubborn: dict[str, tuple[bool, bool]] = {}
    """Modules that do not follow train() and eval(): the mode that they then have."""


def pack(data: Data) -> bytes:
    return msgspec.msgpack.encode(data)


def unpack(content: bytes) -> Data:
    """Raises ModelError for what `pack` did not make."""
    try:
        return msgspec.msgpack.decode(content, type=Data)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"what came is no stage: {error}") from error


def tensors_in(module: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, each by the first of its names; the same ones on both sides."""
    seen: set[int] = set()
    found = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


# -- to data ---------------------------------------------------------------------------------------


def to_data(stage: StageModule) -> tuple[Data, dict[str, torch.Tensor]]:
    """A stage as data; and the tensors that must go with it, by name: all that have values.

    Raises ModelError with all that cannot be sent.
    """
    writer = _Writer()
    writer.module(stage)
    programs = [steps_of(graph, writer.faults) for graph in graphs_of(stage)]
    if faults := list(dict.fromkeys([*writer.faults, *_shared_memory(stage)])):
        raise ModelError(faults)
    other = programs[-1] if programs[-1] != programs[0] else None
    stubborn = stubborn_in(stage)
    data = Data(writer.tensors, writer.modules, writer.sources, programs[0], other, stubborn)
    return data, {n: t.detach() for n, t in tensors_in(stage).items() if not t.is_meta}


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class _Writer:
    """Writes modules down, inner ones first, and everything once."""

    def __init__(self) -> None:
        self.tensors: list[TensorData] = []
        self.modules: list[ModuleData] = []
        self.sources: dict[str, str] = {}
        self.faults: list[str] = []
        self._of_kinds: dict[type[nn.Module], str] = {}
        self._of_tensors: dict[int, int] = {}
        self._of_modules: dict[int, int] = {}
        """Numbers, by id: the caller holds them all."""

    def module(self, module: nn.Module, path: str = "") -> int:
        if id(module) in self._of_modules:
            return self._of_modules[id(module)]
        children = {
            name: None if child is None else self.module(child, _under(path, name))
            for name, child in module._modules.items()
        }
        who = f"{path} ({type(module).__name__})"
        self.faults += [
            f"{who} has {name[1:].replace('_', ' ')}, which cannot be sent."
            for name, hooks in vars(module).items()
            if name in INTERNALS and name.endswith("hooks") and hooks
        ]
        written = ModuleData(
            self._kind(module, who) if path else "",
            module.training,
            self._attributes(module, who) if path else {},
            self._tensors(module._parameters, path),
            self._tensors(module._buffers, path),
            sorted(module._non_persistent_buffers_set & set(module._buffers)),
            children,
        )
        self.modules.append(written)
        self._of_modules[id(module)] = len(self.modules) - 1
        return self._of_modules[id(module)]

    def _kind(self, module: nn.Module, who: str) -> str:
        kind = type(module)
        try:
            if kind not in self._of_kinds:
                name, source = known.name_of_class(kind)
                self.sources |= sources_of(kind) if source else {}
                self._of_kinds[kind] = name
        except ModelError as error:
            self.faults.append(f"{who} cannot be sent: {error}")
            return ""
        return self._of_kinds[kind]

    def _attributes(self, module: nn.Module, who: str) -> dict[str, Literal]:
        found = {}
        for name, value in vars(module).items():
            if name in INTERNALS or (isinstance(module, nn.RNNBase) and name in _REMADE):
                continue
            try:
                found[name] = literals.written(value, _written_operation)
            except NotPlain as error:
                advice = " Make it a buffer." if isinstance(value, torch.Tensor) else ""
                self.faults.append(
                    f"{who}: its attribute {name!r} is {error}, which cannot be sent.{advice}"
                )
        return found

    def _tensors(
        self, tensors: Mapping[str, torch.Tensor | None], path: str
    ) -> dict[str, int | None]:
        return {
            name: None if tensor is None else self._tensor(tensor, _under(path, name))
            for name, tensor in tensors.items()
        }

    def _tensor(self, tensor: torch.Tensor, path: str) -> int:
        if id(tensor) not in self._of_tensors:
            self.faults += [f"{path} {fault}" for fault in _tensor_faults(tensor)]
            dtype = DTYPE_NAMES.get(tensor.dtype, "")
            shape = [] if is_lazy(tensor) else list(tensor.shape)
            is_parameter = isinstance(tensor, nn.Parameter)
            self.tensors.append(TensorData(dtype, shape, is_parameter, tensor.requires_grad))
            self._of_tensors[id(tensor)] = len(self.tensors) - 1
        return self._of_tensors[id(tensor)]


def _written_operation(value: Any) -> Literal:
    name = known.name_of(value)
    return literals.refuse(value) if name in (None, known.GETATTR) else ["function", name]


def _tensor_faults(tensor: torch.Tensor) -> Iterator[str]:
    if is_lazy(tensor):
        yield "has no shape yet: run the model once before it is sent."
        return
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        yield f"is a {type(tensor).__name__} of layout {tensor.layout}, which cannot be sent."
    if tensor.dtype not in DTYPE_NAMES:
        yield f"is of {tensor.dtype}, which cannot be sent."
    if tensor.grad_fn is not None:
        yield "is computed from other parameters outside of forward(), which cannot be sent."
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        yield "has hooks, which cannot be sent."


def _shared_memory(root: nn.Module) -> Iterator[str]:
    """Two parameters in one place, which a worker would take for two."""
    first: dict[int, str] = {}
    for name, parameter in root.named_parameters():
        if not (is_lazy(parameter) or parameter.is_meta or parameter.numel() == 0):
            other = first.setdefault(parameter.data_ptr(), name)
            if other != name:
                yield (
                    f"{other} and {name} are two parameters with the same memory, which cannot be "
                    "sent. Let both names be one nn.Parameter."
                )
