"""Names in a model's state: several may stand for one tensor, and a stage has it by one of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shoal.errors import ModelError
from shoal.pipeline.graph import place_of

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Names:
    """Of a model's state that is spread over stages."""

    same: dict[str, list[str]]
    """By name: all names of the same tensor, in the model's order."""
    used: Collection[str]
    """Those by which some stage has it."""

    @classmethod
    def of(cls, model: nn.Module, used: Collection[str]) -> Names:
        """Raises ModelError for names that are nobody's."""
        by_place: dict[object, list[str]] = {}
        state = model.state_dict(keep_vars=True)
        for name, tensor in state.items():
            by_place.setdefault((place_of(tensor), tensor.shape, tensor.stride()), []).append(name)
        own = [
            *(name for name, _ in model.named_parameters(remove_duplicate=False)),
            *(name for name, _ in model.named_buffers(remove_duplicate=False)),
        ]
        if others := [name for name in state if name not in {*own, *used}]:
            raise ModelError(
                f"state_dict() of this model has {', '.join(others[:5])}, which is the name of no "
                "parameter or buffer: it is renamed on the way (by a hook, or a state_dict() of "
                "the model's own), and stages do not know how. Rename what pipe.state_dict() gives "
                "instead."
            )
        return cls({name: names for names in by_place.values() for name in names}, used)

    @property
    def strays(self) -> list[str]:
        """Names of tensors that no step uses."""
        return [name for name, same in self.same.items() if not any(n in self.used for n in same)]

    def completed(self, state: Mapping[str, torch.Tensor]) -> State:
        """What stages have, and by its other names."""
        found = dict(state)
        for name, same in self.same.items():
            if name not in found and (known := [each for each in same if each in state]):
                found[name] = state[known[0]].clone()
        return found

    def last(self, state: Mapping[str, torch.Tensor]) -> State:
        """Of a whole state, which may say several things of one tensor: what was said last."""
        return {
            name: state[[n for n in self.same.get(name, [name]) if n in state][-1]]
            for name in state
        }
