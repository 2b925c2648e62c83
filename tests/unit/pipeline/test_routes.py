"""Models cut into stages that all run here, by hand: the same bits as the model in one piece."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import ModelError
from shoal.pipeline.graph import Graph, check_shared, cuts_at, read
from shoal.pipeline.in_place import check_in_place
from shoal.pipeline.layer import Layer
from shoal.pipeline.layers import model_of
from shoal.pipeline.partition import Costs
from shoal.pipeline.profile import UNSENDABLE, choose_cuts, profile
from shoal.pipeline.routes import Port, Routes, route
from shoal.pipeline.split import OUTPUT, stage_module, values_made
from shoal.pipeline.stage import Stage
from shoal.train.models.zoo import ConvNet, MnistCnn, ResidualMlp, TutorialCnn
from shoal.wire.apart import take_apart
from shoal.wire.slots import allocate, memory_of, view_of
from shoal.wire.together import read_plan
from shoal.wire.tree import tensors_of

WIDTH = 8
Inputs = dict[str, Any]
Loss = Callable[[Any], Tensor]
Alike = Callable[[Any, Any], bool]


# -- stages without links --------------------------------------------------------------------------


def sent(tree: Any) -> Any:
    """What a link would deliver: the same values in other memory."""
    parcel = take_apart(tree)
    received = []
    for slot, content in zip(parcel.slots, parcel.buffers, strict=True):
        tensor = allocate(slot)
        view_of(memory_of(tensor))[:] = view_of(memory_of(content))
        received.append(tensor)
    return read_plan(parcel.plan, parcel.slots).build(received)


class Row:
    """All stages of a model, and the mail between them."""

    def __init__(self, model: nn.Module, cuts: Sequence[int], names: list[str] | None = None):
        self.graph = read(model, names)
        self.routes = route(self.graph, cuts)
        self.stages = [Stage.of(self.graph, self.routes, n) for n in range(len(cuts) + 1)]
        self.mail: dict[tuple[str, int, int, int], Any] = {}
        """By direction, micro-batch, sender and receiver: what is on its way."""

    def forward(self, inputs: Inputs, micro_batch: int = 0) -> Any:
        made: dict[str, Any] = {}
        for stage in self.stages:
            number = stage.number
            arrived = {
                source: self.mail.pop(("F", micro_batch, source, number))
                for source in self.routes.sources(number)
            }
            made = stage.forward(micro_batch, inputs if number == 0 else {}, arrived)
            for target in self.routes.targets(number):
                self.mail["F", micro_batch, number, target] = sent(stage.parcel(made, target))
        return made[OUTPUT]

    def backward(self, loss: Tensor, micro_batch: int = 0) -> None:
        self.stages[-1].keep_loss(micro_batch, loss)
        for stage in reversed(self.stages):
            number = stage.number
            arrived = {
                target: self.mail.pop(("B", micro_batch, target, number))
                for target in self.routes.forths(number)
            }
            gradients = stage.backward(micro_batch, arrived)
            assert sorted(gradients) == self.routes.backs(number)
            for source, values in gradients.items():
                self.mail["B", micro_batch, number, source] = sent(values)
        for stage in self.stages:
            while stage.backward_weights():
                continue


def total(output: Any) -> Tensor:
    """A loss to which every element of every output adds something of its own."""
    parts = [
        (t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).reshape(t.shape)).sum()
        for t in tensors_of(output).values()
        if t.is_floating_point()
    ]
    return sum(parts, start=torch.zeros(()))


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def alike(a: Any, b: Any) -> bool:
    """The same tensors, to the bit, in the same places."""
    mine, others = tensors_of([a]), tensors_of([b])
    return list(mine) == list(others) and all(
        t.dtype == other.dtype and torch.equal(t, other)
        for t, other in zip(mine.values(), others.values(), strict=True)
    )


def nearly(a: Any, b: Any) -> bool:
    """The same but for a rounding or two."""
    mine, others = tensors_of([a]), tensors_of([b])
    return list(mine) == list(others) and all(
        torch.allclose(t, other, rtol=1e-5, atol=1e-5)
        for t, other in zip(mine.values(), others.values(), strict=True)
    )


def check_same(
    model: nn.Module,
    cuts: Sequence[int],
    *batches: Inputs,
    names: list[str] | None = None,
    loss: Loss = total,
    alike: Alike = alike,
) -> None:
    """Outputs, gradients and buffers, of several micro-batches that are all alive at once."""
    plain, cut = copy.deepcopy(model), copy.deepcopy(model)
    theirs, mine = copy.deepcopy(batches), copy.deepcopy(batches)
    torch.manual_seed(11)
    expected = [plain(**batch) for batch in theirs]
    for output in expected:
        if loss(output).requires_grad:
            loss(output).backward()
    row = Row(cut, cuts, names)
    torch.manual_seed(11)
    found = [row.forward(batch, number) for number, batch in enumerate(mine)]
    assert all(stage.num_kept == len(batches) for stage in row.stages)
    for number, output in enumerate(found):
        row.backward(loss(output), number)
    assert all(stage.num_kept == 0 for stage in row.stages)
    assert not row.mail
    where = [row.graph.units[number] for number in cuts]
    assert alike(found, expected), where
    wanted, got = gradients_of(plain), gradients_of(cut)
    assert [n for n in wanted if not alike(got[n], wanted[n])] == [], where
    assert alike(dict(cut.state_dict()), dict(plain.state_dict())), where
    for a, b in zip(tensors_of(theirs).values(), tensors_of(mine).values(), strict=True):
        assert alike(b.grad, a.grad), where


def at(model: nn.Module, *names: str) -> list[int]:
    return cuts_at(read(model), names, len(names) + 1)


def x_of(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# -- any graph, cut anywhere -----------------------------------------------------------------------


class Step(NamedTuple):
    """One line of a drawn model: `kind` of earlier values, by number."""

    kind: str
    takes: tuple[int, ...]
    mask: int = 0
    is_frozen: bool = False


@dataclass(frozen=True)
class Recipe:
    """A model as drawn: every value may be used by any number of later steps."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    form: str
    """Of what is returned."""


class Drawn(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        for number, step in enumerate(recipe.steps):
            if step.kind in ("linear", "norm"):
                kind = nn.Linear(WIDTH, WIDTH) if step.kind == "linear" else nn.LayerNorm(WIDTH)
                self.add_module(f"layer{number}", kind.requires_grad_(not step.is_frozen))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Any:
        values, masks = [x, y], [mask]
        for number, step in enumerate(self.recipe.steps):
            taken = [values[each] for each in step.takes]
            match step.kind:
                case "linear" | "norm":
                    values.append(self.get_submodule(f"layer{number}")(*taken))
                case "tanh":
                    values.append(torch.tanh(taken[0]))
                case "add":
                    values.append(taken[0] + taken[1])
                case "scale":
                    values.append(taken[0] * torch.sigmoid(taken[1]))
                case "compare":
                    masks.append(taken[0] > 0)
                case "where":
                    values.append(torch.where(masks[step.mask % len(masks)], *taken))
                case "swap":
                    left, right = taken[0].chunk(2, dim=1)
                    values.append(torch.cat([right, left], dim=1))
                case "flat":
                    values.append(taken[0].flatten(1))
                case "float":
                    values.append(taken[0].float().contiguous())
                case "drop":
                    values.append(functional.dropout(taken[0], 0.0))
                case "atleast":
                    values.append(torch.atleast_1d(taken[0]))
                case "fold":  # a number that is made here and used later
                    values.append(taken[0].tanh().view(taken[1].size(0), -1))
        made = [values[each] for each in self.recipe.outputs]
        if self.recipe.form == "tuple":
            return (*made, masks[-1])
        return {"all": made, "last": {"mask": masks[-1], "value": values[-1]}}


GIVE_BACK = dict.fromkeys(("flat", "float", "drop", "atleast"), 1)
"""Steps that give back the very tensor they were given: other names of it."""
TAKES = (
    {"linear": 1, "norm": 1, "tanh": 1, "compare": 1, "swap": 1}
    | dict.fromkeys(("add", "scale", "where", "fold"), 2)
    | GIVE_BACK
)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Few values are used by many: three gradients that meet show in which order they are added."""
    steps = [Step("linear", (0,))]
    num_values, hub = 3, 2
    tensor = [0, 1, 2]
    """Of each value: the first one that is the same tensor."""
    unused = {0, 1, 2}
    for _ in range(draw(st.integers(2, 9))):
        kind = draw(st.sampled_from(["linear", "linear", "add", "add", *TAKES]))
        others = draw(st.permutations(range(num_values)))
        # Different tensors: what one step does with one twice has a test of its own.
        apart = {tensor[v]: v for v in others if tensor[v] != tensor[hub]}
        takes = list(apart.values())[: TAKES[kind]]
        if draw(st.integers(0, 3)):
            takes[draw(st.integers(0, len(takes) - 1))] = hub
        is_frozen = draw(st.integers(0, 3)) == 3
        steps.append(Step(kind, tuple(takes), draw(st.integers(0, 3)), is_frozen))
        unused -= set(takes)
        if kind != "compare":
            unused.add(num_values)
            tensor.append(tensor[takes[0]] if kind in GIVE_BACK else num_values)
            num_values += 1
        if draw(st.integers(0, 4)) == 4:
            hub = draw(st.integers(0, num_values - 1))
    more = draw(st.sets(st.integers(0, num_values - 1), max_size=2))
    outputs = draw(st.permutations(sorted(unused | more)))
    return Recipe(tuple(steps), tuple(outputs), draw(st.sampled_from(["tuple", "dict"])))


# Not shrunk: that takes minutes, and a recipe is short enough to be read.
@settings(max_examples=100, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(recipes(), st.data())
def test_any_graph_cut_anywhere_is_the_same_to_the_bit(recipe: Recipe, data: st.DataObject) -> None:
    torch.manual_seed(0)
    model = Drawn(recipe)
    graph = read(model)
    cuts = sorted(
        data.draw(st.sets(st.integers(1, len(graph.units) - 1), max_size=4), label="cuts")
    )
    needs = data.draw(st.booleans(), label="x needs a gradient")
    batches = [
        {
            "x": x_of(3, WIDTH, seed=number).requires_grad_(needs),
            "y": x_of(3, WIDTH, seed=number + 10),
            "mask": x_of(3, WIDTH, seed=number + 20) > 0,
        }
        for number in range(data.draw(st.integers(1, 2), label="micro-batches"))
    ]
    check_table(graph, cuts)
    check_same(model, cuts, *batches)


def check_table(graph: Graph, cuts: Sequence[int]) -> None:
    """Every value goes from where it is made straight to each stage that uses it, once."""
    routes = route(graph, cuts)
    number = {name: i for i, name in enumerate(graph.units)}
    found = {
        (port.value, port.source, stage)
        for stage, ports in enumerate(routes.ports)
        for port in ports
    }
    assert len(found) == sum(map(len, routes.ports))
    wanted = set()
    for node in graph.training.nodes:
        for source in node.all_input_nodes:
            made = routes.stage_of(number[source.name]) if source.name in number else 0
            used = routes.num_stages - 1
            if node.name in number:
                used = routes.stage_of(number[node.name])
            if made != used:
                wanted.add((source.name, made, used))
    assert found == wanted
    everyone = range(routes.num_stages)
    assert [unit for s in everyone for unit in routes.units_of(s)] == list(number.values())
    for stage in everyone:
        assert routes.sources(stage) == sorted({s for _, s, t in wanted if t == stage})
        assert routes.targets(stage) == sorted({t for _, s, t in wanted if s == stage})
        for source in everyone:
            ports = routes.between(source, stage)
            assert [p for p in routes.ports[stage] if p.source == source] == ports


# -- the table -------------------------------------------------------------------------------------


class FanOut(nn.Module):
    """What `a` gives is used by every later layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (square() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        v = self.a(x)
        return self.d(self.c(self.b(v) + v) + v) + v


def test_a_value_goes_straight_from_its_maker_to_all_who_use_it() -> None:
    graph = read(FanOut())
    assert graph.units == ["a", "b", "add", "c", "add_1", "d", "add_2"]
    routes = route(graph, [1, 3, 5])
    assert routes.ports[0] == []
    assert routes.ports[1] == [Port("a", 0)]
    assert routes.ports[2] == [Port("a", 0), Port("add", 1)]
    assert routes.ports[3] == [Port("a", 0), Port("add_1", 2)]
    assert [routes.targets(stage) for stage in range(4)] == [[1, 2, 3], [2], [3], []]
    assert [routes.sources(stage) for stage in range(4)] == [[], [0], [0, 1], [0, 2]]
    assert routes.between(0, 3) == [Port("a", 0)]
    # Gradients go from user to user, so that they are added up as in one process.
    assert [routes.backs(stage) for stage in range(4)] == [[], [0], [1], [2]]
    assert [routes.forths(stage) for stage in range(4)] == [[1], [2], [3], []]
    assert [routes.back(stage, stage - 1) for stage in (1, 2, 3)] == [
        ["a"],
        ["a", "add"],
        ["a", "add_1"],
    ]


@pytest.mark.parametrize("cuts", [[1], [1, 6], [1, 4], [1, 2, 4, 6], [2], [3]])
def test_uses_in_several_stages_add_up_in_the_order_of_one_process(cuts: list[int]) -> None:
    check_same(FanOut(), cuts, {"x": x_of(5, WIDTH)})


def test_one_stage_gets_nothing() -> None:
    graph = read(FanOut())
    routes = route(graph, [])
    assert routes == Routes([], [[]], 7)
    assert routes.num_stages == 1
    assert list(routes.units_of(0)) == list(range(7))
    check_same(FanOut(), [], {"x": x_of(5, WIDTH)})


class LateInputs(nn.Module):
    """Inputs of every kind, used early, late, twice and never."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.a, self.b, self.c = square(), square(), square()

    def forward(self, tokens: Tensor, x: Tensor, mask: Tensor, unused: Tensor, n: int) -> Tensor:
        v = self.a(self.embed(tokens))
        w = self.b(v.masked_fill(mask, 0.0)) * n
        return self.c(torch.where(mask, w, x)) + self.embed.num_embeddings


def late_inputs() -> Inputs:
    return {
        "tokens": torch.tensor([1, 2, 9]),
        "x": x_of(3, WIDTH),
        "mask": x_of(3, WIDTH, seed=4) > 0,
        "unused": torch.ones(3),
        "n": 2,
    }


def test_inputs_that_late_stages_use_come_from_the_first() -> None:
    graph = read(LateInputs())
    assert graph.units == ["embed", "a", "masked_fill", "b", "mul", "where", "c", "add"]
    routes = route(graph, [2, 5])
    assert routes.ports[1] == [
        Port("mask", 0),
        Port("n", 0),
        Port("a", 0),
    ]
    assert routes.ports[2] == [
        Port("x", 0),
        Port("mask", 0),
        Port("mul", 1),
    ]
    assert values_made(graph, routes, 0) == ["x", "mask", "n", "a"]
    assert values_made(graph, routes, 1) == ["mul"]
    assert values_made(graph, routes, 2) == [OUTPUT]


def test_integers_booleans_and_plain_numbers_cross() -> None:
    every = list(range(1, 8))
    check_same(LateInputs(), every, late_inputs())
    for cut in every:
        check_same(LateInputs(), [cut], late_inputs())


# -- parts of models -------------------------------------------------------------------------------


def test_a_part_shares_the_models_own_parameters_and_has_no_others() -> None:
    model = ConvNet()
    graph = read(model)
    routes = route(graph, at(model, "layer2", "fc"))
    parts = [stage_module(graph, routes, number) for number in range(3)]
    names = [[name for name, _ in part.named_parameters()] for part in parts]
    assert names[1] == ["layer2.0.weight", "layer2.0.bias", "layer2.1.weight", "layer2.1.bias"]
    assert [each for own in names for each in own] == [n for n, _ in model.named_parameters()]
    own = dict(model.named_parameters())
    for part in parts:
        assert all(own[name] is parameter for name, parameter in part.named_parameters())


class Holder(nn.Module):
    """Parameters and buffers that are used by themselves, of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = square()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH))
        self.register_buffer("table", torch.rand(WIDTH), persistent=False)
        self.last = square()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        return self.last(x + self.shift) * self.table


@pytest.mark.parametrize("cut", range(1, 5))
def test_the_states_of_the_parts_together_are_the_models(cut: int) -> None:
    """Each rank asks rank 0 for what its part's state names, and rank 0 has the model's state."""
    model = Holder()
    graph = read(model)
    routes = route(graph, [cut])
    states = [dict(Stage.of(graph, routes, number).module.state_dict()) for number in range(2)]
    assert not set(states[0]) & set(states[1])
    assert set(states[0] | states[1]) == set(model.state_dict())
    check_same(model, [cut], {"x": x_of(3, WIDTH)})


class Both(NamedTuple):
    x: Tensor
    scale: Tensor


def test_a_named_tuple_crosses_no_cut() -> None:
    """It would arrive as a plain one, without its names."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = square(), square()

        def forward(self, both: Both) -> Tensor:
            return self.b(self.a(both.x)) * both.scale

    row = Row(Net(), [2])
    with pytest.raises(ModelError, match=r"both is a Both.* Cut after its last use"):
        row.forward({"both": Both(x_of(3, WIDTH), x_of(3, WIDTH))})


class Sliced(nn.Module):
    """Uses pieces of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())
        self.a, self.b, self.c = square(), square(), square()

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x) * self.mask[2])
        return self.c(x * self.mask[: x.size(0)].sum(0))


def test_a_buffer_that_is_only_read_is_in_every_stage_that_takes_a_piece_of_it() -> None:
    model = Sliced()
    names = set(model.state_dict())
    check_same(model, [5], {"x": x_of(3, WIDTH)})
    row = Row(model, [5])
    assert set(model.state_dict()) == names
    states = [set(stage.module.state_dict()) for stage in row.stages]
    assert states[0] | states[1] == names
    assert states[0] & states[1] == {"mask"}


# -- whole models ----------------------------------------------------------------------------------


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    """Attention in functions: shapes, numbers and transposed values cross the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (square() for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            project(x).view(batch, length, 2, -1).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        scores = (q @ k.transpose(-2, -1)).masked_fill(mask, float("-inf"))
        mixed = torch.softmax(scores, dim=-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


ZOO: list[tuple[nn.Module, Inputs]] = [
    (MnistCnn(), {"x": x_of(2, 1, 28, 28)}),
    (ConvNet(), {"x": x_of(2, 1, 28, 28)}),
    (TutorialCnn(), {"x": x_of(2, 1, 28, 28)}),
    (ResidualMlp(32), {"x": x_of(4, 1)}),
    (Transformer(), {"tokens": torch.arange(6).view(2, 3)}),
    (Attention(), {"x": x_of(2, 3, WIDTH), "mask": torch.ones(3, 3).triu(1).bool()}),
]
IDS = [type(model).__name__ for model, _ in ZOO]


@pytest.mark.parametrize(("model", "inputs"), ZOO, ids=IDS)
def test_every_cut_of_known_models(model: nn.Module, inputs: Inputs) -> None:
    places = range(1, len(read(model).units))
    for cut in places:
        check_same(model, [cut], inputs)
    check_same(model, list(places), inputs, inputs)


@pytest.mark.parametrize(("model", "inputs"), ZOO, ids=IDS)
def test_in_eval_without_gradients_nothing_is_kept(model: nn.Module, inputs: Inputs) -> None:
    model = copy.deepcopy(model).eval()
    row = Row(model, list(range(1, len(read(model).units))))
    with torch.no_grad():
        assert alike(row.forward(inputs), model(**inputs))
    assert all(stage.num_kept == 0 for stage in row.stages)


def test_a_list_of_layers() -> None:
    model = model_of(
        [
            Layer(nn.Linear, WIDTH, WIDTH, gives=["a", "again"]),
            Layer(nn.ReLU, gives="b"),
            Layer(nn.Linear, WIDTH, WIDTH, takes="a"),
            Layer(nn.Linear, WIDTH, WIDTH, takes=["again", "b"]),
            Layer(nn.Linear, 3 * WIDTH, WIDTH, takes=["a", "b"], combine="cat"),
        ]
    )
    places = range(1, len(read(model).units))
    for first in places:
        for second in range(first + 1, places.stop):
            check_same(model, [first, second], {"x": x_of(3, WIDTH)})


def test_dropout_by_function_is_off_in_eval() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = square(), square()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(functional.dropout(self.a(x), 0.5, training=self.training))

    model, x = Net(), x_of(3, WIDTH)
    check_same(model, [1], {"x": x})
    row = Row(model, [1])
    for stage in row.stages:
        stage.module.train()
    assert not torch.equal(row.forward({"x": x}, 0), row.forward({"x": x}, 1))
    for stage in row.stages:
        stage.module.eval()
    assert torch.equal(row.forward({"x": x}, 2), model.eval()(x))


class ShowsMore(nn.Module):
    """Gives the features too, but only in eval()."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = square(), square(), square()

    def forward(self, x: Tensor) -> Any:
        features = self.a(x)
        out = self.c(self.b(features))
        return out if self.training else (out, features)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cuts", [[1], [1, 2]])
def test_what_only_one_mode_returns(cuts: list[int], training: bool) -> None:
    check_same(ShowsMore().train(training), cuts, {"x": x_of(3, WIDTH)})


class BestOf(nn.Module):
    """torch.max gives a tuple whose fields have names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = square(), square()

    def forward(self, x: Tensor) -> Tensor:
        best = self.a(x).max(dim=1)
        return self.b(x * best.values.unsqueeze(1)) + best.indices.unsqueeze(1)


class Asks(nn.Module):
    """A dtype and a device are values too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = square(), square(), square()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.a(x)
        dtype, device = x.dtype, x.device
        x = self.b(x * mask.to(dtype)) + mask.to(dtype)
        return self.c(x + torch.ones(1, device=device)) * torch.ones(1, device=device)


UNSENT: list[tuple[nn.Module, Inputs, list[str], list[str], str]] = [
    (
        BestOf(),
        {"x": x_of(3, WIDTH)},
        ["max_1"],
        ["max_1", "unsqueeze_1", "add"],
        "max_1 is a max,",
    ),
]
"""Models, inputs, values that no message holds, units before which cuts may come, and what happens
where they come elsewhere."""


@pytest.mark.parametrize(
    ("model", "inputs", "unsent", "places", "says"),
    UNSENT,
    ids=["named fields"],
)
def test_automatic_cuts_avoid_what_no_message_holds(
    model: nn.Module,
    inputs: Inputs,
    unsent: list[str],
    places: list[str],
    says: str,
) -> None:
    graph = read(model)
    _, values = profile(graph, inputs)
    by_name = dict(zip([*graph.inputs, *graph.units], values, strict=True))
    assert [name for name, v in by_name.items() if v.size_bytes == UNSENDABLE] == unsent
    allowed = [graph.units.index(place) for place in places]
    # As many stages as there can be: then every cut that is allowed is made, and no other.
    for costs in (Costs(), Costs(seconds_per_byte=1.0)):  # nothing is cheaper than a size of -1
        for num_stages in range(2, len(allowed) + 2):
            cuts = choose_cuts(graph, inputs, num_stages, costs)
            assert len(cuts) == num_stages - 1
            assert set(cuts) <= set(allowed)
        with pytest.raises(ModelError):
            choose_cuts(graph, inputs, len(allowed) + 2, costs)
    for cut in range(1, len(graph.units)):
        if cut in allowed:
            check_same(model, [cut], inputs)
        else:
            with pytest.raises(ModelError, match=says):
                Row(model, [cut]).forward(inputs)
    check_same(model, allowed, inputs)


def test_dtypes_and_devices_cross_every_cut() -> None:
    """A device arrives as that of the stage, whose tensors are all there."""
    model = Asks()
    inputs = {"x": x_of(3, WIDTH), "mask": x_of(3, WIDTH) > 0}
    units = len(read(model).units)
    for cut in range(1, units):
        check_same(model, [cut], inputs)
    check_same(model, [*range(1, units)], inputs)
    graph = read(model)
    _, values = profile(graph, inputs)
    assert all(value.size_bytes >= 0 for value in values)


def test_named_inputs_that_have_defaults() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = square(), square()

        def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> Tensor:
            x = self.b(self.a(x) * scale)
            return x if mask is None else x.masked_fill(mask, 0.0)

    x, mask = x_of(3, WIDTH), x_of(3, WIDTH, seed=1) > 0
    check_same(Net(), [1], {"x": x})
    check_same(Net(), [1, 2], {"x": x, "mask": mask}, names=["x", "mask"])


def test_a_default_of_several_values_must_come_with_the_batch() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = square(), square()

        def forward(self, x: Tensor, shape: tuple[int, int] = (-1, WIDTH)) -> dict[str, Tensor]:
            x = self.a(x)
            return {"first": x, "last": self.b(x).view(shape)}

    with pytest.raises(ModelError, match=r"an input 'shape' whose default is a tuple.* inputs="):
        read(Net())
    check_same(Net(), [1], {"x": x_of(3, WIDTH), "shape": (-1, WIDTH)}, names=["x", "shape"])


# -- to the bit, where it is harder ----------------------------------------------------------------


class Uses(nn.Module):
    """A value that `middle` uses more than once, and the end again."""

    def __init__(self, middle: Callable[[Tensor], Tensor] | nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.c = square(), square(), square()
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        v = self.a(x)
        return self.c(self.b(self.middle(v)) + v)


class Branches(nn.Module):
    """Kept whole, as torch.fx cannot read it; uses its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if x.sum() > -1e9 else x


@pytest.mark.parametrize("has_cut_inside", [False, True])
@pytest.mark.parametrize(
    "middle",
    [lambda v: v * v, lambda v: torch.stack([v, v, v]).prod(dim=0), Branches()],
    ids=["product", "stack", "module"],
)
def test_one_step_that_uses_a_value_twice(middle: Any, has_cut_inside: bool) -> None:
    """In one process: (what came later + first use) + second use, in this order."""
    torch.manual_seed(0)
    model = Uses(middle)
    inside = at(model, "b") if has_cut_inside else []
    end = len(read(model).units) - 2  # the last sum
    for seed in range(3):
        check_same(model, [1, *inside, end], {"x": x_of(5, WIDTH, seed=seed)})


def test_one_step_that_uses_a_value_twice_and_no_later_stage_does() -> None:
    for middle in (lambda v: v * v, lambda v: torch.stack([v, v, v]).prod(dim=0), Branches()):
        check_same(Uses(middle), [1], {"x": x_of(5, WIDTH)})


class Same(nn.Module):
    """A step that gives back the very tensor it was given: two names, one value."""

    def __init__(self, step: Callable[[Tensor], Tensor] | nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (square() for _ in range(5))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        v = self.a(x)
        w = self.step(v)
        return self.e(self.b(v) + self.c(w) + self.d(v))


def check_two_names(step: Any, names: list[str], alike: Alike = alike) -> None:
    torch.manual_seed(0)
    model = Same(step)
    # The step has another name where it is a function; it always comes second.
    cuts = [1, *at(model, *names[1:])] if names[0] == "step" else at(model, *names)
    for seed in range(3):
        check_same(model, cuts, {"x": x_of(5, WIDTH, seed=seed)}, alike=alike)


BETWEEN_TWO_NAMES = pytest.mark.parametrize(
    "names", [["b"], ["c"], ["b", "c", "d"], ["step", "b"], ["step", "c", "d"]]
)


@BETWEEN_TWO_NAMES
@pytest.mark.parametrize(
    "step",
    [
        nn.Dropout(0.0),
        lambda v: v.flatten(1),
        lambda v: v.float().contiguous(),
        lambda v: torch.atleast_1d(functional.dropout(+v, 0.0)),
        lambda v: torch.broadcast_tensors(v, torch.ones(WIDTH))[0].real,
        nn.Dropout(0.5),
    ],
    ids=["dropout", "flatten", "float", "several", "of a tuple", "another tensor after all"],
)
def test_two_names_for_one_tensor(step: Any, names: list[str]) -> None:
    """Its gradients are added up in the order of all uses, by whatever name."""
    check_two_names(step, names)


class GivesBack(nn.Module):
    """Kept whole: nobody knows beforehand that it gives back what it was given."""

    def forward(self, v: Tensor) -> Tensor:
        return v if v.sum() > -1e9 else -v


@BETWEEN_TWO_NAMES
def test_two_names_by_a_module_that_is_kept_whole(names: list[str]) -> None:
    """No gradient makes a detour for what is hardly ever so; the price may be a rounding."""
    check_two_names(GivesBack(), names, alike if names in (["b"], ["c"]) else nearly)
    model = Same(GivesBack())
    assert not route(read(model), at(model, "b", "c", "d")).num_detours


def test_gradients_of_two_names_pass_all_users() -> None:
    model = Same(nn.Dropout(0.0))
    routes = route(read(model), at(model, "b", "c", "d"))
    # What step gives is used in stage 2, and its gradient passes stage 1, which uses what a gives.
    assert [set(routes.back(stage, stage - 1)) for stage in (1, 2, 3)] == [
        {"a", "step"},
        {"a", "step", "b"},
        {"a", "add"},
    ]


@BETWEEN_TWO_NAMES
def test_what_an_identity_gives_is_the_value_it_was_given(names: list[str]) -> None:
    """It is known to be so when the model is read: one value, added up in the order of its uses."""
    check_two_names(nn.Identity(), names)


def test_an_identity_that_does_something_is_a_step() -> None:
    twice = nn.Identity()
    twice.register_forward_hook(lambda module, args, output: 2 * output)
    for names in (["b", "c", "d"], ["step", "b"]):
        check_two_names(twice, names)


class Assigns(nn.Module):
    """To parts of what it makes, of a value, and of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = square(), square(), square()
        self.register_buffer("means", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.size(0), WIDTH)
        h = self.a(x)
        out[:, :4] = h[:, :4]
        self.means[0] = h.detach().mean()
        h = 2 * self.b(h)
        h[h < 0] = 0.1
        out[:, 4:] += h[:, 4:]
        return self.c(out) + h + self.means.sum()


def test_assignments_to_parts_of_tensors() -> None:
    model = Assigns()
    graph = read(model)
    exact = 0
    for cut in range(1, len(graph.units)):
        try:
            check_in_place(graph, [cut])
            check_shared(graph, [cut])
        except ModelError:
            continue
        check_same(model, [cut], {"x": x_of(5, WIDTH)})
        exact += 1
    assert exact >= 2
    with pytest.raises(ModelError, match=r"setitem_2 changes mul in place, and getitem_2 uses mul"):
        check_in_place(graph, [graph.units.index("getitem_2")])
    units, _ = profile(graph, {"x": x_of(5, WIDTH)})
    assert len(units) == len(graph.units)


class Flips(nn.Module):
    """Cannot be read, and changes what it is given."""

    def forward(self, mask: Tensor) -> Tensor:
        if mask.sum() > -1:
            mask.logical_not_()
        return mask.float()


def test_a_whole_module_that_changes_what_later_stages_get_too_is_refused() -> None:
    """They got it straight from the stage that made it, unchanged: another model was trained."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.flips = square(), square(), Flips()

        def forward(self, x: Tensor) -> Tensor:
            mask = x > 0
            h = self.a(x) * self.flips(mask)
            return self.b(h).masked_fill(mask, 0.0)

    model = Net()
    x = {"x": x_of(5, WIDTH)}
    check_same(model, at(model, "b"), x)  # where it is changed, all is in one stage
    for has_gradients in (True, False):
        with torch.set_grad_enabled(has_gradients), pytest.raises(ModelError) as caught:
            Row(model, at(model, "a", "b")).forward(x, 0)
        assert "stage 1 changes gt in place, inside a module that is kept whole" in str(
            caught.value
        )


def test_a_tuple_whose_elements_are_used_often() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, 2 * WIDTH)
            self.b, self.c, self.d = square(), square(), square()

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.a(x).chunk(2, dim=1)
            return self.d(self.b(left) + self.c(right) + left * right) + left

    model = Net()
    for first in range(1, 8):
        for second in range(first + 1, 9):
            check_same(model, [first, second], {"x": x_of(5, WIDTH)})


@pytest.mark.parametrize(
    "step", range(5), ids=["rows", "columns", "unbind", "stack", "all but one"]
)
def test_values_that_begin_elsewhere_than_memory_does(step: int) -> None:
    """What computes with vectors may take another way there, and sum in another order."""
    steps: list[Callable[[Tensor], Any]] = [
        lambda v: v[1:],
        lambda v: v[:, 1:],
        lambda v: v.view(13, 3, 10).unbind(1)[1],
        lambda v: torch.stack([v[:, :10], v[:, 10:20]])[1],
        lambda v: v.flatten()[1:].view(1, -1)[:, :380].view(-1, 10),
    ]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 30), nn.LazyLinear(10)

        def forward(self, x: Tensor) -> Tensor:
            v = steps[step](self.a(x))
            return self.b(v) * v.flatten()[5:15] + v.mean()

    torch.manual_seed(0)
    model = Net()
    model(x_of(13, 6))
    for cut in range(1, len(read(model).units)):
        for seed in range(3):
            check_same(model, [cut], {"x": x_of(13, 6, seed=seed)})


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_transposed_values_and_gradients(cut: int) -> None:
    """How a tensor lies in memory decides in which order its sums are made."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = square(), square(), square()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).t() @ self.c(x))

    torch.manual_seed(0)
    model = Net()
    for seed in range(3):
        check_same(model, [cut], {"x": x_of(WIDTH, WIDTH, seed=seed)})


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_channels_last(cut: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()
    ).to(memory_format=torch.channels_last)
    x = x_of(4, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    (name,) = read(model).inputs
    cut_up = copy.deepcopy(model)
    row = Row(cut_up, [cut])
    found, expected = row.forward({name: x}), model(x)
    assert alike(found, expected)
    row.backward(total(found))
    total(expected).backward()
    assert alike(gradients_of(cut_up), gradients_of(model))


class States(nn.Module):
    """What a GRU gives lies with time outermost; its gradient here lies with the batch so."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.gru = (nn.GRU(16, 16, batch_first=True) for _ in range(2))
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.rnn(x)
        return self.last(self.gru(y)[0] + h[-1][:, None])


class Then(nn.Module):
    """Some layers and then a function, where it is cut."""

    def __init__(self, before: Sequence[nn.Module], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Sequential(*before), after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.before(x))


class Halves(nn.Module):
    """The half of a value is a value with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 24, 3), nn.BatchNorm2d(12)
        self.last = nn.Conv2d(24, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).chunk(2, 1)
        return self.last(torch.cat([a, self.norm(b)], 1))


def normed() -> list[nn.Module]:
    return [nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24)]


@pytest.mark.parametrize(
    ("make", "cut", "shape"),
    [
        (States, "last", (16, 9, 16)),
        (lambda: Then(normed(), lambda v: torch.cat([v, v.detach()], 1) ** 3), "cat", (8, 3, 9, 9)),
        (lambda: Then(normed(), lambda v: v.sum(-1).sin()), "sum_1", (8, 3, 12, 12)),
        (Halves, "norm", (8, 3, 12, 12)),
    ],
    ids=["states", "beside another", "repeated", "half"],
)
def test_values_and_gradients_that_lie_oddly(
    make: Callable[[], nn.Module], cut: str, shape: tuple[int, ...]
) -> None:
    """Steps of torch that sum over them do so in another order where they lie otherwise."""
    torch.manual_seed(0)
    model = make()
    check_same(model, at(model, cut), *({"x": x_of(*shape, seed=seed)} for seed in range(3)))


# -- steps in place --------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self, step: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = square(), square()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.step(self.a(x)))


@pytest.mark.parametrize(
    "step",
    [
        lambda v: v.relu_(),
        lambda v: functional.relu(v, inplace=True),
        lambda v: torch.relu_(v),
        lambda v: functional.leaky_relu_(v),
        lambda v: v.mul_(2).add_(1),
        nn.ReLU(inplace=True),
    ],
    ids=["method", "functional", "torch", "leaky", "twice", "module"],
)
def test_a_stage_may_begin_with_a_step_in_place(step: Any) -> None:
    model = InPlace(step)
    for cut in range(1, len(read(model).units)):
        check_same(model, [cut], {"x": x_of(3, WIDTH)})


@pytest.mark.parametrize("is_kept", [True, False])
def test_an_input_changed_in_place_is_changed_for_those_who_use_it_later(is_kept: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = square(), square()

        def forward(self, x: Tensor) -> Tensor:
            clipped = x.relu_()
            out = self.b(self.a(x))
            return out + clipped if is_kept else out

    (cut,) = at(Net(), "b")
    model, x = Net(), x_of(3, WIDTH)
    expected = model(x.clone())
    assert torch.equal(Row(model, [cut]).forward({"x": x.clone()}), expected)


def test_a_step_in_place_whose_result_nobody_takes() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = square(), square()

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            x.relu_()
            return self.b(x)

    check_same(Net(), at(Net(), "b"), {"x": x_of(3, WIDTH)})


# -- which gradients travel ------------------------------------------------------------------------


class Partly(nn.Module):
    """`a` may be frozen; what `b` gives is used without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = square(), square(), square()

    def forward(self, x: Tensor) -> Tensor:
        v = self.a(x)
        w = self.b(v)
        return self.c(v * (w > 0)) + w.argmax(dim=1, keepdim=True)


def forward_to(row: Row, number: int, inputs: Inputs) -> dict[int, Any]:
    """The parcels that come to stage `number`, as it gets them."""
    parcels: dict[int, dict[int, Any]] = {stage.number: {} for stage in row.stages}
    for stage in row.stages[:number]:
        mine = inputs if stage.number == 0 else {}
        made = stage.forward(0, mine, parcels[stage.number])
        for target in row.routes.targets(stage.number):
            parcels[target][stage.number] = sent(stage.parcel(made, target))
    return parcels[number]


def test_a_value_that_gets_no_gradient_sends_none() -> None:
    row = Row(Partly(), [2])
    assert [port.value for port in row.routes.ports[1]] == ["a", "b"]
    arrived = forward_to(row, 1, {"x": x_of(3, WIDTH)})
    assert [needs for _, needs in arrived[0]] == [[True], [True]]
    last = row.stages[1]
    made = last.forward(0, {}, arrived)
    last.keep_loss(0, total(made[OUTPUT]))
    gradients = last.backward(0, {})[0]
    assert gradients["a"][0] is not None
    assert gradients["b"] == [None]
    check_same(Partly(), [2], {"x": x_of(3, WIDTH)})


def test_what_is_frozen_upstream_gets_no_gradient() -> None:
    model = Partly()
    model.a.requires_grad_(False)
    row = Row(model, [1])
    arrived = forward_to(row, 1, {"x": x_of(3, WIDTH)})
    assert [needs for _, needs in arrived[0]] == [[False]]
    last = row.stages[1]
    made = last.forward(0, {}, arrived)
    last.keep_loss(0, total(made[OUTPUT]))
    assert last.backward(0, {}) == {0: {"a": []}}
    first = row.stages[0]
    assert first.backward(0, {1: {"a": []}}) == {}
    for cut in range(1, 6):
        check_same(model, [cut], {"x": x_of(3, WIDTH)})


def test_everything_frozen() -> None:
    check_same(FanOut().requires_grad_(False), [1, 3], {"x": x_of(3, WIDTH)})


def test_numbers_and_masks_need_no_gradient() -> None:
    row = Row(LateInputs(), [2, 5])
    arrived = forward_to(row, 1, late_inputs())
    mask, n, a = arrived[0]
    assert mask[0].dtype == torch.bool
    assert (mask[1], n, a[1]) == ([False], [2, []], [True])


def test_only_some_tensors_of_a_value_need_a_gradient() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.pool, self.b = square(), nn.MaxPool1d(2, return_indices=True), square()

        def forward(self, x: Tensor) -> Tensor:
            values, where = self.pool(self.a(x))
            return self.b(torch.cat([values, where], dim=1))

    row = Row(Net(), [2])
    ((tree, needs),) = forward_to(row, 1, {"x": x_of(3, WIDTH)})[0]
    assert [t.dtype for t in tensors_of(tree).values()] == [torch.float32, torch.int64]
    assert needs == [True, False]


def test_parcels_hold_no_history() -> None:
    row = Row(FanOut(), [1])
    first = row.stages[0]
    made = first.forward(0, {"x": x_of(3, WIDTH)}, {})
    ((tree, needs),) = first.parcel(made, 1)
    assert made["a"].requires_grad
    assert not tree.requires_grad
    assert needs == [True]


def test_a_loss_that_needs_no_gradient() -> None:
    model = FanOut()
    row = Row(model, [1, 3])
    output = row.forward({"x": x_of(3, WIDTH)})
    row.backward(output.detach().sum())
    assert set(gradients_of(model).values()) == {None}
    assert not row.mail


def test_a_stage_without_parameters() -> None:
    model = nn.Sequential(square(), nn.ReLU(), nn.Tanh(), square())
    (name,) = read(model).inputs
    plain, cut = copy.deepcopy(model), copy.deepcopy(model)
    total(plain(x_of(3, WIDTH))).backward()
    row = Row(cut, [1, 3])
    row.backward(total(row.forward({name: x_of(3, WIDTH)})))
    assert list(row.stages[1].module.parameters()) == []
    assert alike(gradients_of(cut), gradients_of(plain))


def test_gradients_add_up_over_steps() -> None:
    model = FanOut()
    plain = copy.deepcopy(model)
    row = Row(model, [1, 3])
    for seed in range(3):
        total(plain(x_of(3, WIDTH, seed=seed))).backward()
        row.backward(total(row.forward({"x": x_of(3, WIDTH, seed=seed)}, seed)), seed)
    assert alike(gradients_of(model), gradients_of(plain))


# -- what is kept ----------------------------------------------------------------------------------


def test_micro_batches_are_kept_until_their_backward() -> None:
    row = Row(FanOut(), [1, 3])
    outputs = [row.forward({"x": x_of(2, WIDTH, seed=n)}, n) for n in range(4)]
    assert [stage.num_kept for stage in row.stages] == [4, 4, 4]
    for number, left in ((2, 3), (0, 2), (3, 1), (1, 0)):  # in any order
        row.backward(total(outputs[number]), number)
        assert [stage.num_kept for stage in row.stages] == [left] * 3


def test_after_its_backward_no_activation_is_alive() -> None:
    row = Row(FanOut(), [1, 3])
    first = row.stages[0]
    made = first.forward(0, {"x": x_of(3, WIDTH)}, {})
    alive = weakref.ref(made["a"])
    del made
    gc.collect()
    assert alive() is not None
    first.backward(0, {})
    gc.collect()
    assert alive() is None


def test_forget() -> None:
    row = Row(FanOut(), [1, 3])
    row.forward({"x": x_of(3, WIDTH)}, 0)
    row.forward({"x": x_of(3, WIDTH)}, 1)
    for stage in row.stages:
        stage.forget()
    assert [stage.num_kept for stage in row.stages] == [0, 0, 0]
    row.backward(total(row.forward({"x": x_of(3, WIDTH)}, 0)), 0)  # as if nothing had been


def test_without_gradients_no_leaf_is_made() -> None:
    model = FanOut()
    row = Row(model, [1, 3])
    with torch.no_grad():
        output = row.forward({"x": x_of(3, WIDTH)})
    assert not output.requires_grad
    assert [stage.num_kept for stage in row.stages] == [0, 0, 0]


def test_only_the_last_stage_is_last() -> None:
    row = Row(FanOut(), [1, 3])
    assert [stage.is_last for stage in row.stages] == [False, False, True]
    assert [stage.number for stage in row.stages] == [0, 1, 2]


class Queue(nn.Module):
    """Keeps what came last, as some contrastive losses do, and gives it away."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("last", torch.zeros(rows, 64))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.last.copy_(x)
        return self.linear(x) + kept


@pytest.mark.parametrize("rows", [4, 512])
def test_a_buffer_that_is_sent_is_not_changed_on_its_way(rows: int) -> None:
    """It may be read when the next micro-batch has been through the layer that has it."""
    graph = read(Queue(rows))
    routes = route(graph, [1])
    first = Stage.of(graph, routes, 0)
    inputs = [torch.full((rows, 64), float(number)) for number in range(2)]
    parcels = []
    for number, x in enumerate(inputs):
        made = first.forward((0, number), dict(zip(graph.inputs, [x], strict=True)), {})
        parcel = first.parcel(made, 1)
        parcels.append(sent(parcel) if rows == 4 else parcel)  # small ones are copied at once
    for parcel, x in zip(parcels, inputs, strict=True):
        came = tensors_of(parcel).values()
        assert len(came) == 2  # the input, and what was kept of it
        assert all(value.equal(x) for value in came)
