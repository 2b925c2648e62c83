"""What a boss tells its workers to do. Orders are data: checked, and never executed as code.

An order goes as a message `[order, tensors]` with tag `order`, and is done in the order it came.
What is wanted back goes as a message of its own, so that nothing waits that need not.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.errors import WireError
from shoal.wire.tree import Tree


class _Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Place(_Order, frozen=True, tag="place"):
    """Hold this stage. Tensors: its parameters and buffers by name; none where `seed` is given."""

    stage: int
    cuts: list[int]
    num_units: int
    ports: list[list[tuple[str, int]]]
    """By stage: values that it gets, and from which stage."""
    aliases: dict[str, str]
    """By value that may be the tensor of others: the first of all those."""
    inputs: list[str]
    makes: list[str]
    """What this stage returns, in order."""
    keeps: list[str]
    """What of it a module of the user's may change later."""
    module: bytes
    """Its steps, in train mode and in eval mode, as data (pipeline/portable.py)."""
    seed: int | None = None
    """Make the weights here, from this seed."""


class MakeOptimizer(_Order, frozen=True, tag="optimizer"):
    """With torch's own class of this name."""

    name: str
    options: dict[str, Any]


class Forward(_Order, frozen=True, tag="forward"):
    """So many micro-batches, whose inputs come to the first stage."""

    call: int
    num_parts: int
    keep: bool
    """For a backward pass."""
    training: bool | None
    """None: every module is as it came."""
    forget: list[int]
    """Calls whose backward pass will never come."""


class ZeroGrad(_Order, frozen=True, tag="zero_grad"):
    """Gradients begin anew."""

    set_to_none: bool = True


class Backward(_Order, frozen=True, tag="backward"):
    """Gradients of the outputs come to the last stage."""

    call: int
    num_parts: int
    wants_inputs: bool
    """Whether the boss waits for the gradients of the inputs."""
    zero_grad: ZeroGrad | None = None
    """Before that: this."""


class TrainStep(_Order, frozen=True, tag="train_step"):
    """Forward, loss in the last stage, backward, in the order of a schedule."""

    call: int
    schedule: str
    training: bool | None
    weights: list[float]
    """How much the loss of each micro-batch counts."""
    reduction: str
    loss: bytes | None
    """As data, where it is another than before; tensors: those that it has."""
    forget: list[int]


class Step(_Order, frozen=True, tag="step"):
    """One step of the optimizer. groups: options that have changed since, if any."""

    groups: list[dict[str, Any]] | None


class Norms(_Order, frozen=True, tag="norms"):
    """Say the norms of your gradients."""

    call: int
    kind: float


class Scale(_Order, frozen=True, tag="scale"):
    """Tensors: what to multiply all gradients by."""


class State(_Order, frozen=True, tag="state"):
    """Send your part of the model's state."""

    call: int


class Times(_Order, frozen=True, tag="times"):
    """Say how long you have worked, and waited."""

    call: int


class Load(_Order, frozen=True, tag="load"):
    """Tensors: your part of a state."""


Order = (
    Place
    | MakeOptimizer
    | Forward
    | Backward
    | TrainStep
    | ZeroGrad
    | Step
    | Norms
    | Scale
    | State
    | Times
    | Load
)


def as_message(order: Order, tensors: Tree = None) -> Tree:
    return [msgspec.to_builtins(order), tensors]


def read_order(message: Tree) -> tuple[Order, Tree]:
    """Believe nothing."""
    if not isinstance(message, list) or len(message) != 2:
        raise WireError("what came is no order")
    try:
        order: Order = msgspec.convert(message[0], Order)
    except (msgspec.ValidationError, AttributeError, TypeError) as error:  # a tensor for a dict
        raise WireError(f"what came is no order: {error}") from error
    return order, message[1]
