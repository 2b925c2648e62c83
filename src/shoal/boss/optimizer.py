"""An optimizer whose parameters are on workers. Learning-rate schedulers take it as any other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from shoal.boss.orders import MakeOptimizer, Order, Step, ZeroGrad
from shoal.errors import ModelError

PLAIN = (bool, int, float, str, type(None))


class PlacedOptimizer(torch.optim.Optimizer):
    """Made by `Boss.optimizer`. Its group here has the options, on the workers the parameters."""

    def __init__(
        self,
        order: Callable[[Order], None],
        kind: type[torch.optim.Optimizer],
        options: dict[str, Any],
        num_aborts: Callable[[], int],
    ) -> None:
        """num_aborts: how often workers have dropped orders, which may have been of ours."""
        _check(kind)
        # One made here checks the options, and knows the defaults.
        sample = kind([torch.nn.Parameter(torch.zeros(1, 1))], **options)
        super().__init__([torch.nn.Parameter(torch.zeros(()))], dict(sample.defaults))
        self.num_steps = 0
        self._tell = order
        self._why_left = ""
        self._num_aborts = num_aborts
        order(MakeOptimizer(name=kind.__name__, options=_plain(options)))
        self._sent = num_aborts(), self._options()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise ModelError(
                "a boss's optimizer has one group, of all parameters: param_groups[0] has its "
                "options."
            )
        super().add_param_group(param_group)

    def leave(self, why: str) -> None:
        """The workers have another one, and steps of this would be steps of that."""
        self._why_left = why

    def _order(self, order: Order) -> None:
        if self._why_left:
            raise ModelError(f"this optimizer is gone from the workers: {self._why_left}.")
        self._tell(order)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._order(ZeroGrad(set_to_none=set_to_none))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """On the workers, with the options of now."""
        if closure is not None:
            raise ModelError("a closure would be called on the workers: call the model yourself.")
        sending = self._num_aborts(), self._options()
        self._order(Step(groups=None if sending == self._sent else [sending[1]]))
        self._sent = sending
        self.num_steps += 1

    def _options(self) -> dict[str, Any]:
        return _plain({k: v for k, v in self.param_groups[0].items() if k != "params"})


def _check(kind: type[torch.optim.Optimizer]) -> None:
    """Raises ModelError for what workers cannot make, or cannot step with."""
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise ModelError(
            f"a {type(kind).__name__} is no class of torch.optim: "
            "boss.optimizer(torch.optim.Adam, lr=1e-3), and workers make it for their parameters."
        )
    if kind is torch.optim.Optimizer or getattr(torch.optim, kind.__name__, None) is not kind:
        raise ModelError(
            f"{kind.__module__}.{kind.__name__}: workers know the optimizers of torch.optim."
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ModelError(
            f"{kind.__name__}: its step() calls the model again through a closure, which workers "
            "cannot. Use another one: SGD, Adam, ..."
        )


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """What a message can hold: tensors of one number become numbers."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, tuple | list) and all(isinstance(v, PLAIN) for v in value):
            found[name] = tuple(value)
        elif isinstance(value, PLAIN):
            found[name] = value
        else:
            raise ModelError(f"optimizer: {name}={value!r} cannot be sent to a worker.")
    return found
