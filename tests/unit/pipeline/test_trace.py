"""Models read by torch.fx: the same computation, or an error that says where and what to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import functional

from shoal.errors import ModelError
from shoal.pipeline.trace import WAYS_OUT, trace
from shoal.train.models.zoo import ConvNet, MnistCnn, ResidualMlp, TutorialCnn

WIDTH = 4


def steps(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op.startswith("call_")]


def places(graph: fx.Graph) -> list[str]:
    return [node.target for node in graph.nodes if node.op == "placeholder"]


def modules(graph: fx.Graph) -> list[str]:
    return [node.target for node in graph.nodes if node.op == "call_module"]


def check_computes(model: nn.Module, *inputs: Any, names: list[str] | None = None) -> fx.Graph:
    """What was read gives what the model gives."""
    graph = trace(model, names)
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    torch.manual_seed(1)
    expected = model(*inputs)
    torch.manual_seed(1)
    found = fx.GraphModule(model, copied)(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return graph


def fault_of(model: nn.Module, names: list[str] | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        trace(model, names)
    return str(caught.value)


def line_of(function: Callable[..., Any], text: str) -> int:
    """Where in this file a line of `function` stands."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


# -- models of every kind --------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (MnistCnn(), (2, 1, 28, 28)),
        (ConvNet(), (2, 1, 28, 28)),
        (TutorialCnn(), (2, 1, 28, 28)),
        (ResidualMlp(8), (2, 1)),
    ],
    ids=["MnistCnn", "ConvNet", "TutorialCnn", "ResidualMlp"],
)
def test_the_zoo(model: nn.Module, shape: tuple[int, ...], training: bool) -> None:
    check_computes(model.train(training), torch.randn(*shape))


def test_the_steps_of_a_net_are_in_the_order_in_which_it_computes() -> None:
    assert steps(trace(ResidualMlp(8))) == [
        "fc1", "relu", "fc2", "relu_1", "fc3", "relu_2", "add", "fc4", "relu_3", "fc5", "sigmoid"
    ]  # fmt: skip


def test_sequentials_are_opened() -> None:
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ReLU(), nn.Tanh()))
    graph = check_computes(nn.Sequential(inner, nn.Linear(WIDTH, 2)), torch.randn(3, WIDTH))
    assert modules(graph) == ["0.0", "0.1.0", "0.1.1", "1"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        x = self.fc(self.norm(x)).relu()
        return x if skip is None else x + skip


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.named = nn.ModuleDict({"head": nn.Linear(WIDTH, 2)})

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        y = first(x)
        return self.named["head"](second(y, skip=x))


def test_modules_in_modules_are_opened() -> None:
    graph = check_computes(Nested(), torch.randn(3, WIDTH))
    assert modules(graph) == [
        "blocks.0.norm", "blocks.0.fc", "blocks.1.norm", "blocks.1.fc", "named.head"
    ]  # fmt: skip


def test_layers_of_torch_are_one_step() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(WIDTH, 2, 8), nn.Linear(WIDTH, 2))
    assert steps(trace(model)) == ["_0", "_1"]


def test_a_module_that_is_used_twice_is_two_steps() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x).relu())

    graph = check_computes(Net(), torch.randn(3, WIDTH))
    assert steps(graph) == ["fc", "relu", "fc_1"]
    assert modules(graph) == ["fc", "fc"]


@pytest.mark.parametrize(
    "form",
    [
        lambda a, b: (a, b),
        lambda a, b: [a, (b, 3)],
        lambda a, b: {"a": a, "more": {"b": b, "none": None}},
    ],
    ids=["tuple", "list", "dict"],
)
def test_outputs_of_every_form(form: Callable[..., Any]) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return form(x + 1, x * 2)

    check_computes(Net(), torch.randn(3))


def test_parameters_and_buffers_used_by_themselves() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(WIDTH))
            self.register_buffer("shift", torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + self.shift

    graph = check_computes(Net(), torch.randn(3, WIDTH))
    used = [node.target for node in graph.nodes if node.op == "get_attr"]
    assert used == ["scale", "shift"]


def test_on_meta() -> None:
    with torch.device("meta"):
        model = ConvNet()
    assert modules(trace(model))[-1] == "fc"
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_module_whose_result_nobody_takes_stays() -> None:
    """It may count what it sees, as batch norm does."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.norm(x)
            x.sum()
            return x + 1

    assert steps(trace(Net())) == ["norm", "add"]


@pytest.mark.parametrize(
    "change",
    [lambda x: x.relu_(), lambda x: torch.relu_(x), lambda x: functional.relu(x, inplace=True)],
    ids=["method", "torch", "functional"],
)
def test_a_step_in_place_whose_result_nobody_takes_stays(change: Callable[..., Any]) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            change(y)
            return y + 1

    check_computes(Net(), torch.randn(3, WIDTH))


def test_dropout_by_function_depends_on_the_mode() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(x, 0.5, training=self.training)

    for training in (True, False):
        graph = check_computes(Net().train(training), torch.ones(100))
        (node,) = [node for node in graph.nodes if node.op == "call_function"]
        assert node.kwargs["training"] is training


def test_a_model_is_left_as_it_was() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask[1] * torch.arange(WIDTH)

    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace(model)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


# -- inputs ----------------------------------------------------------------------------------------


class Defaults(nn.Module):
    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        scale: float = 2.0,
        times: int = 3,
        flag: bool = True,
        how: str = "sum",
    ) -> Tensor:
        x = x * scale * times if flag else x
        x = x + 1 if how == "sum" else x
        return x if mask is None else x.masked_fill(mask, 0.0)


def test_inputs_with_defaults_are_fixed() -> None:
    graph = check_computes(Defaults(), torch.randn(3, WIDTH))
    assert places(graph) == ["x"]
    assert steps(graph) == ["mul", "mul_1", "add"]  # and no step that checks the others


def test_inputs_with_defaults_that_are_named_come_with_the_batch() -> None:
    x, mask = torch.randn(3, WIDTH), torch.ones(3, WIDTH).bool()
    graph = check_computes(Defaults(), x, mask, names=["x", "mask"])
    assert places(graph) == ["x", "mask"]
    assert "masked_fill" in steps(graph)


def test_names_in_another_order_are_the_same_inputs() -> None:
    assert places(trace(Defaults(), ["mask", "x"])) == ["x", "mask"]


@pytest.mark.parametrize(
    ("default", "kind"),
    [
        ((2, 6), "tuple"),
        (functional.relu, "function"),
        (torch.float64, "dtype"),
        (torch.ones(WIDTH), "Tensor"),
    ],
    ids=["tuple", "function", "dtype", "ones"],
)
def test_a_default_that_is_no_plain_value_is_refused(default: Any, kind: str) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, times: int = 2, other: Any = default) -> Tensor:
            return x * times

    fault = fault_of(Net())
    assert f"Net.forward has an input 'other' whose default is a {kind}: " in fault
    assert "Make it an attribute of the model, or name it in inputs=" in fault
    assert "'times'" not in fault


def test_all_defaults_that_are_no_plain_values_at_once() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, a: Any = (1, 2), b: Any = torch.float64) -> Tensor:
            return x + 1

    with pytest.raises(ModelError) as caught:
        trace(Net())
    assert [fault.split("'")[1] for fault in caught.value.faults] == ["a", "b"]


def test_the_ways_out_for_such_a_default() -> None:
    class Attribute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shape = (2, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x.view(*self.shape)

    class Named(nn.Module):
        def forward(self, x: Tensor, shift: Tensor = torch.ones(WIDTH)) -> Tensor:  # noqa: B008
            return x + shift

    check_computes(Attribute(), torch.randn(3, WIDTH))
    assert places(trace(Named(), ["x", "shift"])) == ["x", "shift"]


def test_an_input_whose_name_begins_like_one_with_a_default() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, mask_kind: Tensor, mask: Tensor | None = None) -> Tensor:
            return x + 1 if mask is None else x * mask

    assert places(trace(Net())) == ["x", "mask_kind"]


def test_an_input_that_is_not_used_stays() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return x + 1

    assert places(trace(Net())) == ["x", "unused"]


def test_further_arguments_that_are_not_used_are_no_inputs() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return x + 1

    assert places(check_computes(Net(), torch.randn(3))) == ["x"]


def test_further_arguments_that_are_used_are_refused() -> None:
    """torch.fx would give the whole batch for `args`, so that args[0] is its first sample."""

    class Net(nn.Module):
        def forward(self, *args: Any) -> Tensor:
            return args[0] + 1

    fault = fault_of(Net())
    assert fault.startswith("Net.forward uses its *args: which inputs a batch has must be said")
    assert fault.endswith(WAYS_OUT)


def test_a_forward_without_a_return() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> None:
            x + 1

    assert fault_of(Net()) == "Net.forward returns nothing: is there a return in it?"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_of_torch_jit_are_refused() -> None:
    """They go on computing with their first weights when a stage has put its own there."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    with pytest.raises(ModelError) as caught:
        trace(nn.Sequential(nn.ReLU(), scripted, nn.Sequential(torch.jit.script(nn.Tanh()))))
    assert [fault.split(" is made by torch.jit")[0] for fault in caught.value.faults] == [
        "1",
        "2.0",
    ]


def test_further_arguments_of_modules_inside() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return x + sum(args) + kwargs["bias"]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x * 2, 3, bias=x)

    check_computes(Net(), torch.randn(3))


def test_only_by_keyword() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
            return x if mask is None else x * mask

    assert places(trace(Net())) == ["x"]


def test_all_wrong_names_at_once() -> None:
    with pytest.raises(ModelError) as caught:
        trace(Defaults(), ["image", "mask", "label"])
    faults = caught.value.faults
    assert len(faults) == 3
    assert "Defaults.forward has no input 'image'" in faults[0]
    assert "it has: x, mask, scale, times, flag, how" in faults[0]
    assert "no input 'label'" in faults[1]
    assert "needs its input 'x', which inputs= leaves out" in faults[2]
    assert str(caught.value).count("\n- ") == 2


# -- what cannot be read ---------------------------------------------------------------------------


class Branches(nn.Module):
    """Its forward depends on values, so torch.fx cannot read it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.inner(x)
        return -x


class HoldsBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = Branches()
        self.tail = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.branches(x))


def test_a_module_that_cannot_be_read_is_kept_whole() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Branches(), Branches(), nn.ReLU())
    graph = check_computes(model, torch.randn(3, WIDTH))
    assert modules(graph) == ["0", "1", "2", "3"]


def test_only_the_innermost_module_is_kept_whole() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), HoldsBranches())
    graph = check_computes(model, torch.randn(3, WIDTH))
    assert modules(graph) == ["0", "1.branches", "1.tail"]


def test_a_model_that_cannot_be_read_is_told_where_and_what_to_do() -> None:
    line = line_of(Branches.forward, "if x.sum()")
    fault = fault_of(Branches())
    assert fault.startswith("Branches cannot be read by torch.fx: ")
    assert f"{__file__}:{line}: if x.sum() > 0:" in fault
    assert fault.endswith(WAYS_OUT)
    for way in ("nn.Module of its own", "nn.Sequential", "shoal.Layer"):
        assert way in fault


@pytest.mark.parametrize("loops", [False, True])
def test_a_forward_that_catches_what_cannot_be_read(loops: bool) -> None:
    """What it then does instead, it would not do with tensors."""

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            try:
                if loops:
                    x = sum(x)
                elif x.sum() > 0:
                    x = x + 1
            except Exception:
                return x
            return x

    line = "x = sum(x)" if loops else "elif x.sum() > 0:"
    assert f"{line_of(Net.forward, line)}: {line}" in fault_of(Net())
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Net())
    assert modules(check_computes(model, torch.randn(3, WIDTH))) == ["0", "1"]


def test_the_cause_is_kept_for_debugging() -> None:
    with pytest.raises(ModelError) as caught:
        trace(Branches())
    assert isinstance(caught.value.__cause__, fx.proxy.TraceError)


def helper(x: Tensor) -> Tensor:
    for row in x:  # nobody knows how many
        x = x + row
    return x


def test_the_line_is_the_innermost_of_the_users_own() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return helper(x)

    line = line_of(helper, "for row")
    assert f"{__file__}:{line}: for row in x:" in fault_of(Net())


def test_modules_in_a_plain_list() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(WIDTH, WIDTH)]

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    fault = fault_of(Net())
    assert "not installed as a submodule" in fault
    assert re.search(r"test_trace\.py:\d+: return self\.layers\[0\]\(x\)", fault)


class Odd:
    """No value that a graph can hold."""


class TakesOdd(nn.Module):
    def forward(self, x: Tensor, odd: Odd) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.timeout(5)
def test_a_module_that_can_be_neither_opened_nor_kept_whole() -> None:
    """It cannot be read, and what it is given cannot stand in a graph. This once never ended."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TakesOdd()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, Odd())

    fault = fault_of(Net())
    assert "Net cannot be read by torch.fx" in fault
    assert ": return self.inner(x, Odd())" in fault
    assert WAYS_OUT in fault


def test_what_is_wrong_with_what_forward_gives_is_told_with_its_line() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            yield x

    fault = fault_of(Net())
    assert "'generator'" in fault
    assert ": def forward(self, x: Tensor) -> Iterator[Tensor]:" in fault
    assert WAYS_OUT in fault


class Talks(nn.Module):
    """As a model that was parted by hand."""

    def forward(self, x: Tensor) -> Tensor:
        dist.send(x, 1)
        return x.relu()


@pytest.mark.parametrize("model", [Talks(), nn.Sequential(nn.Linear(WIDTH, WIDTH), Talks())])
def test_a_forward_that_talks_to_other_ranks_itself(model: nn.Module) -> None:
    """It was read without a word, and then waited for a rank that was not there to answer."""
    fault = fault_of(model)
    assert "calls torch.distributed.send, which waits for another rank" in fault
    assert ": dist.send(x, 1)" in fault
