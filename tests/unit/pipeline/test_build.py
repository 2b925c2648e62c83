"""Models of every form made, and stages of a model on meta given the weights of one seed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from shoal.errors import ModelError
from shoal.pipeline.build import as_module, check_stages, check_state
from shoal.pipeline.graph import read
from shoal.pipeline.layer import Layer
from shoal.pipeline.meta import is_on_meta, materialise
from shoal.pipeline.outline import outline
from shoal.pipeline.routes import route
from shoal.pipeline.split import OUTPUT
from shoal.pipeline.stage import Stage
from shoal.train.models.zoo import ConvNet, MnistCnn, ResidualMlp

WIDTH = 8
CPU = torch.device("cpu")


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# -- from what the user gives to a module ----------------------------------------------------------


def test_a_module_is_itself() -> None:
    model = square()
    assert as_module(model) is model


@pytest.mark.parametrize(
    "make",
    [
        MnistCnn,
        lambda: nn.Sequential(square(), nn.BatchNorm1d(WIDTH)),
        lambda: [Layer(nn.Linear, WIDTH, WIDTH), nn.ReLU()],
        lambda: ((nn.Linear, {"in_features": 1, "out_features": 1}), nn.ReLU()),
        lambda: [square(), nn.ReLU()],
    ],
    ids=["class", "function", "layers", "tuples", "modules"],
)
def test_what_makes_a_model_is_called_on_meta(make: Any) -> None:
    model = as_module(make)
    assert is_on_meta(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(parameter.is_meta for parameter in square().parameters())  # not longer than that


def test_a_list_of_layers_is_built_here() -> None:
    model = as_module([Layer(nn.Linear, WIDTH, WIDTH), nn.ReLU()])
    assert not is_on_meta(model)
    assert model(torch.ones(2, WIDTH)).shape == (2, WIDTH)


def test_a_buffer_on_meta_is_seen() -> None:
    assert is_on_meta(nn.BatchNorm1d(WIDTH, affine=False, device="meta"))
    assert not is_on_meta(nn.ReLU())


def number() -> int:
    return 3


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (number, "number gave an int; it must give an nn.Module or a list of layers"),
        (lambda: None, "gave a NoneType"),
        (lambda: MnistCnn, "gave a type"),
        (dict, "dict gave a dict"),
        (list, "the list of layers is empty"),
        ([], "the list of layers is empty"),
        ([3], "layer 0: 3 is no Layer"),
        (
            nn.Linear(2, 2, device="meta"),
            "the Linear is on the meta device, where its weights have",
        ),
    ],
)
def test_what_is_no_model(model: Any, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        as_module(model)
    assert says in str(caught.value)


@pytest.mark.parametrize("model", [3, None, "MnistCnn", {"a": 1}])
def test_what_is_nothing_of_all_that(model: Any) -> None:
    with pytest.raises(ModelError) as caught:
        as_module(model)
    assert len(caught.value.faults) == 1
    assert type(model).__name__ in str(caught.value)


# -- what must be the same on every rank -----------------------------------------------------------


def test_outlines_of_equal_models_are_equal() -> None:
    assert outline(read(ConvNet())) == outline(read(ConvNet()))
    with torch.device("meta"):
        on_meta = ConvNet()
    assert outline(read(on_meta)) == outline(read(ConvNet()))
    lines = outline(read(ConvNet()))
    assert lines[0].startswith("step layer1_0: call_module ")
    assert "fc.weight float32 (10, 1568)" in lines


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(square(), nn.Tanh(), square()).double(),
        nn.Sequential(square(), nn.Tanh(), nn.Linear(WIDTH, 3)),
        nn.Sequential(square(), square(), nn.Tanh()),
        nn.Sequential(square(), nn.Tanh()),
        nn.Sequential(square(), nn.Tanh(), square(), nn.Tanh()),
    ],
    ids=["dtype", "shape", "order", "shorter", "longer"],
)
def test_outlines_of_different_models_differ(other: nn.Module) -> None:
    assert outline(read(other)) != outline(read(nn.Sequential(square(), nn.Tanh(), square())))


def test_more_stages_than_steps() -> None:
    graph = read(nn.Sequential(square(), nn.ReLU()))
    check_stages(graph, 2)
    with pytest.raises(ModelError) as caught:
        check_stages(graph, 3)
    assert str(caught.value).startswith("3 stages for a model of 2 steps (0, 1)")
    with pytest.raises(ModelError, match=r"a model of 12 steps \(0, .*, 9, \.\.\.\): every stage"):
        check_stages(read(nn.Sequential(*(nn.ReLU() for _ in range(12)))), 13)
    with pytest.raises(ModelError, match=r"a model of 1 step \(0\): every stage"):
        check_stages(read(nn.Sequential(square())), 2)


# -- weights ---------------------------------------------------------------------------------------


class Own(nn.Module):
    """Parameters of its own, used by functions; it says itself what they begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.register_buffer("shift", torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.shift.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) + self.shift


class Many(nn.Module):
    """Layers of many kinds, and layers in layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(square(), nn.LayerNorm(WIDTH), nn.ReLU()) for _ in range(2)
        )
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Bilinear(WIDTH, WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x, _ = self.gru(self.encoder(x))
        x = self.norm(x)
        return self.head(x, x)


def on_meta(kind: Any) -> nn.Module:
    return as_module(kind)


def weighted_stage(kind: Any, cuts: Sequence[int], number: int, seed: int = 5) -> Stage:
    """As its rank makes it: what the stage uses is given weights in the model, before it is cut."""
    graph = read(on_meta(kind))
    routes = route(graph, cuts)
    names = set(Stage.of(graph, routes, number).module.state_dict())
    materialise(graph.model, seed, CPU, names)
    return Stage.of(graph, routes, number)


def state_after(kind: Any, cuts: Sequence[int]) -> dict[str, Tensor]:
    """Of all stages together."""
    state: dict[str, Tensor] = {}
    for number in range(len(cuts) + 1):
        stage = weighted_stage(kind, cuts, number)
        assert not is_on_meta(stage.module)
        mine = stage.module.state_dict()
        assert not set(mine) & set(state)
        state |= mine
    return state


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.own, self.last = square(), Own(), square()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.own(self.first(x)))


class AtTheRoot(Own):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = square(), square()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(self.first(x)))


@pytest.mark.parametrize("kind", [MnistCnn, ConvNet, ResidualMlp, Many, Inside, AtTheRoot])
def test_weights_do_not_depend_on_the_cuts(kind: Any) -> None:
    num_units = len(read(on_meta(kind)).units)
    whole = on_meta(kind)
    materialise(whole, 5, CPU)
    expected = dict(whole.state_dict())
    assert not is_on_meta(whole)
    everywhere = list(range(1, num_units))
    for cuts in ([], [num_units // 2], everywhere[:: max(1, num_units // 3)], everywhere):
        found = state_after(kind, cuts)
        assert set(found) == set(expected)
        assert [n for n in expected if not torch.equal(found[n], expected[n])] == [], cuts


def test_weights_depend_on_the_seed_and_on_the_name() -> None:
    def made(seed: int) -> nn.Module:
        model = on_meta(lambda: nn.Sequential(square(), square()))
        materialise(model, seed, CPU)
        return model

    one, same, other = made(1), made(1), made(2)
    assert torch.equal(one[0].weight, same[0].weight)
    assert not torch.equal(one[0].weight, other[0].weight)
    assert not torch.equal(one[0].weight, one[1].weight)


def test_chance_is_left_as_it_was() -> None:
    model = on_meta(MnistCnn)
    before = torch.random.get_rng_state()
    materialise(model, 5, CPU)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_statistics_begin_at_their_beginning() -> None:
    model = on_meta(lambda: nn.BatchNorm1d(WIDTH))
    materialise(model, 5, CPU)
    assert model.running_mean.tolist() == [0.0] * WIDTH
    assert model.running_var.tolist() == [1.0] * WIDTH
    assert model.num_batches_tracked == 0


def test_attention_begins_as_torch_begins_it() -> None:
    """Its own reset sets the bias of a layer inside it, which must not be drawn afterwards."""
    model = on_meta(lambda: nn.MultiheadAttention(WIDTH, 2))
    materialise(model, 5, CPU)
    assert nn.MultiheadAttention(WIDTH, 2).out_proj.bias.tolist() == [0.0] * WIDTH
    assert model.out_proj.bias.tolist() == [0.0] * WIDTH
    assert model.in_proj_bias.tolist() == [0.0] * 3 * WIDTH  # of queries, keys and values


def test_only_the_layers_that_are_named_get_memory() -> None:
    model = on_meta(lambda: nn.Sequential(square(), square()))
    materialise(model, 5, CPU, {"1.weight", "1.bias"})
    assert {name: t.is_meta for name, t in model.state_dict().items()} == {
        "0.weight": True, "0.bias": True, "1.weight": False, "1.bias": False
    }  # fmt: skip


def test_what_is_not_on_meta_is_left_alone() -> None:
    inner = square()
    model = nn.Sequential(inner, nn.Linear(WIDTH, WIDTH, device="meta"))
    before = inner.weight.clone()
    materialise(model, 5, CPU)
    assert model[0] is inner
    assert torch.equal(inner.weight, before)
    assert not is_on_meta(model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def test_tied_weights_stay_tied() -> None:
    model = on_meta(Tied)
    materialise(model, 5, CPU)
    assert model.head.weight is model.embed.weight


def test_frozen_parameters_stay_frozen() -> None:
    model = on_meta(lambda: square().requires_grad_(False))
    materialise(model, 5, CPU)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [Inside, AtTheRoot])
def test_a_stage_computes_with_its_weights_in_both_modes(kind: Any, training: bool) -> None:
    whole = on_meta(kind)
    materialise(whole, 5, CPU)
    stage = weighted_stage(kind, [], 0)
    stage.module.train(training)
    x = torch.ones(2, WIDTH)
    assert torch.equal(stage.forward(0, {"x": x}, {})[OUTPUT], whole(x))


class Silent(nn.Module):
    """Says nowhere what its parameters begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Table(nn.Module):
    """A buffer that is computed when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Positions(nn.Module):
    """A table that belongs to no state, and a part of it that forward() takes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(2.0 * WIDTH), persistent=False)
        self.start = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.start + self.table[:WIDTH]


def test_what_only_its_layer_can_make_is_made_by_it() -> None:
    def make() -> nn.Module:
        return nn.Sequential(square(), Silent(), nn.Sequential(Table(), Positions()), square())

    state = torch.random.get_rng_state()
    model = as_module(make, seed=5)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [n for n, p in model.named_parameters() if not p.is_meta] == ["1.weight", "2.1.start"]
    assert torch.equal(model[1].weight, torch.ones(WIDTH))
    again, other = as_module(make, seed=5), as_module(make, seed=6)
    assert torch.equal(again[2][1].start, model[2][1].start)
    assert not torch.equal(other[2][1].start, model[2][1].start)
    whole = on_meta(make)
    last = len(read(whole).units) - 1
    materialise(whole, 5, CPU)
    x = torch.ones(2, WIDTH)
    assert torch.equal(weighted_stage(make, [last], 0).module(x)[0], whole[:3](x))
    for cut in range(1, last):
        stages = [weighted_stage(make, [cut], number) for number in (0, 1)]
        assert not any(is_on_meta(stage.module) for stage in stages)


def test_a_layer_that_can_reset_its_parameters_keeps_its_tables() -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril(), persistent=False)

    model = as_module(Masked)
    assert model.weight.is_meta
    materialise(model, 5, CPU)
    assert torch.equal(model.mask, torch.ones(WIDTH, WIDTH).tril())
    assert model.weight.abs().sum() > 0


class Scale(nn.Module):
    """Is given its weight, and says itself what it begins with."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_one_parameter_given_to_two_layers_stays_one() -> None:
    def make() -> nn.Module:
        weight = nn.Parameter(torch.zeros(WIDTH))
        return nn.Sequential(Scale(weight), Scale(weight))

    model = as_module(make)
    assert model[0].weight is model[1].weight
    assert model[0].weight.is_meta


# -- values that a model gives its weights itself --------------------------------------------------


def constant(model: nn.Sequential) -> None:
    nn.init.constant_(model[0].bias, 7.0)  # here


def by_data(model: nn.Sequential) -> None:
    model[0].weight.data.normal_(0.0, 0.02)  # here


def a_row(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight[0] = 1.0  # here


def applied(model: nn.Sequential) -> None:
    model.apply(lambda m: nn.init.zeros_(m.bias) if isinstance(m, nn.Linear) else None)  # here


def replaced(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))  # here


def truncated(model: nn.Sequential) -> None:
    nn.init.trunc_normal_(model[0].weight, std=0.02)  # here


def orthogonal(model: nn.Sequential) -> None:
    nn.init.orthogonal_(model[0].weight)  # here


def sparse(model: nn.Sequential) -> None:
    nn.init.sparse_(model[0].weight, 0.5)  # here


def like_it(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))  # here


def turned(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.data.t())  # here


def by_its_data(model: nn.Sequential) -> None:
    model[0].weight.data = torch.ones(WIDTH, WIDTH)  # here


def loaded(model: nn.Sequential) -> None:
    model.load_state_dict(nn.Sequential(square(), nn.ReLU()).state_dict())  # here


def copied(model: nn.Sequential) -> None:
    model.append(copy.deepcopy(model[0]))  # here


class FromOutside(nn.Module):
    """Gives weights of a layer inside it their values, which may be in another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.empty(WIDTH)), square()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.inner.weight)


@pytest.mark.parametrize(
    ("reparametrize", "words"),
    [
        (parametrizations.weight_norm, "weight.original0, which is made of weights; its layer has"),
        (parametrizations.orthogonal, "cannot be called on meta tensors"),
        (parametrizations.spectral_norm, "would be lost"),
        (nn.utils.weight_norm, "0.weight_g, which its layer's reset_parameters() leaves as it is"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_weights_that_are_made_of_weights_are_told(reparametrize: Any, words: str) -> None:
    """When the model is made, on every rank; not by the rank that would have them."""

    def make() -> nn.Module:
        model = nn.Sequential(square(), nn.ReLU())
        reparametrize(model[0])
        return model

    with pytest.raises(ModelError, match="give the model itself") as caught:
        as_module(make)
    assert words in str(caught.value)


@pytest.mark.parametrize("error", [KeyError("mine"), FileNotFoundError("meta.json")])
def test_an_error_of_ones_own_is_not_about_weights(error: Exception) -> None:
    """Not even after a weight was given values."""

    def make() -> nn.Module:
        nn.init.zeros_(square().weight)
        raise error

    with pytest.raises(type(error), match=str(error).strip("'")):
        as_module(make)


def test_buffers_keep_what_the_model_gave_them() -> None:
    """Not what the reset of their layer gives, which is called for its weights."""

    def make() -> nn.Module:
        model = nn.Sequential(square(), nn.BatchNorm1d(WIDTH))
        model[1].running_mean.fill_(4.0)
        return model

    model = as_module(make)
    materialise(model, 0, CPU)
    assert model[1].running_mean.tolist() == [4.0] * WIDTH
    assert model[1].weight.tolist() == [1.0] * WIDTH


def test_weights_of_another_kind() -> None:
    """Nothing is lost: they have no values yet."""
    model = as_module(lambda: nn.Sequential(square(), nn.BatchNorm1d(WIDTH)).double())
    materialise(model, 0, CPU)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float64, torch.int64}
    assert 0.1 < model[0].weight.std() < 0.3


def test_a_batch_norm_that_is_on_meta_by_itself() -> None:
    model = as_module(lambda: nn.Sequential(square(), nn.BatchNorm1d(WIDTH, device="meta")))
    materialise(model, 0, CPU)
    assert model[1].running_var.tolist() == [1.0] * WIDTH


def test_layers_that_are_on_meta_by_themselves_begin_as_all_others() -> None:
    class Truncated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.trunc_normal_(self.weight, std=0.02)

    model = as_module(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, device="meta"), Truncated()))
    materialise(model, 0, torch.device("cpu"))
    assert 0.1 < model[0].weight.std() < 0.3
    assert 0.01 < model[1].weight.std() < 0.03


@pytest.mark.parametrize(
    "init",
    [
        constant,
        by_data,
        a_row,
        applied,
        replaced,
        truncated,
        orthogonal,
        sparse,
        like_it,
        turned,
        by_its_data,
        loaded,
        copied,
    ],
)
@pytest.mark.filterwarnings("ignore:.*is a no-op.*")
def test_values_that_would_be_lost_on_meta_are_told(init: Callable[[nn.Sequential], None]) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(square(), nn.ReLU())
        init(model)
        return model

    with pytest.raises(ModelError) as caught:
        as_module(make)
    text = str(caught.value)
    assert text.startswith("make gives its weights values that would be lost")
    lines, first = inspect.getsourcelines(init)
    line = first + next(i for i, each in enumerate(lines) if each.endswith("# here\n"))
    assert text.count(f"\n  {__file__}:{line}: ") == 1
    assert "Ways out: give the model itself" in text
    assert not is_on_meta(as_module(make()))  # which is the way out


def test_an_outer_layer_that_gives_inner_ones_values_is_told() -> None:
    """It was called only where its own weights were."""
    with pytest.raises(ModelError, match=r"nn\.init\.zeros_\(self\.inner\.weight\)"):
        as_module(lambda: nn.Sequential(square(), FromOutside()))


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones_like(self.weight))


def test_buffers_that_are_made_of_weights_are_told() -> None:
    """Their memory was whatever lay there."""
    with pytest.raises(ModelError, match=r"1\.mask, a buffer that is made of weights"):
        as_module(lambda: nn.Sequential(square(), Masked()))


def test_hooks_and_attributes_of_weights_are_kept() -> None:
    def make() -> nn.Module:
        layer = square()
        layer.weight.register_hook(lambda gradient: gradient * 0)
        layer.bias.no_decay = True
        layer.bias.register_post_accumulate_grad_hook(add)
        return layer

    def add(bias: Tensor) -> None:
        bias.grad.add_(7)

    model = as_module(make)
    materialise(model, 0, torch.device("cpu"))
    model(torch.ones(2, WIDTH)).sum().backward()
    assert not model.weight.grad.any()
    assert model.bias.no_decay is True
    assert model.bias.grad.eq(9).all()


def test_weights_that_reset_parameters_leaves_out_are_told() -> None:
    """They would begin with whatever was in memory."""

    class Half(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.gain = nn.Parameter(torch.ones(WIDTH))

    for make, name in (
        (lambda: nn.Sequential(Half()), "0.gain"),
        (lambda: nn.Embedding.from_pretrained(torch.ones(3, 2)), "weight"),
    ):
        with pytest.raises(ModelError, match=rf"\n  {name}, which its layer's reset_parameters"):
            as_module(make)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Embedding(3, WIDTH, padding_idx=0),
        lambda: nn.LSTM(WIDTH, WIDTH, proj_size=2),
        lambda: nn.MultiheadAttention(WIDTH, 2, kdim=3, vdim=3, add_bias_kv=True),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, batch_first=True), 2),
        lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2]),
        lambda: nn.Sequential(nn.PReLU(), nn.RMSNorm(WIDTH), nn.BatchNorm1d(WIDTH)),
    ],
    ids=["Embedding", "LSTM", "MultiheadAttention", "Encoder", "Softmax", "Norms"],
)
def test_layers_of_torch_give_their_weights_values_by_reset_parameters(make: Any) -> None:
    assert is_on_meta(as_module(make))


def test_layers_made_on_meta_that_cannot_be_given_weights_are_named_together() -> None:
    with torch.device("meta"):
        model = nn.Sequential(square(), Silent(), nn.Sequential(Table()), Silent())
    with pytest.raises(ModelError) as caught:
        materialise(model, 5, CPU)
    faults = caught.value.faults
    assert [fault.split(" has no ")[0] for fault in faults] == [
        "1 (Silent)", "2.0 (Table)", "3 (Silent)"
    ]  # fmt: skip
    assert all("reset_parameters()" in fault and "Write one" in fault for fault in faults)
    with torch.device("meta"):
        model = Silent()
    with pytest.raises(ModelError, match=r"^Silent \(Silent\) has no reset_parameters"):
        materialise(model, 5, CPU)


def test_constants_that_differ_from_rank_to_rank_are_seen() -> None:
    """A permutation, say, that each rank has drawn for itself."""

    class Permutes(nn.Module):
        def __init__(self, order: list[int]) -> None:
            super().__init__()
            self.order, self.table = order, torch.tensor(order)

        def forward(self, x: Tensor) -> Tensor:
            return x[:, self.order]

    one, other = (outline(read(nn.Sequential(square(), Permutes(o)))) for o in ([0, 1], [1, 0]))
    differing = [line for line in one if line not in other]
    assert len(differing) == 2
    assert differing[0].startswith("step getitem: call_function ")
    assert differing[1].startswith("1.table of the values ")


def test_tensors_that_have_some_memory_in_common() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data[2:]
    model[2].weight.data = model[0].weight.data[:2]
    with pytest.raises(ModelError) as caught:
        check_state(model)
    assert [fault.partition(" have")[0] for fault in caught.value.faults] == [
        "0.weight and 1.weight",
        "0.weight and 2.weight",
    ]


class Noted(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}


def test_states_that_cannot_be_shared_out() -> None:
    with pytest.raises(ModelError) as caught:
        check_state(nn.Sequential(nn.LazyLinear(2, bias=False), Noted(2, 2)))
    lazy, extra = caught.value.faults
    assert lazy.startswith("0.weight has no shape yet: call the model once")
    assert extra.startswith("1._extra_state (get_extra_state) is no tensor")
