"""What the cases of pipelines train: a net for each way in which values can cross a cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.pipeline.build import as_module
from shoal.train.data.sample import read as read_sample
from shoal.train.data.sets import MNIST_MEAN_STD, ImageSet
from shoal.train.models.zoo import ConvNet, MnistCnn, ResidualMlp

STEPS = 20
Batch = tuple[Any, Any]
Loss = Callable[[Any, Any], torch.Tensor]


class FanOut(nn.Module):
    """Values that are used again and again: in their own stage, in the next, and in every later."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.a = nn.Linear(6, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, width)
        self.d = nn.Linear(width, width)
        self.e = nn.Linear(2 * width, 3)
        self.offset = nn.Parameter(torch.linspace(-0.1, 0.1, 6))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.offset  # a parameter of no module, in stage 0 wherever the cut is
        rows = x.size(0)
        a = torch.tanh(self.a(x))
        left, right = a.chunk(2, dim=1)
        b = torch.tanh(self.b(a) * a) + a
        c = torch.tanh(self.c(b * a)) + a * self.scale + b * a
        both = torch.cat((right, left), dim=1)
        d = torch.tanh(self.d(c * a)) + a + both * b + a * c
        out: torch.Tensor = self.e(torch.cat((d * a, c * b), dim=1).view(rows, -1))
        return out


class Masked(nn.Module):
    """Takes a row of values, which of them count (bool), and a kind (int) that is used at last."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 6)
        self.c = nn.Linear(6, 8)
        self.kinds = nn.Embedding(4, 8)
        self.d = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, counts: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        x = self.b(x)
        x = x.masked_fill(~counts, 0.0)
        x = torch.tanh(self.c(x)) + self.kinds(kind)
        out: torch.Tensor = self.d(x)
        return torch.where(counts.any(1, keepdim=True), out, torch.zeros_like(out))


class PairOut(nn.Module):
    """A tuple; its first part is made in an early stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.d = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        early = torch.tanh(self.a(x))
        x = torch.tanh(self.c(torch.tanh(self.b(early))))
        return early, self.d(x)


class DictOut(PairOut):
    """A dict, with a list inside."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:  # type: ignore[override]
        early, out = super().forward(x)
        return {"logits": out, "parts": [early, early * 2]}


def pair_loss(out: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out[1], y) + 0.1 * out[0].pow(2).mean()


def dict_loss(out: dict[str, Any], y: dict[str, torch.Tensor]) -> torch.Tensor:
    first, second = out["parts"]
    penalty: torch.Tensor = 0.1 * (first * second).mean()
    return F.cross_entropy(out["logits"], y["classes"]) + penalty


class WrappedLinear(nn.Module):
    """As users of seed 001's lists write one: takes what was kept as a second argument."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        out_variables: list[str] | None = None,
        dependencies: list[str] | None = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is not None:
            x = x + residual
        out: torch.Tensor = self.linear(x)
        return out


def seed_001(width: int = 32) -> list[Any]:
    """Its own list, but for the width."""
    return [
        (nn.Linear, {"in_features": 1, "out_features": width}, (32, 1)),
        (nn.ReLU, {}, (32, width)),
        (
            WrappedLinear,
            {"in_features": width, "out_features": width, "out_variables": ["res_1"]},
            [(32, width)],
        ),
        (nn.ReLU, {}, (32, width)),
        (nn.Linear, {"in_features": width, "out_features": width}, (32, width)),
        (nn.ReLU, {}, (32, width)),
        (
            WrappedLinear,
            {
                "in_features": width,
                "out_features": width,
                "dependencies": ["res_1"],
                "out_variables": [],
            },
            [(32, width), (32, width)],
        ),
        (nn.ReLU, {}, (32, width)),
        (nn.Linear, {"in_features": width, "out_features": 1}, (32, width)),
        (nn.Sigmoid, {}, (32, 1)),
    ]


def listed() -> list[Any]:
    """The front door's own words: skips that are added, put together, and taken as arguments."""
    return [
        shoal.Layer(nn.Linear, in_features=6, out_features=8, gives=("first", "bilinear")),
        nn.Tanh(),
        shoal.Layer(nn.Linear, 8, 8, takes="first", gives="second"),
        nn.Tanh(),
        shoal.Layer(nn.Bilinear, 8, 8, 8, takes="bilinear", combine="args"),
        shoal.Layer(nn.Linear, 24, 8, takes=("first", "second"), combine="cat"),
        nn.Tanh(),
        shoal.Layer(nn.Linear, 8, 3, takes=["second", "first"]),
    ]


def sequential() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 10),
        nn.Tanh(),
        nn.Linear(10, 10),
        nn.LayerNorm(10),
        nn.GELU(),
        nn.Linear(10, 3),
    )


def in_place() -> nn.Sequential:
    """Cut right before each ReLU, which changes what has just come."""
    return nn.Sequential(
        *(nn.Linear(6, 10), nn.ReLU(inplace=True), nn.Linear(10, 10), nn.ReLU(inplace=True)),
        *(nn.Linear(10, 10), nn.ReLU(inplace=True), nn.Linear(10, 3)),
    )


def in_place_on_a_view() -> nn.Sequential:
    """Cut right before a step that gives a view, of which ReLU changes the memory."""
    return nn.Sequential(
        *(nn.Unflatten(1, (2, 3)), nn.Linear(3, 5), nn.Flatten(), nn.ReLU(inplace=True)),
        *(nn.Unflatten(1, (2, 5)), nn.Linear(5, 4), nn.Flatten(), nn.ReLU(inplace=True)),
        *(nn.Linear(8, 8), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(8, 3)),
    )


class _Remembers(nn.Sequential):
    """Adds what came out of "1" to what goes into the last layer, when "2" has changed it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = before = self[1](self[0](x))
        for layer in list(self)[2:-1]:
            x = layer(x)
        out: torch.Tensor = self[-1](x + before)
        return out


def in_place_then_used() -> nn.Sequential:
    return _Remembers(
        *(nn.Linear(6, 8), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)),
        *(nn.Tanh(), nn.Linear(8, 3)),
    )


class Aliased(nn.Module):
    """Flatten gives a view, so that ReLU changes `first` as well, which is used at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.flat, self.relu = nn.Linear(6, 8), nn.Flatten(), nn.ReLU(inplace=True)
        self.b = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        out: torch.Tensor = self.b(self.relu(self.flat(first))) + first
        return out


class Oddities(nn.Module):
    """Frozen first, a stage of no parameters, parameters that no step uses, dropout, batch norm."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.plain = nn.Tanh()
        self.never = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("unused", torch.arange(3.0))
        self.last = nn.Linear(8, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.plain(self.frozen(x))
        x = F.dropout(self.norm(x), self.dropout, training=self.training)
        out: torch.Tensor = self.last(x)
        return out


ODDITIES_CUTS = {2: ["norm"], 3: ["plain", "norm"], 4: ["plain", "norm", "last"]}


class Features(nn.Module):
    """Random ones: a buffer that is not in the state, and a tensor that is not even a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.register_buffer("frequencies", torch.randn(8), persistent=False)
        self.phases = torch.randn(8)
        self.halves = torch.full((1,), 0.5).expand(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(self.first(x)) * self.frequencies
        out: torch.Tensor = self.last(x * self.halves + self.phases)
        return out


class Scaled(nn.Module):
    """Of the user's own making: traced through, with a parameter and a beginning of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class OwnParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.scaled, self.b = nn.Linear(6, 8), Scaled(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(torch.tanh(self.scaled(self.a(x))))
        return out


class Tied(nn.Module):
    """`there` and `back` have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.there, self.back = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.back.weight = self.there.weight
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        out: torch.Tensor = self.last(self.back(torch.tanh(self.there(x))))
        return out


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if x.sum() > 0:  # the line that the error names
            x = -x
        out: torch.Tensor = self.b(x)
        return out


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Teacher(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher = super().forward(x)
        return _Sign.apply(x) + teacher  # type: ignore[no-any-return]


class _Half(nn.Linear):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class _Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.scale *= 1.01
        with torch.no_grad():
            self.mean.copy_(0.9 * self.mean + 0.1 * x.mean(0))
        return (x - self.mean) * self.scale


class Unseen(nn.Module):
    """Modules that do what torch.fx does not see, and steps on buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), _Teacher(6, 6)
        self.c, self.d, self.e = _Half(6, 6), _Centred(), nn.Linear(6, 3)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 60).view(10, 6))
        self.register_buffer("sums", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table[: x.size(0)]
        x = self.b(torch.tanh(self.a(x) * table))
        x = self.d(self.c(x).float() * self.table[3])
        self.sums.mul_(0.9).add_(x.detach().sum(0))
        out: torch.Tensor = self.e(torch.tanh(x - 0.01 * self.sums))
        return out


# -- with what they are trained --------------------------------------------------------------------


def rows(num_samples: int, step: int, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(num_samples, 6, dtype=dtype, generator=generator)
    return x, torch.randint(0, 3, (num_samples,), generator=generator)


def batches_of_rows(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Batch]:
    return [rows(size, step, dtype) for step, size in enumerate(sizes)]


def masked_batches() -> list[Batch]:
    made = []
    for step in range(STEPS):
        x, y = rows(8, step)
        kind = torch.arange(8, dtype=torch.int32) % 4
        made.append(((x, x > -1.0, kind), y))
    return made


def sine_batches() -> list[Batch]:
    made = []
    for step in range(STEPS):
        x = torch.rand(32, 1, generator=torch.Generator().manual_seed(step))
        made.append((x, (torch.sin(6 * x) + 1) / 2))
    return made


def digit_batches(size: int = 4) -> list[Batch]:
    digits = ImageSet(*read_sample()[0], MNIST_MEAN_STD)
    return [digits.take(torch.arange(step * size, (step + 1) * size)) for step in range(STEPS)]


@dataclass(frozen=True)
class Job:
    """A model, how it is cut, and what it is trained with."""

    make: Callable[[], Any]
    cuts: dict[int, list[str]] = field(default_factory=dict)
    """By number of stages. Where there are none, they are found by the profile."""
    batches: Callable[[], list[Batch]] = lambda: batches_of_rows([8] * STEPS)
    loss: Loss = F.cross_entropy
    lr: float = 0.1

    def module(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return as_module(self.make())


JOBS = {
    "mnist_cnn": Job(
        MnistCnn,
        {2: ["conv3"], 3: ["conv2", "fc1"], 4: ["conv2", "conv3", "fc2"]},
        digit_batches,
        lr=0.02,
    ),
    "conv_net": Job(
        ConvNet,
        {2: ["layer2"], 3: ["layer1.1", "layer2"], 4: ["layer1.1", "layer2", "layer2.1"]},
        digit_batches,
        lr=0.02,
    ),
    "residual_mlp": Job(
        lambda: ResidualMlp(32),
        {2: ["fc3"], 3: ["fc3", "fc4"], 4: ["fc2", "fc3", "fc5"]},
        sine_batches,
        F.mse_loss,
    ),
    "seed_001": Job(
        seed_001,
        {2: ["4"], 3: ["3", "7"], 4: ["2", "3", "8"]},
        sine_batches,
        F.mse_loss,
    ),
    "layers": Job(listed, {2: ["4"], 3: ["2", "5"], 4: ["1", "4", "6"]}),
    "sequential_of_torch": Job(sequential, {}),
    "fan_out": Job(FanOut, {2: ["c"], 3: ["b", "d"], 4: ["b", "c", "d"]}),
    "masks": Job(Masked, {2: ["c"], 3: ["b", "d"], 4: ["b", "c", "d"]}, masked_batches),
    "tuple_out": Job(PairOut, {2: ["c"], 3: ["b", "c"], 4: ["b", "c", "d"]}, loss=pair_loss),
    "dict_out": Job(
        DictOut,
        {2: ["c"], 3: ["b", "d"], 4: ["b", "c", "d"]},
        lambda: [(x, {"classes": y}) for x, y in batches_of_rows([8] * STEPS)],
        dict_loss,
    ),
    "in_place": Job(in_place, {2: ["3"], 3: ["1", "5"], 4: ["1", "3", "5"]}),
    "unseen": Job(Unseen, {2: ["c"], 3: ["b", "d"], 4: ["b", "c", "d"]}),
    "tied": Job(Tied, {2: ["last"], 3: ["there", "last"], 4: ["tanh", "there", "last"]}),
}
IN_PLACE_ON_A_VIEW = Job(in_place_on_a_view, {2: ["6"], 3: ["2", "9"], 4: ["2", "6", "9"]})
