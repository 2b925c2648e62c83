"""Lists of layers: the model that one would have written by hand, or every fault at once."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from shoal.errors import ModelError
from shoal.pipeline.layer import Layer
from shoal.pipeline.layers import model_of, needs_only_torch

WIDTH = 16


class WrappedLinear(nn.Module):
    """As a user writes one for such lists: it knows of the names and takes the values itself."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        out_variables: list[str] | None = None,
        dependencies: list[str] | None = None,
    ) -> None:
        super().__init__()
        assert out_variables is None, "the model does the routing"
        assert dependencies is None, "the model does the routing"
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.linear(x if residual is None else x + residual)


class QuietLinear(nn.Linear):
    """Knows of the names, but its forward has no room for the values."""

    def __init__(self, out_variables: Any = None, dependencies: Any = None, **kwargs: int) -> None:
        super().__init__(**kwargs)


class StrictLinear(nn.Linear):
    """Cannot be built without being told its names."""

    def __init__(self, *, out_variables: list[str], **kwargs: int) -> None:
        super().__init__(**kwargs)
        self.told = out_variables


class Residual(nn.Module):
    """The list of `residual`, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, WIDTH)
        self.giver = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.taker = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.giver(self.first(x).relu())
        x = self.middle(kept.relu()).relu()
        return self.last(self.taker(x + kept).relu()).sigmoid()


class Pair(nn.Module):
    """Two further inputs that count differently, so that their order shows."""

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return x + 2 * first + 3 * second


def gated(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


def residual(wrapped: type[nn.Module]) -> list[Any]:
    """The first seed's own example, narrower."""
    square = {"in_features": WIDTH, "out_features": WIDTH}
    return [
        (nn.Linear, {"in_features": 1, "out_features": WIDTH}, (32, 1)),
        (nn.ReLU, {}, (32, WIDTH)),
        (wrapped, {**square, "out_variables": ["res_1"]}, [(32, WIDTH)]),
        (nn.ReLU, {}, (32, WIDTH)),
        (nn.Linear, square, (32, WIDTH)),
        (nn.ReLU, {}, (32, WIDTH)),
        (
            wrapped,
            {**square, "dependencies": ["res_1"], "out_variables": []},
            [(32, WIDTH), (32, WIDTH)],
        ),
        (nn.ReLU, {}, (32, WIDTH)),
        (nn.Linear, {"in_features": WIDTH, "out_features": 1}, (32, WIDTH)),
        (nn.Sigmoid, {}, (32, 1)),
    ]


def faults_of(layers: Any) -> list[str]:
    with pytest.raises(ModelError) as caught:
        model_of(layers)
    return caught.value.faults


def same_when_traced(model: nn.Module, *shape: int) -> Tensor:
    x = torch.randn(*shape)
    out = model(x)
    assert torch.equal(fx.symbolic_trace(model)(x), out)
    return out


@pytest.mark.parametrize("wrapped", [nn.Linear, WrappedLinear, QuietLinear])
@pytest.mark.parametrize("traced", [False, True])
def test_the_seeds_residual_is_the_model_by_hand(wrapped: type[nn.Module], traced: bool) -> None:
    torch.manual_seed(5)
    by_hand = Residual()
    torch.manual_seed(5)
    model = model_of(residual(wrapped))
    if traced:
        model = fx.symbolic_trace(model)
    x = torch.randn(32, 1)
    expected, found = by_hand(x), model(x)
    assert torch.equal(found, expected)
    expected.square().mean().backward()
    found.square().mean().backward()
    pairs = list(zip(by_hand.parameters(), model.parameters(), strict=True))
    assert len(pairs) == 10
    for p, q in pairs:
        assert torch.equal(p, q)
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(q.grad, p.grad)


def test_a_list_is_left_as_it_was() -> None:
    layers = residual(nn.Linear)
    model_of(layers)
    assert layers[2][1]["out_variables"] == ["res_1"]
    assert model_of(layers)(torch.randn(3, 1)).shape == (3, 1)


def test_shapes_are_kept_on_the_layers() -> None:
    shapes = [layer.shapes for layer in model_of([*residual(nn.Linear), nn.ReLU()]).layers]
    assert shapes[0] == ((32, 1),)
    assert shapes[6] == ((32, WIDTH), (32, WIDTH))
    assert shapes[10] == ()


def test_a_copy_is_a_model_of_its_own() -> None:
    model = model_of([Layer(nn.Linear(4, 4), gives="a"), Layer(nn.ReLU, takes="a")])
    copied = copy.deepcopy(model)
    x = torch.randn(2, 4)
    before = model(x)
    nn.init.zeros_(copied.get_submodule("0").weight)
    assert torch.equal(model(x), before)
    assert not torch.equal(copied(x), before)


def test_the_graph_shows_each_layer_and_each_skip() -> None:
    graph = fx.symbolic_trace(model_of(residual(nn.Linear))).graph
    calls = [node.target for node in graph.nodes if node.op == "call_module"]
    assert calls == [str(number) for number in range(10)]
    (skip,) = [node for node in graph.nodes if node.op == "call_function"]
    assert [source.target for source in skip.args] == ["5", "2"]
    assert [user.target for user in skip.users] == ["6"]


def test_built_in_the_order_of_a_sequential() -> None:
    torch.manual_seed(7)
    by_torch = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 3))
    torch.manual_seed(7)
    model = model_of(
        [
            Layer(nn.Linear, 4, 5),
            (nn.ReLU, {}),
            [nn.LayerNorm, {"normalized_shape": 5}],
            Layer(nn.Linear, in_features=5, out_features=3),
        ]
    )
    expected = by_torch.state_dict()
    assert list(model.state_dict()) == list(expected) == [
        "0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"
    ]  # fmt: skip
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    x = torch.randn(2, 4)
    assert torch.equal(model(x), by_torch(x))


def test_modules_are_used_as_they_are() -> None:
    shared = nn.Linear(4, 4)
    model = model_of([shared, nn.ReLU(), shared])
    x = torch.randn(2, 4)
    assert torch.equal(model(x), shared(shared(x).relu()))
    assert len(list(model.parameters())) == 2
    same_when_traced(model, 2, 4)


def test_a_module_already_built_can_give() -> None:
    giver = nn.Linear(4, 4)
    model = model_of([Layer(giver, gives="a"), nn.ReLU(), Layer(nn.Identity, takes="a")])
    x = torch.randn(2, 4)
    assert model.get_submodule("0") is giver
    assert torch.equal(model(x), giver(x).relu() + giver(x))


def test_built_on_meta_and_traced_there() -> None:
    with torch.device("meta"):
        model = model_of(residual(nn.Linear))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    traced = fx.symbolic_trace(model)
    assert traced(torch.empty(32, 1, device="meta")).shape == (32, 1)


def two_inputs(last: Layer) -> tuple[nn.Module, Tensor]:
    model = model_of([Layer(nn.Linear, 4, 4, gives="a"), Layer(nn.ReLU, gives="b"), last])
    return model, torch.randn(2, 4)


def test_add_in_order() -> None:
    model, x = two_inputs(Layer(nn.Identity, takes=["a", "b"]))
    a = model.get_submodule("0")(x)
    assert torch.equal(model(x), a.relu() + a + a.relu())
    same_when_traced(model, 2, 4)


def test_cat_puts_the_input_first() -> None:
    model, x = two_inputs(Layer(nn.Identity, takes=["a", "b"], combine="cat"))
    a = model.get_submodule("0")(x)
    assert torch.equal(model(x), torch.cat([a.relu(), a, a.relu()], dim=1))
    assert same_when_traced(model, 2, 4).shape == (2, 12)


def test_cat_is_along_the_channels_of_a_picture() -> None:
    model = model_of(
        [
            Layer(nn.Conv2d, 3, 8, 3, padding=1, gives="wide"),
            nn.ReLU(),
            Layer(nn.Conv2d, 16, 2, 1, takes="wide", combine="cat"),
        ]
    )
    assert same_when_traced(model, 2, 3, 5, 5).shape == (2, 2, 5, 5)


def test_args_in_order() -> None:
    model, x = two_inputs(Layer(Pair, takes=["a", "b"], combine="args"))
    a = model.get_submodule("0")(x)
    torch.testing.assert_close(model(x), a.relu() + 2 * a + 3 * a.relu())
    same_when_traced(model, 2, 4)


def test_a_function_combines() -> None:
    model, x = two_inputs(Layer(nn.Identity, takes="a", combine=gated))
    a = model.get_submodule("0")(x)
    assert torch.equal(model(x), a.relu() * torch.sigmoid(a))
    same_when_traced(model, 2, 4)


def test_several_take_one_value_and_one_gives_several() -> None:
    model = model_of(
        [
            Layer(nn.Linear, 4, 4, gives=("a", "same", "unused")),
            Layer(nn.ReLU, gives="b"),
            Layer(nn.Linear, 4, 4, takes="a"),
            Layer(nn.Linear, 4, 4, takes=["a", "b"]),
            Layer(nn.Linear, 4, 4, takes="same"),
        ]
    )
    first, _, second, third, fourth = model.children()
    x = torch.randn(2, 4)
    a = first(x)
    b = a.relu()
    assert torch.equal(model(x), fourth(third(second(b + a) + b + a) + a))
    same_when_traced(model, 2, 4)
    graph = fx.symbolic_trace(model).graph
    uses = Counter(len(node.users) for node in graph.nodes if node.target == "0")
    assert uses == {4: 1}  # the layer after it, and three skips


def test_in_variables_is_another_word() -> None:
    square = {"in_features": 4, "out_features": 4}
    model = model_of(
        [
            (nn.Linear, {**square, "out_variables": "a"}),
            (nn.ReLU, {"in_variables": ["a"], "dependencies": []}),
        ]
    )
    x = torch.randn(2, 4)
    a = model.get_submodule("0")(x)
    assert torch.equal(model(x), (a + a).relu())


def test_a_class_that_requires_its_names_is_told() -> None:
    kwargs = {"in_features": 4, "out_features": 4, "out_variables": ["a"]}
    model = model_of([(StrictLinear, kwargs), (nn.ReLU, {"dependencies": ["a"]})])
    assert model.get_submodule("0").told == ["a"]


def test_a_value_that_nobody_takes_is_no_fault() -> None:
    assert model_of([Layer(nn.ReLU, gives="a")])(torch.ones(1)) == 1


SQUARE = {"in_features": 4, "out_features": 4}


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([], ["the list of layers is empty"]),
        (
            [Layer(nn.ReLU, gives="res_1"), Layer(nn.ReLU, takes="res1")],
            ["layer 1 (ReLU)", "takes 'res1', which no layer gives", "did you mean 'res_1'?"],
        ),
        (
            [Layer(nn.ReLU, takes="a"), nn.Tanh(), Layer(nn.Linear, 1, 1, gives="a")],
            ["layer 0 (ReLU)", "takes 'a' before it is given", "by layer 2 (Linear)"],
        ),
        ([Layer(nn.ReLU, gives="a", takes="a")], ["layer 0", "'a', which it gives itself"]),
        (
            [Layer(nn.ReLU, gives="a"), Layer(nn.Tanh, gives=["b", "a"])],
            ["layer 1 (Tanh)", "gives 'a', which layer 0 gives already"],
        ),
        ([nn.ReLU(), 3], ["layer 1", "3 is no Layer"]),
        ([nn.ReLU], ["layer 0", "ReLU is a class: write ReLU(...) or Layer(ReLU, ...)"]),
        (
            [nn.ReLU(), Layer(nn.Linear, 4)],
            ["layer 1 (Linear)", "cannot be built: TypeError", "out_features"],
        ),
        ([(nn.Linear, {**SQUARE, "width": 3})], ["layer 0 (Linear)", "'width'"]),
        ([Layer(nn.ReLU(), 4)], ["layer 0 (ReLU)", "built already"]),
        ([Layer(dict)], ["layer 0 (dict)", "makes a dict, not an nn.Module"]),
        ([Layer(nn.ReLU, combine="mul")], ["layer 0", "combine is 'mul'", "'add', 'cat', 'args'"]),
        ([Layer(nn.ReLU, combine=nn.ReLU())], ["layer 0", "combine is a module"]),
        ([Layer(nn.ReLU, gives=3)], ["layer 0", "3 is not a name"]),
        ([Layer(nn.ReLU, takes=[["a"]])], ["layer 0", "['a'] is not a name"]),
        ([(nn.ReLU,)], ["layer 0", "is not (class, kwargs)"]),
        ([(nn.ReLU, {}, (1,), 4)], ["layer 0", "is not (class, kwargs)"]),
        ([(nn.ReLU, (32, 4))], ["layer 0", "is not (class, kwargs)"]),
        ([("Linear", {})], ["layer 0", "'Linear' is not a class of nn.Module"]),
        ([(nn.ReLU, {}, [(1, 2), (1, 2)])], ["layer 0", "not a shape for each input", "2 for 1"]),
        ([(nn.ReLU, {}, [(1, "a")])], ["layer 0", "sizes are whole numbers"]),
        ([(nn.ReLU, {}, 4)], ["layer 0", "4 is not a shape"]),
    ],
)
def test_a_fault(layers: list[Any], says: list[str]) -> None:
    (fault,) = faults_of(layers)
    assert all(part in fault for part in says), fault


def test_two_words_for_what_is_taken() -> None:
    both = {"dependencies": ["a"], "in_variables": ["a"]}
    (fault,) = faults_of([Layer(nn.ReLU, gives="a"), (nn.ReLU, both)])
    assert "keep one" in fault


def test_all_faults_in_one_error() -> None:
    layers = [
        Layer(nn.Linear, 4, gives="res_1"),
        "ReLU",
        Layer(nn.ReLU, takes="res_2", combine="mul"),
        Layer(nn.ReLU, takes=["late", "res_1"]),
        Layer(nn.ReLU, gives=["late", "res_1"]),
        ("Linear", {"out_variables": ["odd"]}),
        Layer(nn.ReLU, takes="odd"),  # no fault of its own: the one who gives it has one
    ]
    with pytest.raises(ModelError) as caught:
        model_of(layers)
    numbers = Counter(fault.split()[1].rstrip(":") for fault in caught.value.faults)
    assert numbers == {"0": 1, "1": 1, "2": 2, "3": 1, "4": 1, "5": 1}
    assert str(caught.value).count("\n- ") == 6
    assert isinstance(caught.value.__cause__, TypeError)  # for --debug


def test_what_needs_more_than_torch() -> None:
    here = __name__
    assert needs_only_torch(residual(nn.Linear)) == []
    assert needs_only_torch(residual(WrappedLinear)) == [f"{here}.WrappedLinear"]
    assert needs_only_torch(
        [
            nn.Sequential(nn.ReLU(), Pair()),
            Layer(nn.Identity, takes="a", combine=gated),
            Layer(nn.Sequential, QuietLinear(in_features=1, out_features=1)),
            Layer(functools.partial(WrappedLinear, 1), 2),
        ]
    ) == [f"{here}.{name}" for name in ("Pair", "gated", "QuietLinear", "WrappedLinear")]


def test_functions_and_values_of_torch_need_no_more() -> None:
    layer = functools.partial(
        nn.TransformerEncoderLayer, 8, 2, activation=functional.gelu, dtype=torch.float32
    )
    assert needs_only_torch([Layer(layer), Layer(nn.ReLU, takes="a", combine=torch.mul)]) == []
    # Its class is torch's, its code is the user's.
    assert len(needs_only_torch([fx.symbolic_trace(Pair())])) == 1
