"""From data to a stage, on a worker; nothing that came is believed, executed or unpickled."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shoal.errors import ModelError
from shoal.pipeline import known, literals
from shoal.pipeline.known import Allowed
from shoal.pipeline.literals import Build
from shoal.pipeline.portable import INTERNALS, Data, ModuleData, TensorData, tensors_in
from shoal.pipeline.steps import StepByStep, read_steps
from shoal.wire.slots import DTYPES, MAX_DIMENSIONS, MAX_ELEMENTS

MAX_MODULES = 100_000
MAX_PATHS = 1_000_000
MAX_DEPTH = 64
MAX_NAME = 1000


def from_data(data: Data, allowed: Allowed) -> StepByStep:
    """The stage, on the meta device: `fill` gives it values. Believes nothing.

    Raises ModelError. Only what `allowed` names is imported, and only where it is the boss's.
    """
    _check_modules(data.modules)
    known.check_sources(data.sources, allowed)
    tensors = [_read_tensor(each) for each in data.tensors]
    modules: list[nn.Module] = []
    find = functools.cache(lambda kind: known.find_class(kind, data.sources, allowed))
    for each in data.modules:
        made = _new(each.kind, find) if each.kind else StepByStep()
        try:
            _furnish(made, each, modules, tensors)
        except Exception as error:  # the class may be the user's: it may raise anything
            raise ModelError(f"{each.kind or 'the stage'}: {error}") from error
        modules.append(made)
    root = modules[-1]
    assert isinstance(root, StepByStep)
    programs = [data.training] if data.evaluating is None else [data.training, data.evaluating]
    root.programs = tuple(read_steps(steps, root) for steps in programs)
    known_paths = {path for path, _ in root.named_modules(remove_duplicate=False)}
    if strangers := [path for path in data.stubborn if path not in known_paths]:
        raise ModelError(f"there is no module {strangers[0][:200]!r} in this stage.")
    root.stubborn = dict(data.stubborn)
    return root


def _check_modules(modules: list[ModuleData]) -> None:
    if not 0 < len(modules) <= MAX_MODULES:
        raise ModelError(f"{len(modules)} modules are none or more than {MAX_MODULES}.")
    paths: list[int] = []
    depths: list[int] = []
    for number, module in enumerate(modules):
        inner = [child for child in module.children.values() if child is not None]
        if not all(0 <= child < number for child in inner):
            raise ModelError(f"module {number}: its children come after it.")
        # A module may have many names, and the modules inside it that many times as many.
        paths.append(1 + sum(paths[child] for child in inner))
        depths.append(1 + max((depths[child] for child in inner), default=0))
        if paths[-1] > MAX_PATHS or depths[-1] > MAX_DEPTH:
            raise ModelError(f"module {number}: modules nested {depths[-1]} deep are too many.")
        if (module.kind == "") != (number == len(modules) - 1):
            raise ModelError(f"module {number}: only the last one has no class.")
    if modules[-1].attributes:
        raise ModelError("the last module has no attributes.")


def _read_tensor(data: TensorData) -> torch.Tensor:
    shape = data.shape
    if data.dtype not in DTYPES:
        raise ModelError(f"{data.dtype[:80]!r} is no dtype of a tensor that can be sent.")
    dtype = DTYPES[data.dtype]
    # Also where one extent is 0: torch multiplies the others all the same.
    num_elements = math.prod(each or 1 for each in shape[: MAX_DIMENSIONS + 1])
    if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 or num_elements > MAX_ELEMENTS:
        raise ModelError(f"a tensor of {len(shape)} dimensions has an impossible shape.")
    if data.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise ModelError(f"a tensor of {dtype} can have no gradient.")
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return _like(tensor, data.is_parameter, data.requires_grad)


def _like(tensor: torch.Tensor, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    if is_parameter:
        return nn.Parameter(tensor, requires_grad)
    return tensor.detach().requires_grad_(requires_grad)


def _new(kind: str, find: Callable[[str], type[nn.Module]]) -> nn.Module:
    """A module that its class has not initialised."""
    found = find(kind)
    try:
        made = found.__new__(found)
        nn.Module.__init__(made)
    except Exception as error:  # the class may be the user's: it may raise anything
        raise ModelError(f"{kind} cannot be made without its __init__: {error!r}") from error
    return made


def _furnish(
    module: nn.Module, data: ModuleData, modules: list[nn.Module], tensors: list[torch.Tensor]
) -> None:
    """What __init__ would have made; written where it lies, past all __setattr__."""
    for name in data.attributes:
        if not _is_name(name) or name in INTERNALS or name.startswith("__"):
            raise ModelError(f"{name[:80]!r} is no attribute that a stage may set.")
    for name in [*data.parameters, *data.buffers, *data.children]:
        if not _is_name(name) or "." in name:
            raise ModelError(f"{name[:80]!r} is no name.")
    inside = vars(module)
    for name, literal in data.attributes.items():
        inside[name] = literals.read(literal, _read_operation)([])
    inside["training"] = data.training
    for name, number in data.parameters.items():
        found = None if number is None else _nth(tensors, number)
        if found is not None and not isinstance(found, nn.Parameter):
            raise ModelError(f"{name} is no parameter.")
        module._parameters[name] = found
    for name, number in data.buffers.items():
        module._buffers[name] = None if number is None else _nth(tensors, number)
    module._non_persistent_buffers_set.update(set(data.transient) & set(data.buffers))
    for name, number in data.children.items():
        module._modules[name] = None if number is None else modules[number]
    _remake(module)


def _is_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME


def _nth(tensors: list[torch.Tensor], number: int) -> torch.Tensor:
    if not 0 <= number < len(tensors):
        raise ModelError(f"there is no tensor {number}.")
    return tensors[number]


def _read_operation(literal: list[Any]) -> Build | None:
    match literal:
        case ["function", str(name)] if name in known.operations() and name != known.GETATTR:
            return lambda values: known.operations()[name]
    return None


def _remake(module: nn.Module) -> None:
    """What layers keep besides, made of their tensors."""
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


def fill(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Give the tensors of a module values, which are not copied; names of those still without.

    Raises ModelError for a tensor that the module has not, or not so.
    """
    mine = tensors_in(module)
    faults = [f"this stage has no tensor {name!r}." for name in tensors if name not in mine]
    faults += [
        f"{name} is {_told(mine[name])} in this stage, and came as {_told(tensor)}."
        for name, tensor in tensors.items()
        if name in mine and _told(tensor) != _told(mine[name])
    ]
    if faults:
        raise ModelError(faults)
    filled = {
        id(mine[name]): _like(
            tensor, isinstance(mine[name], nn.Parameter), mine[name].requires_grad
        )
        for name, tensor in tensors.items()
    }
    for each in module.modules():
        stores: list[dict[str, Any]] = [each._parameters, each._buffers]
        for store in stores:
            for name, tensor in store.items():
                store[name] = filled.get(id(tensor), tensor)
        _remake(each)
    return [name for name, tensor in tensors_in(module).items() if tensor.is_meta]


def _told(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return f"a {type(value).__name__} that is no dense tensor"
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
