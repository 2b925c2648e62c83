"""Stages that become data and stages again: the same to the bit; and what cannot be data."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations

from shoal import Layer
from shoal.errors import ModelError
from shoal.pipeline.build import as_module
from shoal.pipeline.graph import Graph, read
from shoal.pipeline.known import Allowed
from shoal.pipeline.layers import model_of
from shoal.pipeline.meta import is_on_meta, materialise
from shoal.pipeline.portable import pack, tensors_in, to_data, unpack
from shoal.pipeline.rebuild import fill, from_data
from shoal.pipeline.routes import route
from shoal.pipeline.split import OUTPUT, stage_module, values_made
from shoal.pipeline.stage import Stage
from shoal.pipeline.staged import StageModule
from shoal.pipeline.steps import StepByStep
from shoal.train.models.zoo import ConvNet, MnistCnn, ResidualMlp, TutorialCnn
from shoal.wire.tree import tensors_of, with_tensors

WIDTH = 8


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# -- models ----------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Attention by hand, with a mask that comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = square(), square(), square()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-2, -1) / math.sqrt(x.size(-1))
        scores = scores.masked_fill(mask[:, None, :] == 0, float("-inf"))
        return F.softmax(scores, dim=-1) @ self.v(x)


class Containers(nn.Module):
    """Tuples and dicts in, between steps, and out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = square(), square()

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        x = self.a(batch["x"])
        low, high = x.chunk(2, dim=1)[0], batch.get("y")
        best = x.max(dim=1)
        return {"sum": (low, [high + 1, None]), "best": best.values, "at": best[1], "n": 3}


class Slices(nn.Module):
    """Indices of every form, sizes, dtypes and numbers that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.a = square()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.a(x)
        n = x.size(0)
        picked = x[..., None, ::2][: n - 1, :, 1:3]
        clipped = torch.clamp(x, min=-math.inf, max=1.5).to(torch.float64).to(x.dtype)
        zeros = torch.zeros((n, 2), dtype=x.dtype, device=x.device) + x.new_ones(2)
        places = torch.arange(x.shape[1]).view(1, -1) * x
        whole = x.reshape(x.shape.numel() // 4, *[4]).to(memory_format=torch.contiguous_format)
        return picked, clipped, zeros, places, whole, x.T.mean(dim=(0, 1), keepdim=True)


class Constants(nn.Module):
    """Tensors that forward() takes from elsewhere: buffers, parameters, and what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.inner = nn.Module()
        self.inner.shift = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("kept", torch.rand(WIDTH))
        self.register_buffer("passing", torch.rand(WIDTH), persistent=False)
        self.a = square()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x * self.scale + self.inner.shift) + self.kept
        x = x * self.passing + torch.tensor([0.5])
        return x - torch.ones(1) if self.training else x - torch.zeros(1)


class Tied(nn.Module):
    """Words in and words out, with one table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.mix = square()
        self.out = nn.Linear(WIDTH, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embedding(words))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, activation="gelu", batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.encoder(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 4, num_layers=2, dropout=0.2, bidirectional=True)
        self.gru = nn.GRU(WIDTH, 4, bias=False)
        self.cell = nn.LSTMCell(WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, (h, _) = self.lstm(x)[0], self.lstm(x)[1]
        return self.gru(x)[0], h, self.cell(x[0])[1]


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = square(), nn.BatchNorm1d(WIDTH, affine=False), square()
        self.a.requires_grad_(False)
        self.bare = nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.bare(self.norm(self.a(x))))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu = square(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y += 1
        y = self.relu(y) + 1
        y.mul_(2).clamp_(max=3)
        return F.dropout(y, 0.5, self.training)


def doubled(x: Tensor, other: Tensor) -> Tensor:
    return 2 * x + other


def listed() -> nn.Module:
    return model_of(
        [
            Layer(nn.Linear, WIDTH, WIDTH, gives="a"),
            Layer(nn.Tanh, gives=("b", "c")),
            Layer(nn.Linear, WIDTH, WIDTH, takes="a"),
            Layer(nn.Linear, 3 * WIDTH, WIDTH, takes=["b", "c"], combine="cat"),
            Layer(nn.Bilinear, WIDTH, WIDTH, WIDTH, takes="a", combine="args"),
            Layer(square(), takes="b", combine=doubled),
        ]
    )


def of_tuples() -> nn.Module:
    return model_of(
        [
            (nn.Linear, {"in_features": 8, "out_features": 8, "out_variables": ["res_1"]}, (2, 8)),
            (nn.ReLU, {}, (2, 8)),
            (nn.Linear, {"in_features": 8, "out_features": 8, "dependencies": ["res_1"]}),
        ]
    )


def rows(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(*shape),)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "mnist-cnn": (MnistCnn, rows(2, 1, 28, 28)),
    "convnet": (ConvNet, rows(2, 1, 28, 28)),
    "tutorial-cnn": (TutorialCnn, rows(2, 1, 28, 28)),
    "residual-mlp": (lambda: ResidualMlp(16), rows(3, 1)),
    "layers": (listed, rows(3, WIDTH)),
    "tuples": (of_tuples, rows(3, WIDTH)),
    "sequential": (lambda: nn.Sequential(square(), nn.Softplus(2.0), square()), rows(3, WIDTH)),
    "masked": (Masked, lambda: (torch.randn(2, 5, WIDTH), torch.randint(1, 2, (2, 5)))),
    "containers": (
        Containers,
        lambda: ({"x": torch.randn(3, WIDTH), "y": torch.randn(3)},),
    ),
    "slices": (Slices, rows(4, WIDTH)),
    "constants": (Constants, rows(3, WIDTH)),
    "tied": (Tied, lambda: (torch.randint(0, 11, (3, 4)),)),
    "attention": (Attention, rows(2, 5, WIDTH)),
    "recurrent": (Recurrent, rows(5, 2, WIDTH)),
    "frozen": (Frozen, rows(3, WIDTH)),
    "in place": (InPlace, rows(3, WIDTH)),
}


# -- there and back --------------------------------------------------------------------------------


def sent(stage: StageModule, allowed: Allowed | None = None) -> StepByStep:
    """As a worker has it in the end. Values are copied, as on a wire."""
    data, tensors = to_data(stage)
    made = from_data(unpack(pack(data)), allowed or Allowed())
    assert all(tensor.is_meta for tensor in tensors_in(made).values())
    assert fill(made, {name: tensor.clone() for name, tensor in tensors.items()}) == []
    return made


def leaves(values: Sequence[Any]) -> list[Any]:
    """The same values, to be differentiated by."""
    made = []
    for value in values:
        copies = {path: t.detach().clone() for path, t in tensors_of(value).items()}
        for tensor in copies.values():
            tensor.requires_grad_(tensor.is_floating_point())
        made.append(with_tensors(value, copies))
    return made


class Ran(NamedTuple):
    made: list[Any]
    tensors: list[Tensor]
    """All that came out, and all gradients."""


def run(module: nn.Module, values: Sequence[Any], training: bool) -> Ran:
    module.train(training)
    given = leaves(values)
    torch.manual_seed(5)
    made = module(*given)
    out = [t for tree in made for t in tensors_of(tree).values()]
    wanted = [tensor for tensor in out if tensor.requires_grad]
    torch.autograd.backward(wanted, [torch.rand_like(each) for each in wanted])
    gradients = [t.grad for value in given for t in tensors_of(value).values()]
    gradients += [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return Ran(made, [*out, *(torch.zeros(0) if g is None else g for g in gradients)])


def assert_same(mine: Ran, theirs: Ran) -> None:
    assert with_no_tensors(mine.made) == with_no_tensors(theirs.made)
    for one, other in zip(mine.tensors, theirs.tensors, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


def with_no_tensors(tree: Any) -> Any:
    return with_tensors(tree, dict.fromkeys(tensors_of(tree), None))  # type: ignore[arg-type]


def check_stages(graph: Graph, inputs: Sequence[Any], cuts: list[int], training: bool) -> None:
    routes = route(graph, cuts)
    values = dict(zip(graph.inputs, inputs, strict=True))
    for stage in range(routes.num_stages):
        module = stage_module(graph, routes, stage)
        rebuilt = sent(module)
        names = graph.inputs if stage == 0 else [port.value for port in routes.ports[stage]]
        entering = [values[name] for name in names]
        ran = run(module, entering, training)
        assert_same(run(rebuilt, entering, training), ran)
        check_state(rebuilt, module)
        values |= zip(values_made(graph, routes, stage), ran.made, strict=True)


def check_state(rebuilt: nn.Module, original: nn.Module) -> None:
    mine, theirs = rebuilt.state_dict(), original.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert [name for name, _ in rebuilt.named_parameters()] == [
        name for name, _ in original.named_parameters()
    ]
    for name, parameter in original.named_parameters():
        assert rebuilt.get_parameter(name).requires_grad == parameter.requires_grad


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES)
def test_every_stage_of_every_cut_is_the_same(case: str, training: bool) -> None:
    torch.manual_seed(1)
    make, inputs = CASES[case]
    graph = read(make())
    num_units = len(graph.units)
    for cuts in [[], *([cut] for cut in range(1, num_units)), list(range(1, num_units))]:
        check_stages(graph, inputs(), cuts, training)


def whole(model: nn.Module) -> StageModule:
    graph = read(model)
    return stage_module(graph, route(graph, []), 0)


def test_both_modes_are_one_module() -> None:
    """The steps differ, all that they use is there once."""
    model = Constants()
    stage = whole(model)
    data, tensors = to_data(stage)
    assert data.evaluating is not None
    assert data.evaluating != data.training
    assert list(tensors) == [
        "scale",
        "inner.shift",
        "a.weight",
        "a.bias",
        *("kept", "passing", "_tensor_constant0", "_tensor_constant1"),
        *("_tensor_constant2", "_tensor_constant3"),
    ]
    assert set(sent(stage).state_dict()) == set(model.state_dict())


def test_steps_that_are_the_same_in_both_modes_are_sent_once() -> None:
    data, _ = to_data(whole(MnistCnn()))
    assert data.evaluating is None


def test_one_mode_alone() -> None:
    """A loss, for one."""
    graph = fx.Graph()
    output, target = graph.placeholder("output"), graph.placeholder("target")
    graph.output(graph.call_function(F.cross_entropy, (output, target), {"reduction": "sum"}))
    made = sent(StageModule(nn.Module(), graph))
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    for training in (True, False):
        assert torch.equal(made.train(training)(x, y), F.cross_entropy(x, y, reduction="sum"))


def test_what_is_tied_stays_tied() -> None:
    made = sent(whole(Tied()))
    assert made.get_parameter("out.weight") is made.get_parameter("embedding.weight")
    data, tensors = to_data(whole(Tied()))
    assert "embedding.weight" in tensors
    assert "out.weight" not in tensors
    assert len(data.tensors) == len(tensors)


def test_a_module_with_two_names_stays_one() -> None:
    """torch.fx calls it by the first one; but inside what it keeps whole there may be others."""
    inner = nn.Module()
    inner.one, inner.other, inner.none = square(), nn.ModuleList(), None
    inner.other.append(inner.one)
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_module("inner.one", (graph.call_module("inner.other.0", (x,)),))])
    root = nn.Module()
    root.inner = inner
    module = StageModule(root, graph)
    module.inner = inner
    made = sent(module)
    assert made.get_submodule("inner.one") is made.get_submodule("inner.other.0")
    check_state(made, module)
    assert_same(run(made, [torch.ones(1, WIDTH)], True), run(module, [torch.ones(1, WIDTH)], True))


def test_flags_of_modules_are_kept() -> None:
    model = nn.Sequential(square(), nn.Dropout(0.25))
    stage = whole(model)
    stage.get_submodule("0").eval()
    made = sent(stage)
    assert not made.get_submodule("0").training
    assert made.get_submodule("1").training
    assert made.get_submodule("1").p == 0.25


def test_numbers_of_numpy_are_numbers() -> None:
    model = nn.Sequential(nn.Dropout(torch.rand(1).numpy()[0]), nn.LayerNorm(WIDTH))
    made = sent(whole(model))
    assert made.get_submodule("0").p == model[0].p
    assert type(made.get_submodule("0").p) is float


def test_a_copy_is_a_copy() -> None:
    """What is looked up when a step is taken is looked up in the module that takes it."""
    made = sent(whole(nn.Sequential(square(), nn.Tanh())))
    twin = copy.deepcopy(made)
    x = torch.randn(2, WIDTH)
    before = made(x)[0]
    with torch.no_grad():
        twin.get_parameter("0.weight").zero_()
    assert torch.equal(made(x)[0], before)
    assert not torch.equal(twin(x)[0], before)


def test_it_can_move() -> None:
    made = sent(whole(Recurrent())).double()
    h = made(torch.randn(5, 2, WIDTH, dtype=torch.float64))[0][1]
    assert h.dtype == torch.float64
    assert sent(whole(Constants())).double()(torch.randn(2, WIDTH).double())[0].dtype == h.dtype


def test_values_are_freed_when_nobody_needs_them() -> None:
    made = sent(whole(nn.Sequential(*[square() for _ in range(4)])))
    alive: list[weakref.ref[Tensor]] = []
    at_the_end: list[int] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        at_the_end.append(sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(output))

    for number in range(4):
        made.get_submodule(str(number)).register_forward_hook(note)
    with torch.no_grad():
        made(torch.randn(2, WIDTH))
    assert at_the_end == [0, 1, 1, 1]  # only what the layer was given


def test_an_error_names_the_step() -> None:
    made = sent(whole(nn.Sequential(square(), nn.Tanh(), square())))
    with pytest.raises(RuntimeError) as caught:
        made(torch.randn(2, WIDTH + 1))
    assert caught.value.__notes__ == ["in layer 0 of this stage"]
    with pytest.raises(TypeError, match="takes 1 values, not 2"):
        made(1, 2)


def test_weights_can_be_made_where_they_are() -> None:
    """Of a model that was built on meta, only what has values is sent."""

    def net() -> nn.Module:
        return nn.Sequential(square(), nn.BatchNorm1d(WIDTH), nn.LSTM(WIDTH, 4))

    model = as_module(net, seed=7)
    data, tensors = to_data(whole(model))
    assert list(tensors) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    made = from_data(unpack(pack(data)), Allowed())
    missing = fill(made, tensors)
    assert set(missing) == {name for name, _ in model.named_parameters()}
    for module in (model, made):
        materialise(module, 7, torch.device("cpu"))
        assert not is_on_meta(module)
    check_state(made, model)
    x = torch.randn(3, WIDTH)
    assert torch.equal(made(x)[0][0], model(x)[0])


def test_a_stage_that_works_with_it() -> None:
    """In place of both modules that torch.fx made."""
    graph = read(Constants())
    routes = route(graph, [2])
    x = {graph.inputs[0]: torch.randn(3, WIDTH)}

    def stage(number: int) -> Stage:
        module = sent(stage_module(graph, routes, number))
        makes = values_made(graph, routes, number)
        return Stage(routes, number, module, inputs=graph.inputs, makes=makes)

    def results(stages: list[Stage]) -> Iterator[Tensor]:
        for training in (True, False):
            for each in stages:
                each.module.train(training)
            made = stages[0].forward((0, 0), x, {})
            out = stages[1].forward((0, 0), {}, {0: stages[0].parcel(made, 1)})[OUTPUT]
            stages[1].keep_loss((0, 0), out.sum())
            stages[0].backward((0, 0), {1: stages[1].backward((0, 0), {})[0]})
            while stages[1].backward_weights():
                continue
            yield out
            yield from (p.grad for each in stages for p in each.module.parameters())

    mine = results([stage(number) for number in range(2)])
    for one, other in zip(
        mine, results([Stage.of(graph, routes, n) for n in range(2)]), strict=True
    ):
        assert torch.equal(one, other)


# -- what cannot be data ---------------------------------------------------------------------------


def faults_of(model: nn.Module) -> list[str]:
    with pytest.raises(ModelError) as caught:
        to_data(whole(model))
    return caught.value.faults


class Whole(nn.Module):
    """Cannot be read by torch.fx, so it is kept whole."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_attributes_that_are_no_plain_values_all_at_once() -> None:
    inside: list[Any] = []
    inside.append(inside)
    model = nn.Sequential(
        Whole(
            config=object(),
            table=torch.ones(2),
            act=lambda x: x,
            layers=[square()],
            deep=inside,
            text="\ud800",
            keys={(1, 2): 3},
            fine=(F.relu, 1, [None, {"a": torch.float16}], math.inf, 2**70, 1 - 2j, ...),
        )
    )
    assert faults_of(model) == [
        f"0 (Whole): its attribute {name!r} is {what}, which cannot be sent.{advice}"
        for name, what, advice in [
            ("config", "a builtins.object", ""),
            ("table", "a torch.Tensor", " Make it a buffer."),
            ("act", "a builtins.function", ""),
            ("layers", "a torch.nn.modules.linear.Linear", ""),
            ("deep", "nested more than 32 deep", ""),
            ("text", "text that is no Unicode", ""),
            ("keys", "a dict whose keys are no plain values", ""),
        ]
    ]


def hooked(register: str, *hook: Any) -> nn.Module:
    model = nn.Sequential(square(), nn.ReLU())
    getattr(model[0], register)(*hook)
    return model


def test_hooks_would_be_lost() -> None:
    def hook(*args: Any) -> None: ...

    for register in (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_state_dict_post_hook",
        "register_load_state_dict_post_hook",
    ):
        (fault,) = faults_of(hooked(register, hook))
        assert fault.startswith("0 (Linear) has ")
        assert fault.endswith("hooks, which cannot be sent.")
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = nn.Sequential(square())
        getattr(model[0].bias, register)(hook)
        assert faults_of(model) == ["0.bias has hooks, which cannot be sent."]


def test_parametrizations_cannot_be_sent() -> None:
    model = nn.Sequential(square(), parametrizations.weight_norm(square()))
    fault = faults_of(model)[-1]
    assert fault.startswith("1 (ParametrizedLinear) cannot be sent: torch.nn.utils.parametrize:")


def test_tensors_that_cannot_be_sent() -> None:
    model = nn.Sequential(square(), square(), square())
    model[0].register_buffer("sparse", torch.eye(2).to_sparse())
    model[0].register_buffer("made", model[1].weight * 2)
    model[2].weight.data = model[1].weight.data
    assert faults_of(model) == [
        "0.sparse is a Tensor of layout torch.sparse_coo, which cannot be sent.",
        "0.made is computed from other parameters outside of forward(), which cannot be sent.",
        "1.weight and 2.weight are two parameters with the same memory, which cannot be sent. "
        "Let both names be one nn.Parameter.",
    ]


def test_a_layer_without_a_shape() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))
    assert "0.weight has no shape yet: run the model once before it is sent." in faults_of(lazy)
    lazy(torch.randn(2, WIDTH))
    assert sent(whole(lazy)).get_submodule("0").in_features == WIDTH


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@fx.wrap
def wrapped(x: Tensor) -> Tensor:
    return x


class Foreign(nn.Module):
    """Steps that are no operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.a = square()

    def forward(self, x: Tensor) -> Any:
        x = wrapped(self.a(x))
        y = torch.ops.aten.relu(x) + x.grad
        x.register_hook(None).numpy()
        return Pair(x, y)


def test_steps_that_are_no_operations_all_at_once() -> None:
    graph = fx.Tracer().trace(Foreign())
    with pytest.raises(ModelError) as caught:
        to_data(StageModule(Foreign(), graph))
    here = __name__
    known = "is no operation that workers know; most of torch, operator and math are. Write it "
    way = "with those, or inside a module that is kept whole."
    assert caught.value.faults == [
        f"step wrapped: {here}.wrapped {known}{way}",
        f"step relu: aten.relu {known}{way}",
        "step getattr_1: workers read no attribute 'grad' of a value.",
        "step register_hook: workers call no method 'register_hook' of a value.",
        "step numpy: workers call no method 'numpy' of a value.",
        f"step pair: workers make no {here}.Pair. Let forward() return a tuple or a dict.",
    ]


def test_an_argument_that_is_no_plain_value() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.relu, (x,), {"a": {1: torch.qint8}}))
    with pytest.raises(ModelError, match=r"step relu: among its arguments is a torch\.dtype"):
        to_data(StageModule(nn.Module(), graph))


def test_a_class_that_workers_could_not_find() -> None:
    class Local(Whole):
        pass

    Local.__qualname__ = "Local"
    (fault,) = faults_of(nn.Sequential(Local()))
    assert fault == (
        "0 (Local) cannot be sent: workers find classes by name, at the top level of a file; move "
        "it there."
    )
    Local.__module__ = "__main__"
    (fault,) = faults_of(nn.Sequential(Local()))
    assert "defined in the script itself" in fault


@pytest.fixture(autouse=True)
def same_weights() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
