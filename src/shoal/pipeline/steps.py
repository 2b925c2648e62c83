"""A stage's steps as data, and a module that takes them one after the other.

    0  placeholder    x
    1  call_module    conv1     [["n", 0]]           the value of step 0
    2  call_function  relu      [["n", 1]]           torch.nn.functional.relu
    3  output                   [["l", [["n", 2]]]]

torch.fx writes Python source from a graph and executes it. What comes from elsewhere is not to be
made into source, so here steps are interpreted: every name is looked up in a table (known.py)
before anything is computed.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Literal, NamedTuple, Self

import msgspec
from torch import fx, nn

from shoal.errors import ModelError
from shoal.pipeline import known, literals
from shoal.pipeline.literals import Build, NotPlain
from shoal.pipeline.nodes import line_of
from shoal.pipeline.staged import Stubborn, set_stubborn

MAX_STEPS = 100_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")

Op = Literal["placeholder", "get_attr", "call_module", "call_function", "call_method", "output"]


class Step(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One node of a graph."""

    op: Op
    name: str
    target: str = ""
    """What is called, or where it is: an operation, a method, or the path of a module or tensor."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


# -- to data ---------------------------------------------------------------------------------------


def steps_of(graph: fx.Graph, faults: list[str]) -> list[Step]:
    """faults: gets what cannot be data."""
    number = {node: i for i, node in enumerate(graph.nodes)}

    def reference(value: Any) -> Any:
        return ["n", number[value]] if isinstance(value, fx.Node) else literals.refuse(value)

    found = []
    for node in graph.nodes:
        target = str(node.target) if node.op in ("get_attr", "call_module", "call_method") else ""
        if node.op == "call_function":
            target = known.name_of(node.target) or ""
        faults += [f"step {node.name}: {fault}" for fault in _target_faults(node, target)]
        try:
            args = [literals.written(arg, reference) for arg in node.args]
            kwargs = {name: literals.written(arg, reference) for name, arg in node.kwargs.items()}
        except NotPlain as error:
            faults.append(
                f"step {node.name}: among its arguments is {error}, which cannot be sent."
            )
        else:
            found.append(Step(node.op, node.name, target, args, kwargs))
    return found


def _target_faults(node: fx.Node, target: str) -> list[str]:
    if node.op == "call_function" and not target:
        called: Any = node.target
        has_name = isinstance(called, FunctionType | type)
        name = f"{called.__module__}.{called.__qualname__}" if has_name else str(called)
        return [
            f"{name} is no operation that workers know; most of torch, operator and math are. "
            f"Write it with those, or inside a module that is kept whole.{line_of(node)}"
            if not isinstance(called, type)
            else f"workers make no {name}. Let forward() return a tuple or a dict."
        ]
    if target == known.GETATTR and not known.is_attribute(node.args[1]):
        return [f"workers read no attribute {node.args[1]!r} of a value."]
    if node.op == "call_method" and not known.is_method(target):
        return [f"workers call no method {target!r} of a value."]
    return []


# -- from data -------------------------------------------------------------------------------------

Arguments = Callable[[list[Any]], tuple[list[Any], dict[str, Any]]]
Run = Callable[[nn.Module, list[Any]], Any]
"""Takes a step: in this module, after these values."""


class Action(NamedTuple):
    """A step that has been checked."""

    name: str
    run: Run
    over: list[int]
    """Values that nobody needs after it."""


class Program(NamedTuple):
    """Steps that have been checked."""

    num_inputs: int
    actions: list[Action]
    """One for each value that is made; those that come in are the first values."""
    output: Build
    uses: list[str]
    """Paths of the modules that are called and of the tensors that are read."""


class StepByStep(nn.Module):
    """Takes the steps of its mode. Its children and tensors are named as in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: tuple[Program, ...] = ()
        """For training, and for evaluating."""
        self.stubborn: Stubborn = {}

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        set_stubborn(self, self.stubborn)
        return self

    def forward(self, *given: Any) -> Any:
        program = self.programs[0 if self.training else -1]
        if len(given) != program.num_inputs:
            raise TypeError(f"this stage takes {program.num_inputs} values, not {len(given)}")
        values = [*given, *[None] * len(program.actions)]
        for number, (name, run, over) in enumerate(program.actions, len(given)):
            try:
                values[number] = run(self, values)
            except Exception as error:
                error.add_note(f"in {name} of this stage")
                raise
            for each in over:
                values[each] = None
        return program.output(values)


def read_steps(steps: Sequence[Step], root: nn.Module) -> Program:
    """Believes nothing. root: has the modules and tensors that steps may name, and no others."""
    if len(steps) > MAX_STEPS:
        raise ModelError(f"{len(steps)} steps are more than the limit of {MAX_STEPS}.")
    num_inputs = sum(step.op == "placeholder" for step in steps)
    inner = steps[num_inputs:-1]
    ends = [*steps[:num_inputs], *steps[-1:]]
    if [step.op for step in ends] != ["placeholder"] * num_inputs + ["output"] or any(
        step.op in ("placeholder", "output") for step in inner
    ):
        raise ModelError("steps begin with what comes in and end with what goes out.")
    last_use: dict[int, int] = {}
    actions = []
    output: Build | None = None
    for number, step in enumerate(steps):
        if not _NAME.fullmatch(step.name):
            raise ModelError(f"step {number}: {step.name[:80]!r} is no name.")
        try:
            arguments = _read_arguments(step, number, last_use)
            if step.op == "output":
                output = _read_output(step, arguments)
            elif step.op == "placeholder":
                _check_no_arguments(step)
            else:
                last_use[number] = number  # so far
                is_layer = step.op == "call_module"
                name = f"layer {step.target}" if is_layer else f"step {step.name}"
                actions.append(Action(name, _read_step(step, arguments, root), []))
        except ModelError as error:
            raise ModelError(f"step {number} ({step.name}): {error}") from error
    for number, user in last_use.items():
        if num_inputs <= user < len(steps) - 1:
            actions[user - num_inputs].over.append(number)
    assert output is not None
    uses = [step.target for step in steps if step.op in ("get_attr", "call_module")]
    return Program(num_inputs, actions, output, uses)


def _read_arguments(step: Step, number: int, last_use: dict[int, int]) -> Arguments:
    def reference(literal: list[Any]) -> Build | None:
        match literal:
            case ["n", int(source)] if type(source) is int and 0 <= source < number:
                last_use[source] = number
                return operator.itemgetter(source)
        return None

    args = [literals.read(arg, reference) for arg in step.args]
    kwargs = [(name, literals.read(arg, reference)) for name, arg in step.kwargs.items()]
    return lambda values: (
        [build(values) for build in args],
        {name: build(values) for name, build in kwargs},
    )


def _read_output(step: Step, arguments: Arguments) -> Build:
    if len(step.args) != 1 or step.kwargs:
        raise ModelError("one thing goes out.")
    return lambda values: arguments(values)[0][0]


def _check_no_arguments(step: Step) -> None:
    if step.args or step.kwargs:
        raise ModelError("it takes no arguments.")


def _read_step(step: Step, arguments: Arguments, root: nn.Module) -> Run:
    match step.op:
        case "call_function" if step.target == known.GETATTR:
            return _read_attribute(step, arguments)
        case "call_function":
            return _read_operation(step, arguments)
        case "call_method":
            return _read_method(step, arguments)
        case "call_module":
            return _read_module(step, arguments, root)
        case _:
            return _read_tensor(step, root)


def _read_operation(step: Step, arguments: Arguments) -> Run:
    operation = known.operations().get(step.target)
    if operation is None:
        raise ModelError(f"{step.target[:200]!r} is no operation that a stage may use.")

    def run(root: nn.Module, values: list[Any]) -> Any:
        args, kwargs = arguments(values)
        return operation(*args, **kwargs)

    return run


def _read_attribute(step: Step, arguments: Arguments) -> Run:
    match step.args:
        case [list(), str(name)] if known.is_attribute(name) and not step.kwargs:
            return lambda root, values: known.attribute_of(arguments(values)[0][0], name)
    raise ModelError(f"a stage may not read the attribute {step.args[1:2]!r:.80} of a value.")


def _read_method(step: Step, arguments: Arguments) -> Run:
    name = step.target
    if not known.is_method(name) or not step.args:
        raise ModelError(f"{name[:200]!r} is no method that a stage may call.")

    def run(root: nn.Module, values: list[Any]) -> Any:
        args, kwargs = arguments(values)
        return known.method_of(args[0], name)(*args, **kwargs)

    return run


def _read_module(step: Step, arguments: Arguments, root: nn.Module) -> Run:
    way = step.target.split(".")
    if _at(root, way) is None:
        raise ModelError(f"there is no module {step.target[:200]!r} in this stage.")

    def run(root: nn.Module, values: list[Any]) -> Any:
        args, kwargs = arguments(values)
        module: Any = _at(root, way)
        return module(*args, **kwargs)

    return run


def _read_tensor(step: Step, root: nn.Module) -> Run:
    _check_no_arguments(step)
    *way, name = step.target.split(".")
    owner = _at(root, way)
    if owner is None or (owner._parameters.get(name) is None and owner._buffers.get(name) is None):
        raise ModelError(f"there is no tensor {step.target[:200]!r} in this stage.")

    def run(root: nn.Module, values: list[Any]) -> Any:
        owner: Any = _at(root, way)  # found anew: tensors are replaced, by module.to() for one
        return owner._parameters[name] if name in owner._parameters else owner._buffers[name]

    return run


def _at(root: nn.Module, way: Sequence[str]) -> nn.Module | None:
    """Along children only: getattr would lead anywhere."""
    module: nn.Module | None = root
    for name in way:
        module = None if module is None else module._modules.get(name)
    return module
