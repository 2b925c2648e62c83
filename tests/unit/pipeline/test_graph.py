"""Models as rows of units: cuts by name, and what must not be parted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import ModelError
from shoal.pipeline.graph import (
    check_shared,
    cuts_at,
    modules_in,
    place_of,
    read,
    shared,
    tensors_used,
    unit_of,
)
from shoal.train.models.zoo import ConvNet, MnistCnn, ResidualMlp

WIDTH = 4


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def cut_faults(model: nn.Module, names: list[str], num_stages: int) -> list[str]:
    with pytest.raises(ModelError) as caught:
        cuts_at(read(model), names, num_stages)
    return caught.value.faults


# -- reading ---------------------------------------------------------------------------------------


class Inputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = square(), square()

    def forward(self, x: Tensor, y: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
        v = self.a(x) + y
        return self.b(v), v


def test_who_uses_what() -> None:
    graph = read(Inputs())
    assert graph.inputs == ["x", "y", "unused"]
    assert graph.units == ["a", "add", "b"]
    assert [node.name for node in graph.nodes()] == graph.units
    output = len(graph.units)
    assert graph.users() == {
        "x": [0],
        "y": [1],
        "unused": [],
        "a": [1],
        "add": [2, output],
        "b": [output],
    }


def test_an_input_has_the_name_that_forward_gives_it() -> None:
    """Batches are given by these names. Values have others where a builtin has the name."""

    class Net(nn.Module):
        def forward(self, input: Tensor, max: Tensor, x: Tensor) -> Tensor:
            return input + max + x

    graph = read(Net())
    assert graph.input_names == ["input", "max", "x"]
    assert graph.inputs == ["input_1", "max_1", "x"]
    assert list(graph.users())[:3] == graph.inputs
    assert read(nn.Sequential(square())).input_names == ["input"]


def test_parameters_used_by_themselves_are_no_units() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    graph = read(Net())
    assert graph.units == ["mul"]
    assert graph.users() == {"x": [0], "mul": [1]}


class Odd(nn.Module):
    """Asks for its mode itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x + 1


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def mixed(*inner: nn.Module) -> nn.Sequential:
    """Some modules train, some do not, whatever holds them."""
    model = nn.Sequential(square(), nn.Sequential(nn.BatchNorm1d(WIDTH), square()), *inner)
    model[0].eval()
    model[1].eval()
    model[1][0].train()
    return model


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_as_they_were(training: bool) -> None:
    model = mixed()
    model.training = training
    before = modes(model)
    assert before == [training, False, False, True, False]
    read(model)
    assert modes(model) == before


class Around(nn.Module):
    def __init__(self, problem: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.inner = mixed()
        self.problem = problem

    def forward(self, x: Tensor) -> Tensor:
        return self.problem(self.inner(x), self.training)


@pytest.mark.parametrize(
    "problem",
    [
        lambda x, training: x if x.sum() > 0 else -x,  # cannot be read at all
        lambda x, training: x if training or x.sum() > 0 else -x,  # not in eval()
        lambda x, training: x * 2 if training else x + 1,  # other steps
    ],
    ids=["never", "eval", "differs"],
)
def test_modes_are_as_they_were_after_an_error(problem: Any) -> None:
    model = Around(problem)
    before = modes(model)
    with pytest.raises(ModelError):
        read(model)
    assert modes(model) == before


def test_other_steps_in_eval_are_refused_with_ways_out() -> None:
    with pytest.raises(ModelError) as caught:
        read(Odd())
    text = str(caught.value)
    assert text.startswith("Odd.forward takes other steps in eval() than in train()")
    assert "Ways out" in text
    assert "nn.Dropout" in text


def test_a_module_with_two_ways_that_is_kept_whole_is_one_step() -> None:
    class Whole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                return x
            return x + 1 if x.sum() > 0 else x

    # Readable in train() only, so the steps differ unless it is whole in both.
    assert read(nn.Sequential(square(), Broken())).units == ["_0", "_1"]
    assert read(nn.Sequential(square(), Whole())).units == ["_0", "_1"]


def test_a_module_in_another_mode_than_the_model_keeps_it_where_its_steps_ask() -> None:
    """Read as the model's, dropout would be on in a part that was put to sleep."""

    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(x, 0.5, self.training) + 1

    model = nn.Sequential(square(), Part(), Part())
    assert read(model).units == ["_0", "dropout", "add", "dropout_1", "add_1"]
    model[1].eval()
    assert read(model).units == ["_0", "_1", "dropout", "add"]


def test_a_piece_of_a_buffer_is_the_same_step_in_both_modes() -> None:
    """torch.fx numbers the constants that it finds; the second reading began to count at 1."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())
            self.a = square()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.mask[1] + torch.arange(WIDTH)

    assert read(Net()).units == ["a", "getitem", "mul", "add"]


def test_reading_changes_no_buffer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    read(model)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


# -- which modules are where -----------------------------------------------------------------------


class Own(nn.Linear):
    """torch.fx sees into it, since it is the user's."""


class Scaled(nn.Module):
    """Several steps, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale / x.norm()


class Block(nn.Module):
    """Others inside, a parameter beside them, and steps that are nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.inner = Own(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x + self.shift)) + x


def users_own() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), Own(WIDTH, WIDTH), nn.ReLU(), Scaled(), Own(WIDTH, WIDTH), Block(), square()
    )


def test_modules_of_the_users_own_are_named() -> None:
    graph = read(users_own())
    whole = ["0", "1", "2", "3", "4", "5.shift", "5.inner", "6"]
    assert modules_in(graph, range(len(graph.units))) == whole
    (cut,) = cuts_at(graph, ["4"], 2)
    assert modules_in(graph, range(cut)) == whole[:4]
    assert modules_in(graph, range(cut, len(graph.units))) == whole[4:]
    assert modules_in(graph, range(cut, cut + 1)) == ["4"]


def test_every_parameter_is_in_a_module_that_is_named() -> None:
    model = users_own()
    named = modules_in(graph := read(model), range(len(graph.units)))
    for name, _ in model.named_parameters():
        assert any(f"{name}.".startswith(f"{each}.") for each in named), name


def test_a_parameter_of_the_model_itself_is_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.a = nn.Parameter(torch.ones(WIDTH)), square()
            self.register_buffer("mask", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.a(x + self.table) * self.mask)

    graph = read(Net())
    assert [modules_in(graph, range(i, i + 1)) for i in range(4)] == [
        ["table"], ["a"], ["mul"], ["relu"]
    ]  # fmt: skip


def test_a_unit_has_the_name_that_a_cut_would_take() -> None:
    graph = read(users_own())
    assert graph.names() == [
        "0", "1", "2", "3", "norm", "truediv", "4", "5", "5.inner", "relu", "add_1", "6"
    ]  # fmt: skip
    assert [unit_of(graph, name) for name in graph.names()] == list(range(len(graph.units)))


# -- cuts by name ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("layer1", "layer1_0"),
        ("layer1.0", "layer1_0"),
        ("layer1.2", "layer1_2"),
        ("layer2", "layer2_0"),
        ("layer2.0", "layer2_0"),
        ("layer2.3", "layer2_3"),
        ("fc", "fc"),
        ("flatten", "flatten"),  # a step that is no module
        ("layer2_1", "layer2_1"),  # as the steps are called in reports
        ("layer", None),
        ("layer2.", None),
        ("layer2.9", None),
        ("", None),
    ],
)
def test_the_unit_that_a_module_begins_with(name: str, unit: str | None) -> None:
    graph = read(ConvNet())
    found = unit_of(graph, name)
    assert (None if found is None else graph.units[found]) == unit


def test_names_that_begin_alike() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc10, self.fc1 = square(), square()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc1(self.fc10(x))

    assert unit_of(read(Net()), "fc1") == 1


class Opened(nn.Module):
    """Begins and ends with steps that are no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = square()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * 2).relu()


def test_a_module_begins_with_its_own_first_step() -> None:
    graph = read(nn.Sequential(square(), Opened(), Opened()))
    assert [graph.units[unit_of(graph, n) or 0] for n in ("1", "1.fc", "2")] == [
        "mul", "_1_fc", "mul_1"
    ]  # fmt: skip


def test_a_module_that_is_used_twice_begins_where_it_is_first_used() -> None:
    inner = Opened()
    graph = read(nn.Sequential(square(), inner, square(), inner))
    assert unit_of(graph, "1") == 1


def test_a_modules_name_goes_before_a_steps() -> None:
    """torch.relu comes first and is called `relu` by torch.fx, but the user has a module relu."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = square()
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(self.fc(torch.relu(x)))

    graph = read(Net())
    assert graph.units == ["relu", "fc", "relu_1"]
    assert unit_of(graph, "relu") == 2


def test_cuts_by_name() -> None:
    graph = read(MnistCnn())
    cuts = cuts_at(graph, ["conv3", "fc1"], 3)
    assert [graph.units[cut] for cut in cuts] == ["conv3", "fc1"]
    assert cuts_at(graph, [], 1) == []


def test_an_unknown_name_is_told_near_ones() -> None:
    (fault,) = cut_faults(MnistCnn(), ["conv4"], 2)
    assert fault.startswith("cut conv4: the model has no module of that name. Did you mean conv")
    assert "It has: conv1, pool1, conv2, pool2, conv3, pool3, fc1, fc2." in fault


def test_a_name_that_is_like_no_other() -> None:
    (fault,) = cut_faults(MnistCnn(), ["zzz"], 2)
    assert "Did you mean" not in fault
    assert "It has: conv1" in fault


def test_a_long_list_of_names_is_cut_short() -> None:
    (fault,) = cut_faults(nn.Sequential(*(square() for _ in range(40))), ["zzz"], 2)
    assert fault.endswith("28, 29, ....")


def test_a_module_that_computes_nothing_is_not_called_unknown() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused = square(), square(), square()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    (fault,) = cut_faults(Net(), ["unused"], 2)
    assert "cut unused" in fault
    assert "no module of that name" not in fault


def test_the_first_module_is_no_place_for_a_cut() -> None:
    for name in ("layer1", "layer1.0"):
        (fault,) = cut_faults(ConvNet(), [name], 2)
        assert fault.startswith(f"cut {name}: is where the model begins")


@pytest.mark.parametrize("names", [["fc2", "conv2"], ["fc1", "fc1"]])
def test_cuts_in_the_wrong_order(names: list[str]) -> None:
    (fault,) = cut_faults(MnistCnn(), names, 3)
    assert fault == f"cut {names[1]}: comes no later than the cut before it."


@pytest.mark.parametrize(
    ("names", "num_stages", "says"),
    [
        (["fc1"], 3, "it takes 2 cuts to make 3 stages; 1 given: fc1."),
        (["conv2", "fc1"], 2, "it takes 1 cut to make 2 stages; 2 given: conv2, fc1."),
        ([], 2, "it takes 1 cut to make 2 stages; 0 given: none."),
        (["fc1"], 1, "it takes 0 cuts to make 1 stage; 1 given: fc1."),
    ],
)
def test_the_wrong_number_of_cuts(names: list[str], num_stages: int, says: str) -> None:
    assert cut_faults(MnistCnn(), names, num_stages) == [says]


def test_all_faults_of_cuts_at_once() -> None:
    faults = cut_faults(MnistCnn(), ["conv1", "fc2", "fc3", "conv2"], 3)
    assert [fault.partition(":")[0] for fault in faults] == [
        "cut conv1", "cut fc3", "cut conv2", "it takes 2 cuts to make 3 stages; 4 given"
    ]  # fmt: skip


# -- parameters that are shared --------------------------------------------------------------------


class Tied(nn.Module):
    """The weights of the embedding are those of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.middle = square()
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(x))).softmax(dim=-1)


class TiedByMemory(Tied):
    """Two parameters, which lie in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.zeros(10, WIDTH))
        self.head.weight.data = self.embed.weight.data


class Twice(nn.Module):
    """One module, used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.middle = square(), square()

    def forward(self, x: Tensor) -> Tensor:
        return self.ends(self.middle(self.ends(x))).relu()


class ByItself(nn.Module):
    """A parameter that two functions use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.middle = square()

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.middle(functional.linear(x, self.weight)), self.weight).relu()


class OfAnother(nn.Module):
    """A function uses what belongs to a module that is called too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = square(), square()

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.middle(self.first(x)), self.first.weight).relu()


class InAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, WIDTH))
        self.middle = square()

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.cat([self.token, x]))
        return torch.cat([x, self.token]).relu()


class Buffered(nn.Module):
    """Not a parameter, but batch norm would count in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.middle = nn.BatchNorm1d(WIDTH, affine=False), square()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.middle(self.norm(x))).relu()


@pytest.mark.parametrize(
    "kind", [Tied, TiedByMemory, Twice, ByItself, OfAnother, InAList, Buffered]
)
def test_what_shares_parameters_must_not_be_parted(kind: type[nn.Module]) -> None:
    graph = read(kind())
    assert len(graph.units) == 4
    assert shared(graph) == [(0, 2)]
    check_shared(graph, [])
    check_shared(graph, [3])
    for cuts in ([1], [2], [1, 2, 3]):
        with pytest.raises(ModelError) as caught:
            check_shared(graph, cuts)
        (fault,) = caught.value.faults
        what = "buffers (norm.running_mean, " if kind is Buffered else "parameters ("
        assert f"{graph.units[0]} and {graph.units[2]} share {what}" in fault
        assert f"the cut at {graph.units[cuts[0]]} would part them" in fault
        assert "Cut elsewhere" in fault
        assert "torch.cat" not in fault, "one needs what the other gives"


def test_a_module_for_two_inputs_may_be_called_once() -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = square()

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return self.encoder(x) - self.encoder(other.tanh())  # type: ignore[no-any-return]

    with pytest.raises(ModelError, match=r"or call encoder once, .* in one batch \(torch.cat\)\."):
        check_shared(read(Twins()), [1])


def test_a_module_used_three_times_is_a_chain() -> None:
    inner = square()
    graph = read(nn.Sequential(inner, nn.ReLU(), inner, nn.ReLU(), inner))
    assert shared(graph) == [(0, 2), (2, 4)]
    with pytest.raises(ModelError) as caught:
        check_shared(graph, [1, 3])
    assert len(caught.value.faults) == 2


def test_nothing_is_shared_in_the_zoo() -> None:
    for model in (MnistCnn(), ConvNet(), ResidualMlp(8)):
        graph = read(model)
        assert shared(graph) == []
        check_shared(graph, list(range(1, len(graph.units))))
        used = set().union(*tensors_used(graph))
        assert used == {place_of(t) for t in [*model.parameters(), *model.buffers()]}


def test_a_parameter_that_is_returned_must_be_where_it_is_used() -> None:
    """For a loss that weighs it, say: its gradient comes from both."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = square(), square()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.b(self.a(x)), self.a.weight

    with pytest.raises(ModelError, match=r"share parameters \(a.weight\)"):
        check_shared(read(Net()), [1])
