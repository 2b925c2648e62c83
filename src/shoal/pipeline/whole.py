"""What is more than one rank's: the norm of all stages' gradients, and the state of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from shoal.crew import Crew
from shoal.errors import ModelError
from shoal.pipeline.calls import together
from shoal.pipeline.names import Names, State
from shoal.wire.link import Link


def total_norm(norms: list[torch.Tensor]) -> torch.Tensor:
    """Of all parameters' gradients, put together as torch does: dtype by dtype."""
    groups = _group_tensors_by_device_and_dtype([list(norms)])
    row = [norm for (group,), _ in groups.values() for norm in group if norm is not None]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(row))
    return total


@dataclass(frozen=True)
class Whole:
    """A replica of the model, of which each rank has its own stage."""

    crew: Crew
    link: Link
    ranks: Sequence[int]
    """That hold the stages, in their order."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the whole model's state, in its order."""

    def clip(self, module: nn.Module, max_norm: float) -> torch.Tensor:
        """Scale the gradients of all stages so that together they have at most this norm.

        Norms are put together in the order of the model's parameters, as one process does.
        """
        named = [(n, _dense(p)) for n, p in module.named_parameters() if p.grad is not None]
        mine = {name: torch.linalg.vector_norm(values) for name, values in named}
        norms = dict(mine)
        others = [rank for rank in self.ranks if rank != self.crew.rank]
        for rank in others:
            self.link.isend(mine, rank, "norms")
        for rank in others:
            norms |= self.link.recv(rank, "norms")
        order = [name for name in self.shapes if name in norms]
        if not order:  # as in one process, where nothing is trained
            return torch.zeros((), device=self.crew.device)
        total = total_norm([norms[name] for name in order])
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for _, values in named:
            values.mul_(scale)
        return total

    def gather(self, mine: State, names: Names) -> State:
        """The parts of all ranks, on rank 0, as a copy; empty on the others."""
        if 0 not in self.ranks:
            return {}
        if self.crew.rank != 0:
            self.link.send(mine, 0, "state")
            return {}
        state = {name: tensor.clone() for name, tensor in mine.items()}
        with together(self.link, "state_dict()"):
            for rank in self.ranks[1:]:
                state |= self.link.recv(rank, "state")
        state = names.completed(state)
        if gone := [name for name in self.shapes if name not in state]:
            new = [name for name in state if name not in self.shapes]
            raise ModelError(
                f"state_dict(): the stages have no {_few(gone)} any more"
                + (f", but {_few(new)}" if new else "")
                + ": a module was changed after the pipeline was made, and what it has now does "
                "not load into the plain model. Undo it first (after torch.nn.utils.prune: "
                "prune.remove), or change the model before it is given to pipeline()."
            )
        return {name: state[name] for name in self.shapes}

    def spread(
        self,
        state: Mapping[str, torch.Tensor] | None,
        module: nn.Module,
        stray: State,
        names: Names,
    ) -> None:
        """Of a whole state on rank 0, to every rank of the crew its own part.

        stray: what belongs to the state, though no stage has it.
        """
        mine = list(module.state_dict())
        faults = self._faults(state or {}) if self.crew.rank == 0 else []
        told = self.crew.exchange("names of parameters", [mine, faults])
        if told[0][1]:
            raise ModelError(told[0][1])
        if self.crew.rank != 0:
            module.load_state_dict(self.link.recv(0, "state"))
            return
        assert state is not None
        state = names.completed(names.last(state))
        for rank in range(1, self.crew.size):
            self.link.send({name: state[name] for name in told[rank][0]}, rank, "state")
        module.load_state_dict({name: state[name] for name in mine})
        for name, tensor in stray.items():
            tensor.copy_(state[name])

    def _faults(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        """What a plain model's strict load_state_dict would refuse."""
        faults = []
        if missing := [name for name in self.shapes if name not in state]:
            faults.append(
                f"load_state_dict: rank 0 needs the whole state; it has no {_few(missing)}."
            )
        if unknown := [name for name in state if name not in self.shapes]:
            faults.append(f"load_state_dict: the model has no {_few(unknown)}.")
        return faults + [
            f"load_state_dict: {name} is {tuple(state[name].shape)}, and the model's is {shape}."
            for name, shape in self.shapes.items()
            if name in state and tuple(state[name].shape) != shape
        ]


def _dense(parameter: nn.Parameter) -> torch.Tensor:
    """The values of its gradient, to be changed in place; of a sparse one, those that it has."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
