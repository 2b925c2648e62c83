"""How a model is to be spread and trained: what a user says of a pipeline."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any

import torch
from torch import nn

from shoal.errors import ModelError
from shoal.layout import Share
from shoal.pipeline.losses import REDUCTIONS, Loss, loss_faults
from shoal.pipeline.over_stages import thinks_in_vectors
from shoal.settings import ARGUMENTS, counted, near, stage_faults, told


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is to be spread and trained."""

    stages: int
    schedule: str = "1f1b"
    microbatches: int = 1
    cuts: Sequence[str] | None = None
    """Modules that stages 1, 2, ... begin with. None: where it is best, by a short profile."""
    loss: Loss | None = None
    reduction: str = "mean"
    """What the loss is over the samples of a batch: their `mean` or their `sum`."""
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None
    """Gradients of all stages together are scaled down to this norm."""
    inputs: Sequence[str] | None = None
    """Names of the inputs of `forward` that come with every batch. Default: the required ones."""
    memory_bytes: Sequence[int] | None = None
    """What each stage may hold, where cuts are chosen. Default: what its host has free."""
    seed: int = 0
    """Where the model is made here: what its weights begin with."""


@dataclass
class ReplicaPlace:
    """A replica among its like, as a loader sees it."""

    rank: int
    size: int
    device: torch.device
    share: Share | None = None
    """This replica's part of the global batch; its loader sets it."""


def plan_faults(plan: Plan, num_ranks: int) -> list[str]:
    """Every fault that is visible in the values alone, in the words of a script."""
    of_stages = whole_number_faults("stages=", plan.stages)
    of_microbatches = whole_number_faults("microbatches=", plan.microbatches)
    of_cuts = name_faults("cuts=", plan.cuts)
    found = of_stages + of_microbatches + of_cuts
    found += stage_faults(
        num_ranks if of_stages else plan.stages,
        num_ranks,
        plan.schedule,
        1 if of_microbatches else plan.microbatches,
        None if of_cuts or of_stages else plan.cuts,
        ARGUMENTS,
    )
    if plan.reduction not in REDUCTIONS:
        found.append(f"reduction={plan.reduction!r}: must be 'mean' or 'sum'.")
    loss: Any = plan.loss  # a script's types are nobody's business but ours
    if loss is not None and not callable(loss):
        found.append(
            f"{_shown('loss=', loss)}: must be a function (output, target) -> loss, such as "
            "torch.nn.functional.mse_loss."
        )
    elif inspect.isclass(loss) and issubclass(loss, nn.Module):
        found.append(f"loss={loss.__name__}: is a class; give one of it, loss={loss.__name__}().")
    found += loss_faults(loss, plan.reduction)
    norm: Any = plan.clip_norm
    if norm is not None and not (isinstance(norm, float | Real) and float(norm) > 0):
        found.append(f"{_shown('clip_norm=', norm)}: must be a positive number.")
    limits = plan.memory_bytes
    if limits is not None and not (
        _is_list(limits) and all(isinstance(n, int | Real) and float(n) > 0 for n in limits)
    ):
        found.append(f"{_shown('memory_bytes=', limits)}: must be a list of positive numbers.")
    elif limits is not None and not of_stages and len(limits) != plan.stages:
        found.append(
            f"{_shown('memory_bytes=', limits)}: must have a limit for each of "
            f"{counted(plan.stages, 'stage')}; {len(limits)} given."
        )
    seed: Any = plan.seed
    if not isinstance(seed, int | Integral):
        found.append(f"{_shown('seed=', seed)}: must be a whole number.")
    return found + name_faults("inputs=", plan.inputs) + _optimizer_faults(plan)


def whole_number_faults(option: str, value: Any) -> list[str]:
    """Of a count, in a script; one that is too small is a fault as well."""
    if isinstance(value, bool) or not isinstance(value, int | Integral):
        return [f"{_shown(option, value)}: must be a whole number."]
    return [] if int(value) >= 1 else [f"{told(option, value)}: must be at least 1."]


def name_faults(option: str, value: Any) -> list[str]:
    """Of a list of names, in a script."""
    if value is None or (_is_list(value) and all(isinstance(each, str) for each in value)):
        return []
    return [f"{_shown(option, value)}: must be a list of names, such as {option}['conv2']."]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _shown(option: str, value: object) -> str:
    """In one line, whatever it is."""
    text = " ".join(told(option, value).split())
    return text if len(text) <= 80 else f"{text[:76]} ..."


def _optimizer_faults(plan: Plan) -> list[str]:
    optimizer: Any = plan.optimizer
    options = plan.optimizer_options
    if optimizer is None:
        return [
            f"{option}=: is no word of pipeline(); it would be an option of optimizer=, and there "
            f"is none.{near(option, _words(), '=')}"
            for option in options
        ]
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        return [
            f"optimizer=: is made already, for parameters that are not this rank's. Give what "
            f"makes one, and its options: optimizer=torch.optim.{kind}, lr=0.01."
        ]
    if not callable(optimizer):
        return [
            f"{_shown('optimizer=', optimizer)}: must be a class, such as torch.optim.SGD, or a "
            "function of parameters."
        ]
    try:
        signature = inspect.signature(optimizer)
    except ValueError:  # written in C: it will say itself what it does not take
        return []
    try:
        signature.bind([], **options)
        if getattr(optimizer, "__module__", "").startswith("torch.optim"):
            optimizer([no_parameter()], **options)  # which looks at the values
    except (TypeError, ValueError) as error:
        name = getattr(optimizer, "__name__", optimizer)
        meant = [near(option, _words(), "=") for option in options if f"'{option}'" in str(error)]
        return [f"optimizer={name}: {str(error).removesuffix('.')}.{''.join(meant)}"]
    return []


def _words() -> list[str]:
    """Of pipeline(), which takes all others for options of the optimizer."""
    own = [each.name for each in fields(Plan) if each.name != "optimizer_options"]
    return [*own, "transport", "sync", "example", "link"]


def no_parameter() -> nn.Parameter:
    """For an optimizer that has nothing to do; with two dimensions, as Muon takes no others."""
    return nn.Parameter(torch.empty(0, 0))


def terms(plan: Plan) -> list[str]:
    """What every rank must say alike, for their messages to fit together."""
    return [
        f"{plan.stages} stages",
        plan.schedule,
        f"{1 if plan.schedule == 'sequential' else plan.microbatches} micro-batches",
        # Which ones they are is compared where all have found theirs in the model.
        "cuts by a profile" if plan.cuts is None else "cuts given",
        f"loss {_called(plan.loss)}, a {plan.reduction}" if plan.loss else "no loss",
        f"optimizer {_called(plan.optimizer)}" if plan.optimizer else "no optimizer",
        *(f"{name}={_told_alike(value)}" for name, value in plan.optimizer_options.items()),
        f"clip_norm {plan.clip_norm}",
        f"seed {plan.seed}",
    ]


def _called(what: Any) -> str:
    """By its name, which is the same on every rank; an object by its class's."""
    if isinstance(what, functools.partial):
        options = (f"{name}={_told_alike(value)}" for name, value in what.keywords.items())
        return f"{_called(what.func)}({', '.join(options)})"
    return str(getattr(what, "__qualname__", type(what).__qualname__))


def _told_alike(value: Any) -> str:
    """Where every rank says the same if it has the same."""
    if isinstance(value, list | tuple):
        return str(list(map(_told_alike, value)))
    plain = isinstance(value, bool | int | float | str | NoneType)
    return repr(value) if plain else type(value).__qualname__


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """One that computes the loss again, within its step, would do so on one rank alone."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs_it = closure is not None and closure.default is closure.empty
    if needs_it and not thinks_in_vectors(optimizer):
        raise ModelError(
            f"{type(optimizer).__name__}: its step() needs a closure that computes the loss again. "
            "Of such optimizers only torch.optim.LBFGS is known to get on with parameters that are "
            "on several ranks. Use that, or one whose step() needs none."
        )
