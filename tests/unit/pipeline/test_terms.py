"""What a user says of a pipeline, looked at before anything moves: terms, optimizers, shapes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from shoal.errors import ModelError
from shoal.pipeline.build import as_module
from shoal.pipeline.layer import Layer
from shoal.pipeline.layers import model_of
from shoal.pipeline.partition import Costs, Unit, Value, cut, cut_for_turns
from shoal.pipeline.plan import Plan, check_optimizer, plan_faults, terms

# -- terms -----------------------------------------------------------------------------------------

PLAN = Plan(stages=2, microbatches=4, loss=F.mse_loss, optimizer=torch.optim.SGD)


@pytest.mark.parametrize(
    "other",
    [
        {"schedule": "gpipe"},
        {"microbatches": 3},
        {"reduction": "sum"},
        {"clip_norm": 1.0},
        {"optimizer": None},
        {"optimizer": torch.optim.Adam},
        {"optimizer_options": {"lr": 0.1}},
        {"optimizer_options": {"betas": (0.9, 0.5)}},
        {"loss": None},
        {"loss": F.l1_loss},
        {"loss": nn.MSELoss()},
        {"loss": functools.partial(F.mse_loss, reduction="mean")},
        {"seed": 7},
        {"stages": 3},
        {"cuts": ["fc"]},
    ],
)
def test_terms_that_differ(other: dict[str, Any]) -> None:
    assert terms(replace(PLAN, **other)) != terms(PLAN)


def test_terms_are_the_same_where_only_objects_differ() -> None:
    """A loss may be a lambda, which is another object in every process."""
    made = []
    for _ in range(2):
        options = {"lr": torch.tensor(0.1)}
        made.append(replace(PLAN, loss=lambda a, b: (a - b).sum(), optimizer_options=options))
    assert terms(made[0]) == terms(made[1])


def test_sequential_takes_the_batch_whole_whatever_is_said() -> None:
    plan = replace(PLAN, schedule="sequential")
    assert terms(replace(plan, microbatches=8)) == terms(replace(plan, microbatches=1))
    assert plan_faults(replace(plan, microbatches=8), 2) == []


# -- what a script says ----------------------------------------------------------------------------


class Scaled(nn.Module):
    """A loss that would learn."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


MADE = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"microbatches": 2.5}, "microbatches=2.5: must be a whole number."),
        ({"microbatches": "4"}, "microbatches='4': must be a whole number."),
        ({"microbatches": True}, "microbatches=True: must be a whole number."),
        ({"microbatches": 0}, "microbatches=0: must be at least 1."),
        ({"stages": "2"}, "stages='2': must be a whole number."),
        ({"stages": 0}, "stages=0: must be at least 1."),
        ({"stages": 3}, "stages=3: 2 ranks do not make whole replicas of 3 stages; 2 would be"),
        ({"schedule": "1f2b"}, "schedule='1f2b': unknown. Did you mean 1f1b?"),
        ({"schedule": "1F1B"}, "schedule='1F1B': unknown. Did you mean 1f1b?"),
        ({"schedule": None}, "schedule=None: unknown."),
        ({"cuts": [1]}, "cuts=[1]: must be a list of names"),
        ({"cuts": "fc"}, "cuts='fc': must be a list of names, such as cuts=['conv2']."),
        ({"cuts": ["a", "b"]}, "cuts=: it takes 1 cut to make 2 stages; 2 given (a, b)."),
        ({"inputs": "x"}, "inputs='x': must be a list of names"),
        ({"loss": "mse"}, "loss='mse': must be a function (output, target) -> loss"),
        ({"loss": nn.MSELoss}, "loss=MSELoss: is a class; give one of it, loss=MSELoss()."),
        ({"loss": Scaled()}, "loss=Scaled: has parameters of its own (scale), which nobody would"),
        ({"loss": nn.MSELoss(reduction="sum")}, "loss=MSELoss(reduction='sum'): must give one"),
        ({"loss": nn.MSELoss(reduction="none")}, "loss=MSELoss(reduction='none'): must give one"),
        (
            {"loss": nn.MSELoss(), "reduction": "sum"},
            "loss=MSELoss(reduction='mean'): must give one",
        ),
        ({"optimizer": "sgd"}, "optimizer='sgd': must be a class, such as torch.optim.SGD"),
        ({"optimizer": MADE}, "optimizer=: is made already"),
        ({"optimizer_options": {"microbatch": 4}}, "optimizer=SGD: got an unexpected keyword"),
        ({"optimizer": None, "optimizer_options": {"lr": 1}}, "lr=: is no word of pipeline()"),
        ({"clip_norm": "1"}, "clip_norm='1': must be a positive number."),
        ({"clip_norm": -1.0}, "clip_norm=-1.0: must be a positive number."),
        ({"clip_norm": float("nan")}, "clip_norm=nan: must be a positive number."),
        ({"memory_bytes": 9}, "memory_bytes=9: must be a list of positive numbers."),
        (
            {"memory_bytes": [1, float("nan")]},
            "memory_bytes=[1, nan]: must be a list of positive numbers.",
        ),
        (
            {"memory_bytes": [1]},
            "memory_bytes=[1]: must have a limit for each of 2 stages; 1 given.",
        ),
        ({"optimizer_options": {"lr": -1.0}}, "optimizer=SGD: Invalid learning rate: -1.0."),
        ({"seed": "1"}, "seed='1': must be a whole number."),
    ],
)
def test_a_word_that_cannot_be(words: dict[str, Any], says: str) -> None:
    (fault,) = plan_faults(replace(PLAN, **words), 2)
    assert fault.startswith(says)


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
def test_a_word_that_is_taken_for_an_option_of_the_optimizer(optimizer: Any) -> None:
    plan = replace(PLAN, optimizer=optimizer, optimizer_options={"micro_batches": 4})
    (fault,) = plan_faults(plan, 2)
    assert fault.endswith(". Did you mean microbatches=?")
    assert "Did you" not in plan_faults(replace(plan, optimizer_options={"qwxyz": 1}), 2)[0]
    assert "--" not in fault
    assert "\n" not in fault


def test_all_of_them_at_once() -> None:
    words = {"stages": "2", "microbatches": 2.5, "cuts": [1], "loss": "mse", "clip_norm": 0}
    found = plan_faults(replace(PLAN, **words, optimizer="sgd"), 2)
    assert [fault.partition("=")[0] for fault in found] == [
        "stages", "microbatches", "cuts", "loss", "clip_norm", "optimizer"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [{}, {"cuts": ("a",)}, {"clip_norm": 1}, {"clip_norm": float("inf")}, {"inputs": ["x"]}],
)
def test_words_that_are_fine(words: dict[str, Any]) -> None:
    assert plan_faults(replace(PLAN, **words), 2) == []


# -- optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SGD", "Adam", "RMSprop", "NAdam", "LBFGS"])
def test_optimizers_that_are_known_to_work(kind: str) -> None:
    check_optimizer(getattr(torch.optim, kind)([nn.Parameter(torch.zeros(2))]))


def test_an_optimizer_of_unknown_ways_that_needs_the_loss_again() -> None:
    class Own(torch.optim.Optimizer):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return closure()

    class OwnStep(torch.optim.LBFGS):
        def step(self, closure: Any) -> Any:  # its sums may be anybody's guess
            return super().step(closure)

    class Renamed(torch.optim.LBFGS):
        pass

    weights = [nn.Parameter(torch.zeros(2))]
    check_optimizer(Renamed(weights))
    with pytest.raises(ModelError, match=r"OwnStep: its step\(\) needs a closure"):
        check_optimizer(OwnStep(weights))
    with pytest.raises(ModelError, match=r"Own: its step\(\) needs a closure"):
        check_optimizer(Own([nn.Parameter(torch.zeros(2))], {}))


# -- shapes that a list says -----------------------------------------------------------------------


def linear(a: int, b: int, shapes: Any, **words: Any) -> tuple[Any, ...]:
    return nn.Linear, {"in_features": a, "out_features": b, **words}, shapes


def faults_of(*layers: Any) -> list[str]:
    with pytest.raises(ModelError) as caught:
        model_of(layers)
    return caught.value.faults


def test_every_shape_that_does_not_fit_is_reported() -> None:
    found = faults_of(
        linear(1, 16, (32, 2)),
        (nn.ReLU, {}, (32, 17)),
        linear(17, 3, (32, 17), out_variables=["r"]),
        linear(3, 16, [(32, 3), (32, 16)], dependencies=["r"]),
        linear(16, 2, (32, 16), dependencies=["unknown"]),
    )
    assert len(found) == 4
    assert "layer 4 (Linear): takes 'unknown'" in found[0]
    assert found[1].startswith("layer 0 (Linear): does not take (32, 2): ")
    # And goes on with what that layer would have given.
    assert (
        found[2] == "layer 1 (ReLU): the list says that its input is (32, 17), and it is (32, 16)"
    )
    assert found[3] == "layer 3 (Linear): the list says that r is (32, 16), and it is (32, 3)"


def test_a_wrong_shape_is_reported_once() -> None:
    """The layer takes what comes to it: only the list is wrong."""
    assert faults_of(linear(1, 16, (32, 1)), linear(16, 16, (32, 15)), linear(16, 1, (32, 16))) == [
        "layer 1 (Linear): the list says that its input is (32, 15), and it is (32, 16)"
    ]
    found = faults_of(linear(1, 16, (32, 1)), linear(17, 16, (32, 15)))
    assert [fault.split(": ")[1][:14] for fault in found] == ["the list says ", "does not take "]


def full(a: int, b: int, **words: Any) -> Layer:
    return Layer(nn.Linear, in_features=a, out_features=b, **words)


def misfit(number: int, kind: str, word: str, wanted: int, comes: int) -> str:
    return f"layer {number} ({kind}): {word} is {wanted}, and what comes has {comes}"


def test_layers_that_do_not_fit_are_seen_without_any_batch() -> None:
    assert faults_of(full(1, 16), full(17, 16), full(16, 3), full(4, 1)) == [
        misfit(1, "Linear", "in_features", 17, 16),
        misfit(3, "Linear", "in_features", 4, 3),
    ]


def test_names_and_shapes_are_reported_together() -> None:
    found = faults_of(
        full(1, 16, gives="r"), full(16, 16, gives="r"), full(16, 16, takes="q"),
        full(17, 1, takes="zz"),
    )  # fmt: skip
    assert [fault.split(": ", 1)[1] for fault in found] == [
        "gives 'r', which layer 0 gives already",
        "takes 'q', which no layer gives",
        "takes 'zz', which no layer gives",
        "in_features is 17, and what comes has 16",
    ]


def test_a_batch_shows_what_widths_do_not() -> None:
    layers = [Layer(nn.Conv2d, 1, 4, 3), nn.Flatten(), full(100, 8), full(9, 2), full(2, 2)]
    assert faults_of(*layers) == [misfit(3, "Linear", "in_features", 9, 8)]
    with pytest.raises(ModelError) as caught:
        as_module(layers, example=torch.zeros(5, 1, 8, 8))
    flat, narrow = caught.value.faults
    assert flat.startswith("layer 2 (Linear): does not take (5, 144): ")
    assert narrow.startswith("layer 3 (Linear): does not take (5, 8): ")


class OwnLinear(nn.Linear):
    """As torch's."""


class Doubling(nn.Linear):
    """Its input is not what it multiplies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([x, x], -1))


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        (
            [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(9), nn.MaxPool2d(2), nn.Conv2d(7, 2, 1)],
            [(1, "BatchNorm2d", "num_features", 9, 8), (3, "Conv2d", "in_channels", 7, 9)],
        ),
        ([full(1, 8), nn.LayerNorm((3, 9))], [(1, "LayerNorm", "normalized_shape", 9, 8)]),
        ([nn.Embedding(9, 8), nn.Dropout(), full(9, 1)], [(2, "Linear", "in_features", 9, 8)]),
        ([OwnLinear(1, 8), OwnLinear(9, 1)], [(1, "OwnLinear", "in_features", 9, 8)]),
        (
            [
                Layer(nn.Conv1d, 1, 8, 1, gives="a"),
                nn.ReLU(),
                Layer(nn.Conv1d, 17, 1, 1, takes="a", combine="cat"),
            ],
            [(2, "Conv1d", "in_channels", 17, 16)],
        ),
        ([full(1, 8), nn.Sequential(nn.ReLU(), full(8, 4).build()), full(5, 1)],
         [(2, "Linear", "in_features", 5, 4)]),
    ],
)  # fmt: skip
def test_what_layers_say_of_themselves(layers: list[Any], found: list[Any]) -> None:
    assert faults_of(*layers) == [misfit(*each) for each in found]


def test_inside_a_sequential_and_in_a_sum() -> None:
    inner = nn.Sequential(nn.ReLU(), nn.Linear(9, 4))
    assert faults_of(full(1, 8), inner) == [
        "layer 1 (Sequential): its 1 (Linear): in_features is 9, and what comes has 8"
    ]
    assert faults_of(full(1, 8, gives="a"), full(8, 9), full(9, 1, takes="a")) == [
        "layer 2 (Linear): its input has 9 and a has 8: they cannot be added"
    ]


def test_a_shape_other_than_what_comes() -> None:
    assert faults_of(linear(1, 16, (32, 1)), (nn.ReLU, {}, (32, 17))) == [
        "layer 1 (ReLU): the list says that its input is (32, 17), and it is (32, 16)"
    ]


def test_what_comes_is_known_further_on_than_it_is_said() -> None:
    first, *others = faults_of(linear(1, 16, (32, 1)), nn.ReLU(), Layer(nn.Linear, 17, 2))
    assert first.startswith("layer 2 (Linear): does not take (32, 16): ")
    assert others == []


class Choosing(nn.Module):
    """Looks at values, of which a shape has none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Holding(nn.Sequential):
    """The user's own within torch's."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Choosing()))


def test_a_lazy_layer_is_left_as_it_is() -> None:
    model = model_of([(nn.LazyLinear, {"out_features": 3}, (32, 4))])
    assert is_lazy(next(model.parameters()))
    assert model(torch.ones(2, 4)).shape == (2, 3)


@pytest.mark.parametrize(
    "layers",
    [
        [linear(4, 8, (32, 4)), linear(8, 2, (128, 8))],  # batches may differ
        [(nn.Embedding, {"num_embeddings": 9, "embedding_dim": 4}, (32, 7)), linear(4, 2, ())],
        [linear(4, 8, (-1, 4)), linear(8, 2, (-1, 8))],
        [linear(4, 8, (32, 4)), (Choosing, {}, (32, 8)), linear(8, 2, (32, 8))],
        [(nn.BatchNorm1d, {"num_features": 4}, (32, 4)), (nn.Dropout, {}, (32, 4))],
        [(nn.LSTM, {"input_size": 4, "hidden_size": 4}, (7, 2, 4)), (nn.Identity, {}, ())],
        [Layer(nn.Linear, 4, 8), Doubling(16, 2)],
        [Layer(nn.Linear, 4, 8), nn.Flatten(), Layer(nn.Linear, 24, 2)],  # of (batch, 3, 4)
        [Layer(nn.Linear, 4, 8), nn.BatchNorm1d(3)],  # the same
        [Layer(nn.Linear, 4, 8), nn.LazyLinear(3), Layer(nn.Linear, 3, 2)],
        [Layer(nn.Conv2d, 1, 8, 3), Layer(nn.Linear, 5, 2), nn.Flatten(), Layer(nn.Linear, 9, 2)],
        [Layer(nn.Linear, 4, 1, gives="a"), full(1, 8), full(8, 2, takes="a")],  # 1 is spread
        [Layer(nn.Linear, 4, 8, gives="a"), full(16, 2, takes="a", combine="cat")],
        [(nn.Linear, {"in_features": 4, "out_features": 2, "dtype": torch.float64}, (32, 4))],
        [linear(4, 8, (32, 4)), (Holding, {}, (32, 8))],
    ],
)
def test_shapes_that_are_no_fault(layers: list[Any]) -> None:
    torch.manual_seed(1)
    model = model_of(layers)
    torch.manual_seed(1)
    built = [Layer(x[0], **x[1]) if isinstance(x, tuple) else x for x in layers]
    again = [x.build() if isinstance(x, Layer) else x for x in built]
    # Looking at shapes draws no numbers, and changes nothing.
    for tensor, same in zip(
        model.state_dict().values(), nn.Sequential(*again).state_dict().values(), strict=True
    ):
        assert is_lazy(tensor) or torch.equal(tensor, same)


# -- cuts where stages take turns ------------------------------------------------------------------


def row(*seconds: float) -> list[Unit]:
    return [Unit(f"u{i}", forward_s=each) for i, each in enumerate(seconds)]


def passing(*sizes: int) -> list[Value]:
    """Each from one unit to the next."""
    return [Value(i, (i + 1,), size) for i, size in enumerate(sizes)]


COSTS = Costs(seconds_per_byte=0.01, slack=1.0)


def test_in_turns_every_stage_has_something_to_do() -> None:
    """Least crosses before the units that compute next to nothing."""
    units, values = row(4, 4, 4, 0.01, 0.01), passing(9, 9, 1, 1)
    assert cut(units, values, 3, COSTS) == [1, 3]
    assert cut_for_turns(units, values, 3, COSTS) == [1, 2]


def test_in_turns_the_cut_is_where_least_crosses_if_it_may() -> None:
    units, values = row(4, 4, 4, 4), passing(5, 50, 1)
    assert cut_for_turns(units, values, 2, COSTS) == [3]


def test_in_turns_where_stages_are_more_than_the_work() -> None:
    assert len(cut_for_turns(row(4, 0, 0), passing(1, 1), 3, COSTS)) == 2
