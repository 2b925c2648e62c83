"""Steps that change what they are given, and cuts that must not come behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import ModelError
from shoal.pipeline.graph import Graph, read
from shoal.pipeline.in_place import check_in_place
from shoal.pipeline.nodes import changes_in_place

WIDTH = 4


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Changes(nn.Module):
    """`a` gives v; a step changes it; and the end uses it once more."""

    def __init__(self, step: Any, is_used_later: bool = True) -> None:
        super().__init__()
        self.a, self.b = square(), square()
        self.step = step
        self.is_used_later = is_used_later

    def forward(self, x: Tensor) -> Tensor:
        v = self.a(x)
        w = self.b(self.step(v))
        return w + v if self.is_used_later else w


STEPS = [
    nn.ReLU(inplace=True),
    nn.Dropout(inplace=True),
    lambda v: v.relu_(),
    lambda v: functional.relu(v, inplace=True),
    lambda v: functional.leaky_relu(v, 0.1, True),
    lambda v: functional.relu_(v),
    lambda v: torch.relu_(v),
    lambda v: torch.sigmoid_(v),
]
IDS = ["ReLU", "Dropout", "method", "relu", "leaky_relu", "F.relu_", "torch.relu_"]
IDS += ["torch.sigmoid_"]
REMEDIES = ["Use inplace=False there."] * 2 + ["Use relu instead of relu_ there"]
REMEDIES += ["Use inplace=False there."] * 2 + ["Use relu instead of relu_ there"] * 2
REMEDIES += ["Use sigmoid instead of sigmoid_ there"]


def changing(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes() if changes_in_place(node, graph.model)]


@pytest.mark.parametrize("step", STEPS, ids=IDS)
def test_steps_in_place_are_known(step: Any) -> None:
    graph = read(Changes(step))
    assert changing(graph) == [graph.units[1]]


@pytest.mark.parametrize(
    "step",
    [
        nn.ReLU(),
        lambda v: v.relu(),
        lambda v: functional.relu(v, inplace=False),
        lambda v: v + 1,
        lambda v: v.__add__(1),
        lambda v: torch.relu(v),
    ],
)
def test_other_steps_are_not(step: Any) -> None:
    assert changing(read(Changes(step))) == []


@pytest.mark.parametrize(("step", "remedy"), list(zip(STEPS, REMEDIES, strict=True)), ids=IDS)
def test_a_change_that_a_later_stage_would_not_see_is_refused(step: Any, remedy: str) -> None:
    graph = read(Changes(step))
    name = graph.units[1]
    assert graph.units == ["a", name, "b", "add"]
    check_in_place(graph, [])
    with pytest.raises(ModelError) as caught:
        check_in_place(graph, [1])
    (fault,) = caught.value.faults
    assert fault.startswith(f"{name} changes a in place, and add uses a later")
    assert remedy in fault
    assert fault.endswith("Or cut elsewhere: not between a and add.")


@pytest.mark.parametrize(
    ("step", "remedy"),
    [
        (lambda v: v.clamp_(min=0), "Use clamp instead of clamp_ there"),
        (lambda v: v.zero_(), "Make a new tensor there"),
    ],
)
def test_the_remedy_is_one_for_that_step(step: Any, remedy: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_in_place(read(Changes(step)), [1])
    assert remedy in str(caught.value)


@pytest.mark.parametrize("step", STEPS, ids=IDS)
def test_a_change_that_nobody_else_sees_is_no_fault(step: Any) -> None:
    graph = read(Changes(step, is_used_later=False))
    for cuts in ([1], [2], [1, 2]):
        check_in_place(graph, cuts)


def test_a_change_that_the_output_would_show() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = square(), square()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            v = self.a(x)
            return self.b(v.relu_()), v

    with pytest.raises(ModelError, match="the output uses a later"):
        check_in_place(read(Net()), [1])


def test_all_faults_in_place_at_once() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = square(), square(), square()

        def forward(self, x: Tensor) -> Tensor:
            v = self.a(x)
            w = self.b(v.relu_())
            return self.c(w.tanh_()) + v + w

    graph = read(Net())
    assert graph.units == ["a", "relu_", "b", "tanh_", "c", "add", "add_1"]
    with pytest.raises(ModelError) as caught:
        check_in_place(graph, [1, 3])
    assert [fault.split()[:3] for fault in caught.value.faults] == [
        ["relu_", "changes", "a"],
        ["tanh_", "changes", "b"],
    ]


VIEWING = {
    "swapdims": lambda v: v.swapdims(0, 1),
    "moveaxis": lambda v: torch.moveaxis(v, 0, 1),
    "adjoint": lambda v: v.adjoint(),
    "unfold": lambda v: v.unfold(0, 2, 2),
    "broadcast_to": lambda v: v.broadcast_to(v.shape),
    "hsplit": lambda v: v.hsplit(2)[0],
    "unsafe_chunk": lambda v: v.unsafe_chunk(2)[0],
    "type_as": lambda v: v.type_as(v),
    "cpu": lambda v: v.cpu(),
    "real": lambda v: torch.real(v),
    "atleast_3d": lambda v: torch.atleast_3d(v),
    "alias": lambda v: torch.ops.aten.alias(v),
    "broadcast_tensors": lambda v: torch.broadcast_tensors(torch.ones(1), v)[1],
    "AlphaDropout": nn.AlphaDropout(0.0),
}


@pytest.mark.parametrize("view", VIEWING.values(), ids=VIEWING)
def test_a_change_through_any_view_is_one_of_what_it_shows(view: Any) -> None:
    """Whatever is not known to make new memory may give back what it was given."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.view = square(), square(), view

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            v = self.view(h)
            w = self.b(x)
            v.mul_(2)
            return h + w

    graph = read(Net())
    with pytest.raises(ModelError, match="mul_ changes a in place, and add uses a later"):
        check_in_place(graph, [graph.units.index("b")])


@pytest.mark.parametrize(
    "step",
    [
        lambda v: v + 1,
        torch.sigmoid,
        lambda v: v @ v,
        lambda v: torch.cat([v, v]),
        lambda v: v.sum(0),
    ],
)
def test_what_makes_new_memory_may_be_changed(step: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = square(), square()

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            step(h).mul_(2)
            return self.b(h)

    graph = read(Net())
    check_in_place(graph, list(range(1, len(graph.units))))
