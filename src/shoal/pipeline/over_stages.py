"""An optimizer that thinks of all parameters as one vector (LBFGS), where each stage has a part.

What such an optimizer does element by element, every stage does with its own part. Its sums and its
maxima are of the whole vector, so they are put together over the stages. All stages then see the
same numbers, and take the same turns: they compute the loss again equally often.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shoal.wire.link import Link

Evaluate = Callable[[], torch.Tensor]
Vector = torch.Tensor

_JOINED: dict[Any, Callable[[Vector, Vector], Vector]] = {
    Vector.dot: torch.add,
    Vector.sum: torch.add,
    Vector.max: torch.maximum,
}
"""What makes one number of a vector, and how those of its parts become that of the whole."""


class OverStages(TorchFunctionMode):
    """While this is active, sums and maxima of vectors are over the parts of all stages."""

    def __init__(self, link: Link, ranks: Sequence[int]) -> None:
        """ranks: those that hold the stages, in their order."""
        super().__init__()
        self._link = link
        self._ranks = ranks
        self._is_evaluating = False

    def step(self, optimizer: torch.optim.Optimizer, evaluate: Evaluate) -> torch.Tensor:
        """The optimizer's step; the loss before it.

        evaluate: computes the loss, and gradients, of all stages, with the parameters of now.
        """

        def closure() -> torch.Tensor:
            self._is_evaluating = True  # sums in the model and in its loss are its own business
            try:
                return evaluate()
            finally:
                self._is_evaluating = False

        with self:
            loss: torch.Tensor = optimizer.step(closure)  # type: ignore[assignment, arg-type]
        return loss

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        join = None if self._is_evaluating else _JOINED.get(func)
        if join is None:
            return func(*args, **(kwargs or {}))
        vector = args[0]
        mine = func(*args) if vector.numel() else vector.new_zeros(())
        others = [rank for rank in self._ranks if rank != self._link.rank]
        for rank in others:
            self._link.isend(mine, rank, "number of a vector")
        total: torch.Tensor | None = None
        for rank in self._ranks:  # in one order, so that all get the same bits
            part = mine if rank == self._link.rank else self._link.recv(rank, "number of a vector")
            total = part if total is None else join(total, part)
        assert total is not None
        return total.to(vector.device)


def thinks_in_vectors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step must be taken by all stages together, and is known to be torch's own."""
    ours, known = (inspect.unwrap(kind.step) for kind in (type(optimizer), torch.optim.LBFGS))
    return ours is known
