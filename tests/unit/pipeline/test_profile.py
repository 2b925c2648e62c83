"""Profiles: a cost for every step, and no trace left in the model."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.errors import ModelError
from shoal.layout import Share
from shoal.pipeline.graph import read
from shoal.pipeline.in_place import check_in_place
from shoal.pipeline.partition import Costs, Unit, Value, stage_bytes
from shoal.pipeline.profile import check_shapes, choose_cuts, profile
from shoal.pipeline.schedule import make_schedule
from shoal.train.models.zoo import ConvNet, MnistCnn, ResidualMlp, TutorialCnn

WIDTH = 16
FLOAT_BYTES = 4


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def by_name(model: nn.Module, inputs: dict[str, Any]) -> tuple[dict[str, Unit], dict[str, Value]]:
    graph = read(model)
    units, values = profile(graph, inputs)
    assert [unit.name for unit in units] == graph.names()
    names = [*graph.inputs, *graph.units]
    return {unit.name: unit for unit in units}, dict(zip(names, values, strict=True))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Parameters, gradients, buffers, modes, and what chance has in store."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    identities = [id(p) for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    chance = torch.random.get_rng_state()
    yield
    assert torch.equal(torch.random.get_rng_state(), chance)
    assert [module.training for module in model.modules()] == modes
    assert [id(p) for p in model.parameters()] == identities
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


class Mixed(nn.Module):
    """Integers, masks, numbers, tuples, a parameter by itself, chance, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH))
        self.drop = nn.Dropout(0.5)
        self.fc = square()

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.embed(tokens)) * self.scale + self.shift
        x = self.drop(x).masked_fill(mask, 0.0).view(tokens.size(0), -1)
        left, right = x.chunk(2, dim=1)
        return self.fc(torch.cat([right, left], dim=1)), x.argmax(dim=1)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)
        self.shift.fill_(0.5)


def mixed_inputs() -> dict[str, Any]:
    return {"tokens": torch.tensor([1, 2, 3]), "mask": torch.rand(3, WIDTH) > 0.5}


MODELS: list[tuple[nn.Module, dict[str, Any]]] = [
    (MnistCnn(), {"x": torch.randn(2, 1, 28, 28)}),
    (ConvNet(), {"x": torch.randn(2, 1, 28, 28)}),
    (TutorialCnn(), {"x": torch.randn(2, 1, 28, 28)}),
    (ResidualMlp(8), {"x": torch.randn(2, 1)}),
    (Mixed(), mixed_inputs()),
]
IDS = [type(model).__name__ for model, _ in MODELS]


@pytest.mark.parametrize(("model", "inputs"), MODELS, ids=IDS)
def test_every_step_has_its_costs(model: nn.Module, inputs: dict[str, Any]) -> None:
    units, values = profile(graph := read(model), inputs)
    assert [unit.name for unit in units] == graph.names()
    assert all(unit.forward_s > 0 and unit.backward_s >= 0 for unit in units)
    assert len(values) == len(graph.inputs) + len(units)
    last = len(units) - 1  # where the model's output is
    users = [sorted({min(user, last) for user in uses}) for uses in graph.users().values()]
    assert [list(value.used_by) for value in values] == users
    # No parameter is used twice here, so together they are the model's.
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(unit.parameter_bytes for unit in units) == whole


def test_bytes_of_what_is_made_and_kept() -> None:
    model = nn.Sequential(square(), nn.ReLU(), nn.Linear(WIDTH, 3))
    units, values = by_name(model, {read(model).inputs[0]: torch.randn(5, WIDTH)})
    # The loss keeps as much again as the model gives.
    assert [unit.kept_bytes for unit in units.values()] == [5 * WIDTH * 4] * 2 + [2 * 5 * 3 * 4]
    assert [unit.late_bytes for unit in units.values()] == [5 * WIDTH * 4, 0, 5 * 3 * 4]
    assert [value.size_bytes for value in values.values()] == [5 * WIDTH * 4] * 3 + [5 * 3 * 4]
    assert [unit.parameter_bytes for unit in units.values()] == [
        FLOAT_BYTES * (WIDTH * WIDTH + WIDTH), 0, FLOAT_BYTES * (WIDTH * 3 + 3)
    ]  # fmt: skip


def test_what_a_module_keeps_inside_counts() -> None:
    """A limit of memory is for all of it, not for what the module gives."""

    class Whole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 1e9:  # kept whole, as it cannot be read
                return x
            return x.tanh().tanh().tanh()

    model = nn.Sequential(square(), Whole(), nn.ReLU())
    units, _ = by_name(model, {read(model).inputs[0]: torch.randn(5, WIDTH)})
    assert units["1"].kept_bytes == 3 * 5 * WIDTH * FLOAT_BYTES


class Again(nn.Module):
    """A layer that is used three times, one weight by itself, and a buffer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = square(), square(), square()
        self.last.bias = self.again.bias
        self.register_buffer("shift", torch.rand(100, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.get_buffer("shift")[0]
        for _ in range(3):
            x = self.again(x)
        return self.last(x + self.again.weight[0]) * self.get_buffer("shift")[1]


def test_what_is_used_again_is_held_once() -> None:
    model = Again()
    units, _ = by_name(model, {"x": torch.randn(5, WIDTH)})
    held = [unit.parameter_bytes for unit in units.values()]
    weight, bias = FLOAT_BYTES * WIDTH * WIDTH, FLOAT_BYTES * WIDTH
    assert [size for size in held if size] == [weight + bias, weight + bias, weight]
    assert sum(held) == sum(p.nbytes for p in model.parameters())


def test_a_stage_needs_memory_for_its_buffers() -> None:
    """Once, whether one of its steps uses them or many."""
    graph, inputs = read(Again()), {"x": torch.randn(5, WIDTH)}
    units, values = profile(graph, inputs)
    whole = stage_bytes(units, values, 0, len(units), Costs())

    def fits(free: float) -> bool:
        try:
            choose_cuts(graph, inputs, 1, Costs(memory_bytes=[int(whole + free)]))
        except ModelError:
            return False
        return True

    shift = 100 * WIDTH * FLOAT_BYTES
    assert not fits(shift - 1)
    assert fits(shift)


def test_a_piece_of_what_is_there_needs_no_more() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = square()
            self.register_buffer("table", torch.rand(100, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            turned = self.fc(x).view(-1).view(x.shape).t()
            return self.get_buffer("table").t().t() @ turned.relu_()

    units, _ = by_name(Net(), {"x": torch.randn(5, WIDTH)})
    kept = [unit.kept_bytes // FLOAT_BYTES for unit in units.values()]
    assert [size for size in kept if size] == [5 * WIDTH, 5 * WIDTH, 2 * 5 * 100]


def test_a_module_that_cannot_be_copied() -> None:
    class Locked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.lock = threading.Lock()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() < 1e9 else x  # kept whole

    graph = read(nn.Sequential(Locked(), square()))
    with pytest.raises(
        ModelError, match=r"a Locked cannot be copied \(.*lock.*cuts= and no example="
    ):
        profile(graph, {graph.inputs[0]: torch.randn(5, WIDTH)})


def test_what_was_used_for_the_last_time_is_let_go() -> None:
    """The activations of a whole model may be more than rank 0 can hold."""
    made_so_far: list[StorageWeakRef] = []
    most = 0

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal most
            made = x * 2 if x.sum() < 1e9 else x  # kept whole, as it cannot be read
            made_so_far.append(StorageWeakRef(made.untyped_storage()))
            most = max(most, sum(not each.expired() for each in made_so_far))
            return made

    graph = read(nn.Sequential(*(Counts() for _ in range(20))))
    profile(graph, {graph.inputs[0]: torch.randn(5, WIDTH)})
    assert 0 < most < 5


def test_what_has_a_gradient() -> None:
    _, values = by_name(Mixed(), mixed_inputs())
    with_gradient = {name for name, value in values.items() if value.has_gradient}
    assert {"embed", "norm", "masked_fill", "chunk", "fc"} <= with_gradient
    assert not with_gradient & {"tokens", "mask", "size", "argmax"}


def test_a_slow_step_is_found() -> None:
    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x
            for _ in range(300 if x.sum() > -1e9 else 1):  # kept whole, as it cannot be read
                y = y @ x
            return y.clamp(-1, 1)

    model = nn.Sequential(nn.ReLU(), Slow(), nn.ReLU())
    units, _ = profile(graph := read(model), {read(model).inputs[0]: torch.rand(32, 32) / 32})
    slowest = max(units, key=lambda unit: unit.forward_s)
    assert slowest.name == graph.names()[1]


def test_a_step_that_is_kept_from_its_core_is_no_slow_one() -> None:
    """On a busy host any step is, and all would look alike."""

    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > -1e9:  # kept whole, as it cannot be read
                threading.Event().wait(0.2)
            return x.clamp(-1, 1)

    units, _ = by_name(nn.Sequential(nn.ReLU(), Interrupted()), {"input_1": torch.rand(4, 4)})
    assert units["1"].forward_s < 0.1


@pytest.mark.parametrize(("model", "inputs"), MODELS, ids=IDS)
@pytest.mark.parametrize("has_gradients", [True, False])
def test_the_model_is_left_as_it_was(
    model: nn.Module, inputs: dict[str, Any], has_gradients: bool
) -> None:
    model = copy.deepcopy(model)
    if has_gradients:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    given = copy.deepcopy(inputs)
    with unchanged(model):
        profile(read(model), inputs)
    torch.testing.assert_close(inputs, given, rtol=0, atol=0)


def test_the_model_is_left_as_it_was_without_gradients() -> None:
    model, inputs = Mixed(), mixed_inputs()
    with torch.no_grad(), unchanged(model):
        units, _ = profile(read(model), inputs)
    assert max(unit.backward_s for unit in units) > 0


def test_inputs_are_left_as_they_were() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, WIDTH)

        def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
            return self.embed(tokens.add_(1)) + x.relu_()

    tokens, x = torch.zeros(3, dtype=torch.int64), -torch.ones(3, WIDTH)
    x.requires_grad_(False)
    profile(read(Net()), {"tokens": tokens, "x": x})
    assert tokens.tolist() == [0, 0, 0]
    assert x.sum() == -3 * WIDTH


def test_an_input_that_needs_a_gradient_gets_none() -> None:
    model = ResidualMlp(8)
    x = torch.randn(2, 1, requires_grad=True)
    profile(read(model), {"x": x})
    assert x.grad is None


def test_steps_in_place() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.relu, self.b = square(), nn.ReLU(inplace=True), square()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.relu(self.a(x))).tanh_()

    units, _ = by_name(Net(), {"x": torch.randn(3, WIDTH)})
    assert list(units) == ["a", "relu", "b", "tanh_"]


def test_named_fields_of_a_tuple() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = square()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).max(dim=1).values

    units, _ = by_name(Net(), {"x": torch.randn(3, WIDTH)})
    assert list(units) == ["a", "max_1", "getattr_1"]


def test_frozen_parameters() -> None:
    model = ResidualMlp(8).requires_grad_(False)
    units, _ = by_name(model, {"x": torch.randn(2, 1)})
    assert sum(unit.parameter_bytes for unit in units.values()) > 0


# -- on meta ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "inputs"), MODELS, ids=IDS)
def test_a_model_on_meta_stays_there(model: nn.Module, inputs: dict[str, Any]) -> None:
    on_meta = copy.deepcopy(model).to("meta")
    graph = read(on_meta)
    chance = torch.random.get_rng_state()
    units, values = profile(graph, inputs)
    assert {t.device.type for t in on_meta.state_dict().values()} == {"meta"}
    assert torch.equal(torch.random.get_rng_state(), chance)
    there, values_there = profile(read(model), inputs)
    for mine, other in zip(units, there, strict=True):
        assert mine.forward_s > 0
        assert (mine.name, mine.parameter_bytes, mine.kept_bytes) == (
            other.name, other.parameter_bytes, other.kept_bytes
        )  # fmt: skip
    assert values == values_there


def test_the_fastest_of_all_passes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was busy for as long as one step took its turn moved cuts elsewhere."""
    seconds = iter([9.0, 2.0, 1.0, 8.0, 3.0, 7.0])  # of two steps, in three passes

    def timed(node: Any, graph: Any, known: Any, name: str) -> tuple[Tensor, Unit]:
        took = next(seconds)
        return torch.ones(3, WIDTH), Unit(name, took, 2 * took, took / 2)

    monkeypatch.setattr("shoal.pipeline.profile.timed", timed)
    graph = read(nn.Sequential(square(), square()))
    units, _ = profile(graph, {graph.inputs[0]: torch.randn(3, WIDTH)})
    assert [unit.forward_s for unit in units] == [1.0, 2.0]
    assert [unit.backward_s for unit in units] == [2.0, 4.0]
    assert [unit.weights_s for unit in units] == [0.5, 1.0]


def test_one_layer_of_a_model_on_meta_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    num_alive: list[int] = []
    reset = nn.Linear.reset_parameters

    def counted(layer: nn.Linear) -> None:
        reset(layer)
        made.append(weakref.ref(layer.weight))
        num_alive.append(sum(each() is not None for each in made))

    with torch.device("meta"):
        model = nn.Sequential(*(square() for _ in range(6)))
    graph = read(model)
    monkeypatch.setattr(nn.Linear, "reset_parameters", counted)
    profile(graph, {graph.inputs[0]: torch.randn(3, WIDTH)})
    assert len(made) == 6
    assert max(num_alive) <= 2  # one is made while the one before it is thrown away
    assert all(each() is None for each in made)


# -- faults ----------------------------------------------------------------------------------------


def test_a_shape_that_does_not_fit_is_named_with_its_step() -> None:
    model = nn.Sequential(square(), nn.ReLU(), nn.Linear(WIDTH + 1, 2))
    graph = read(model)
    with pytest.raises(ModelError) as caught:
        profile(graph, {graph.inputs[0]: torch.randn(3, WIDTH)})
    text = str(caught.value)
    assert text.startswith("module 2 (Linear) does not take what comes to it")
    assert f"(3, {WIDTH})" in text
    assert caught.value.__cause__ is not None


def test_every_shape_that_does_not_fit_is_reported() -> None:
    """After one that does not, what it would have given."""

    class Own(nn.Linear):
        """torch.fx sees into it."""

    class Pick(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, 9] * 2

    odd = nn.Linear(WIDTH + 1, 3)
    model = nn.Sequential(odd, nn.ReLU(), nn.Linear(4, 2), nn.Linear(2, 2), Own(3, 1), Pick())
    graph = read(model)
    inputs = {graph.inputs[0]: torch.randn(3, WIDTH)}
    with pytest.raises(ModelError) as caught:
        profile(graph, inputs)
    with pytest.raises(ModelError) as tried:
        check_shapes(graph, inputs, [Share(0, 3, 3)])
    assert tried.value.faults == caught.value.faults
    found = [fault.partition(" does not take")[0] for fault in caught.value.faults]
    assert found == ["module 0 (Linear)", "module 2 (Linear)", "step linear of module 4 (Own)"]
    assert "of shapes (3, 3)" in caught.value.faults[1]
    assert isinstance(caught.value.__cause__, RuntimeError)  # for --debug


def test_shapes_that_fit() -> None:
    """By the largest of the micro-batches; and the model is left as it was."""
    model, (x, mask) = Mixed(), mixed_inputs().values()
    inputs = {"tokens": x.repeat(2), "mask": mask.repeat(2, 1)}
    with unchanged(model):
        check_shapes(read(model), inputs, [Share(0, 2, 6), Share(2, 6, 6)])


def test_shapes_that_do_not_fit_each_other() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.add(input=x, other=y)

    with pytest.raises(ModelError) as caught:
        profile(read(Net()), {"x": torch.randn(3, 4), "y": torch.randn(5, 4)})
    text = str(caught.value)
    assert text.startswith("step add of the model")
    assert "(3, 4), (5, 4)" in text


def test_an_error_leaves_the_model_as_it_was_too() -> None:
    model = nn.Sequential(square(), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH), nn.Linear(3, 3))
    graph, x = read(model), torch.randn(3, WIDTH)
    with unchanged(model), pytest.raises(ModelError):
        profile(graph, {graph.inputs[0]: x})


# -- cuts ------------------------------------------------------------------------------------------


def test_cuts_are_chosen_where_the_work_is_halved() -> None:
    class Work(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x
            for _ in range(200 if x.sum() > -1e9 else 1):
                y = (y @ x).clamp(-1, 1)
            return y

    model = nn.Sequential(nn.ReLU(), Work(), nn.ReLU(), Work(), nn.ReLU(), nn.ReLU(), nn.ReLU())
    graph = read(model)
    inputs = {graph.inputs[0]: torch.rand(32, 32) / 32}
    (cut,) = choose_cuts(graph, inputs, 2, Costs())
    assert cut in (2, 3)


def test_cuts_do_not_part_what_is_shared() -> None:
    inner = square()
    model = nn.Sequential(inner, nn.ReLU(), inner, square())
    graph = read(model)
    inputs = {graph.inputs[0]: torch.randn(3, WIDTH)}
    assert choose_cuts(graph, inputs, 2, Costs()) == [3]
    with pytest.raises(ModelError):
        choose_cuts(graph, inputs, 3, Costs())


class Clamped(nn.Module):
    """Nothing may be cut between `a` and the sum; the rest takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.m, self.b = square(), square(), square()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.clamp_(min=0)
        return self.b(self.m(h) + h)


@pytest.mark.parametrize("schedule", [None, ("sequential", 1), ("1f1b", 1), ("1f1b", 4)])
def test_cuts_do_not_part_a_change_in_place_from_who_sees_it(schedule: Any) -> None:
    """They would be refused, whoever chose them."""
    graph = read(Clamped())
    inputs = {graph.inputs[0]: torch.rand(8, WIDTH)}
    made = schedule and make_schedule(schedule[0], 2, schedule[1])
    (cut,) = choose_cuts(graph, inputs, 2, Costs(), made, [1.0] * (schedule or (0, 1))[1])
    assert graph.units[cut] == "b"
    check_in_place(graph, [cut])
    with pytest.raises(ModelError, match="'a' and 'add'"):
        choose_cuts(graph, inputs, 3, Costs())


def test_what_the_model_returns_is_wanted_in_the_last_stage() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = square(), square(), square()

        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            early = self.a(x)
            return self.c(self.b(early)), early, mask

    graph = read(Net())
    inputs = {"x": torch.randn(3, WIDTH), "mask": torch.ones(3, dtype=torch.bool)}
    _, values = profile(graph, inputs)
    assert [value.used_by for value in values] == [(0,), (2,), (1, 2), (2,), (2,)]
    (cut,) = choose_cuts(graph, inputs, 2, Costs(seconds_per_byte=1.0))
    assert cut in (1, 2)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_module_that_holds_what_it_has_computed() -> None:
    """Copying it ended in an error of torch's."""
    normed = torch.nn.utils.weight_norm(nn.Linear(4, 4))  # type: ignore[no-untyped-call]
    graph = read(nn.Sequential(normed, nn.Linear(4, 4)))
    units, _ = profile(graph, {graph.inputs[0]: torch.ones(2, 4)})
    assert [unit.name for unit in units] == graph.names()


def test_what_can_wait_of_a_backward_pass_is_measured_by_itself() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64))
    model[2].requires_grad_(False)
    units, _ = profile(read(model), {"input_1": torch.randn(256, 64)})
    first, relu, frozen, norm = units
    assert 0 < first.weights_s <= first.backward_s
    assert [unit.weights_s for unit in (relu, frozen, norm)] == [0.0] * 3
    assert all(p.grad is None for p in model.parameters())


class Extra(nn.Module):
    """Layers with a parameter that another step uses, and with one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.first.scale = nn.Parameter(torch.ones(8))
        self.second = nn.Linear(8, 8)
        self.second.adapter = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.first.scale)


def test_a_layer_with_parameters_that_its_own_step_does_not_use() -> None:
    units, _ = profile(read(Extra()), {"x": torch.randn(4, 8)})
    assert [unit.weights_s > 0 for unit in units] == [True, False, True]


def test_a_layer_whose_output_needs_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, output: output.detach())
    units, _ = profile(read(model), {"input_1": torch.randn(4, 8)})
    assert units[0].weights_s == 0.0
