"""Tensors that are made of what comes with the batch are made anew with every batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from shoal.errors import ModelError
from shoal.pipeline.makers import watching_makers
from shoal.pipeline.trace import trace

WIDTH = 4
PLAIN = torch.arange(4.0)

MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: torch.zeros(x.size(0), WIDTH),
    "zeros of one": lambda x: torch.zeros(x.size(0)).unsqueeze(1),
    "zeros of a shape": lambda x: torch.zeros(x.shape),
    "zeros, with all else": lambda x: torch.zeros(
        x.size(0), WIDTH, dtype=x.dtype, device=x.device, requires_grad=False
    ),
    "ones": lambda x: torch.tril(torch.ones(x.size(0), x.size(0))) @ x,
    "ones by name": lambda x: torch.ones(size=(x.size(0), WIDTH)),
    "empty": lambda x: torch.empty(x.size(0), WIDTH).fill_(2),
    "rand": lambda x: torch.rand(x.size(0), WIDTH),
    "randn": lambda x: torch.randn(x.size(0), WIDTH),
    "tensor": lambda x: torch.tensor(x.size(0)),
    "tensor of a list": lambda x: torch.tensor([x.size(0), 1, 2, x.size(1)], dtype=x.dtype),
    "as_tensor": lambda x: torch.as_tensor(x.size(0)),
    "expand": lambda x: PLAIN.expand(x.size(0), WIDTH),
    "expand to a shape": lambda x: PLAIN.expand(x.shape),
    "new_zeros": lambda x: PLAIN.new_zeros(x.size(0), WIDTH),
    "new_ones": lambda x: PLAIN.new_ones(x.size(0), WIDTH),
    "new_empty": lambda x: PLAIN.new_empty((x.size(0), WIDTH)).fill_(2),
}  # fmt: skip


class Adding(nn.Module):
    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(WIDTH, WIDTH), make

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h + self.make(h)


@pytest.mark.parametrize("make", MADE.values(), ids=list(MADE))
def test_it_is_made_anew(make: Callable[[Tensor], Tensor]) -> None:
    model = Adding(make)
    read = fx.GraphModule(model, trace(model))
    for num_rows in (2, 5):
        x = torch.rand(num_rows, WIDTH)
        torch.manual_seed(num_rows)
        expected = model(x)
        torch.manual_seed(num_rows)
        assert torch.equal(read(x), expected)


def test_torch_is_as_it_was_afterwards() -> None:
    names = ("zeros", "ones", "empty", "rand", "randn", "tensor", "as_tensor")
    before = [getattr(torch, name) for name in names], torch.Tensor.expand
    trace(Adding(MADE["zeros"]))
    assert ([getattr(torch, name) for name in names], torch.Tensor.expand) == before
    assert "expand" not in vars(torch.Tensor)


def test_what_torch_finds_meanwhile_is_its_own() -> None:
    """Where torch.device is used for the first time: it looks once for what it is to change."""
    found = torch.utils._device._device_constructors
    found.cache_clear()
    with watching_makers(), torch.device("cpu"):
        torch.zeros(1)
    assert torch.zeros in found()


def test_a_method_that_somebody_has_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(self: Tensor, *sizes: int) -> Tensor:
        return self.broadcast_to(sizes)

    monkeypatch.setattr(torch.Tensor, "expand", own)
    with watching_makers(), watching_makers():
        assert torch.ones(1).expand(3).shape == (3,)
    assert vars(torch.Tensor)["expand"] is own


def test_dice_of_ones_own_are_refused() -> None:
    dice = torch.Generator().manual_seed(0)
    model = Adding(lambda x: torch.rand(x.size(0), WIDTH, generator=dice))
    with pytest.raises(ModelError, match=r"draws random numbers(.|\n)*test_makers.py:\d+: model"):
        trace(model)
