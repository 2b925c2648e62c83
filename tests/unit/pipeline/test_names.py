"""Names in a model's state: several of one tensor, and names that are nobody's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.errors import ModelError
from shoal.pipeline.names import Names


def square() -> nn.Linear:
    return nn.Linear(2, 2, bias=False)


class Several(nn.Module):
    """Layers by name and in a list; a weight that is tied; one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = square(), square(), square()
        self.layers = nn.ModuleList([self.first, self.second])
        self.head = square()
        self.head.weight = self.second.weight


USED = {"first.weight", "second.weight"}


def test_a_tensor_is_known_by_all_its_names() -> None:
    names = Names.of(Several(), USED)
    assert names.same["layers.0.weight"] == ["first.weight", "layers.0.weight"]
    assert names.same["head.weight"] == ["second.weight", "layers.1.weight", "head.weight"]
    assert names.strays == ["unused.weight"]


def test_a_state_is_completed_by_other_names() -> None:
    names = Names.of(Several(), USED)
    one, other = torch.ones(2, 2), torch.zeros(2, 2)
    state = names.completed({"first.weight": one, "second.weight": other, "unused.weight": one})
    assert set(state) == set(Several().state_dict())
    assert torch.equal(state["layers.0.weight"], one)
    assert torch.equal(state["head.weight"], other)
    assert state["head.weight"].data_ptr() != other.data_ptr()


def test_what_was_said_last_counts() -> None:
    """As load_state_dict of a plain model has it."""
    model = Several()
    state = {name: torch.full((2, 2), float(n)) for n, name in enumerate(model.state_dict())}
    last = Names.of(model, USED).last(state)
    model.load_state_dict(state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(last[name], tensor), name


def test_weights_that_are_tied_by_memory_are_one() -> None:
    model = nn.Sequential(square(), square())
    model[1].weight.data = model[0].weight.data
    assert Names.of(model, {"0.weight"}).strays == []


def test_names_that_are_nobodys() -> None:
    def rename(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
        for name in list(state):
            state["net." + name] = state.pop(name)

    model = nn.Sequential(square())
    model.register_state_dict_post_hook(rename)
    with pytest.raises(ModelError, match=r"has net.0.weight, which is the name of no parameter"):
        Names.of(model, {"0.weight"})
