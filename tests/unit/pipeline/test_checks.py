"""Checks of a forward() are steps: the others branch on values, which nobody knows in advance."""

from __future__ import annotations

import re
from collections.abc import Callable

import checking
import pytest
import torch
from checking import MOST, WIDTH, Checking
from torch import Tensor, fx, nn

from shoal.errors import ModelError
from shoal.pipeline.trace import trace

CHECKS = [
    checking.by_assert,
    checking.by_two,
    checking.by_a_chain,
    checking.by_its_opposite,
    checking.by_raise,
    checking.by_raise_of_two,
    checking.by_raise_in_the_end,
]
BRANCHES = [
    checking.branches,
    checking.either,
    checking.caught,
    checking.raises_in_a_loop,
    checking.one_of_three,
    checking.caught_by_its_caller,
    checking.until_there_is_no_more,
    checking.each_by_itself,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_check_is_a_step(check: Callable[[Tensor], object]) -> None:
    model = Checking(check)
    read = fx.GraphModule(model, trace(model))
    good, bad = torch.rand(MOST, WIDTH), torch.rand(MOST + 1, WIDTH)
    assert torch.equal(read(good), model(good))
    with pytest.raises((AssertionError, ValueError)):
        model(bad)
    where = r"Checking.forward refuses this batch: .*MOST.* \(checking.py:\d+\)"
    with pytest.raises(AssertionError, match=where):
        read(bad)


def test_a_check_of_values_is_a_step() -> None:
    model = Checking(checking.by_value)
    read = fx.GraphModule(model, trace(model))
    x = torch.rand(2, WIDTH)
    assert torch.equal(read(x), model(x))
    x[1, 2] = torch.nan
    with pytest.raises(AssertionError, match=re.escape("if x.isnan().any():")):
        read(x)


@pytest.mark.parametrize("branch", BRANCHES, ids=lambda branch: branch.__name__)
def test_what_has_two_ways_to_go_on_is_refused(branch: Callable[[Tensor], object]) -> None:
    with pytest.raises(ModelError, match=r"used as inputs to control flow.*\n  .*checking.py:\d+"):
        trace(Checking(branch))


def test_a_module_that_checks_is_read_into() -> None:
    graph = trace(nn.Sequential(Checking(checking.by_assert), nn.Tanh()))
    assert [n.target for n in graph.nodes if n.op == "call_module"] == ["0.layer", "1"]
