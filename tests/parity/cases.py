"""Run by `shoal run`: every sync, in every case, compared with one process.

    shoal run --workers 3 tests/parity/cases.py OUT

Each rank trains the crew's way, then alone on whole global batches, and compares. OUT/rank-R.json
holds `case -> what went wrong` (or null). Double precision: only order of summation may differ.
What is trained alone is trained once per case and kept: every sync must give the same.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.layout import share
from shoal.replicate import Replica
from shoal.settings import SYNCS
from shoal.train.data.sample import read as read_sample
from shoal.train.data.sets import MNIST_MEAN_STD, ImageSet
from shoal.train.models.zoo import ConvNet, MnistCnn
from shoal.train.order import sample_order
from shoal.wire.link import Link

NUM_SAMPLES = 41
BATCH = 10  # 41 = 4 × 10 + 1: does not divide by 3 or 4, and the last batch leaves ranks empty
STEPS = 20
BUCKET_BYTES = 1024  # several of them in Net
FEW_STEPS = 10  # two epochs: the second one begins with what the first one left
SIX_FOR_ALL = 24  # divides by 1, 2, 3 and 4
TIMEOUT_S = 60


LINKED = ("ring over zmq", "serial-ring over zmq", "ring over dist")
"""Syncs that send over a link of the wire's; they take a few cases each."""
CASES_OF_LINKED = {"twenty_steps", "accumulation_without_sync", "mnist_cnn_in_single_precision"}
LINKS: dict[str, Link] = {}


def replicate(crew: shoal.JoinedCrew, module: nn.Module, sync: str, **more: int) -> Replica:
    name, _, transport = sync.partition(" over ")
    if transport and transport not in LINKS:
        LINKS[transport] = crew.link(transport)
    return crew.replicate(module, sync=name, link=LINKS.get(transport), **more)


class Net(nn.Module):
    """Small, and with every oddity: shared, frozen, unused, and used only now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.shared = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.sometimes = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.never = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, with_sometimes: bool = False) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        if with_sometimes:
            x = x + self.sometimes(x)
        return self.last(x + self.frozen(x))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM_SAMPLES, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (NUM_SAMPLES,), generator=generator))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def global_batches(data: TensorDataset, epoch: int) -> list[tuple[torch.Tensor, ...]]:
    order = torch.from_numpy(sample_order(len(data), 0, epoch))
    return [tuple(t[batch] for t in data.tensors) for batch in order.split(BATCH)]


def compare(model: nn.Module, alone: nn.Module, tolerance: float = 1e-12) -> None:
    expected = alone.state_dict()
    actual = model.state_dict()
    assert actual.keys() == expected.keys(), "the replica's state_dict must load into a plain model"
    for name, value in expected.items():
        difference = (actual[name] - value).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference:.3e}"
    for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{name}: grad is None on one side only"


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor, int], torch.Tensor]


def plain_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def loss_with_a_layer_at_odd_steps(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int
) -> torch.Tensor:
    return F.cross_entropy(model(x, with_sometimes=step % 2 == 1), y)


def regularised_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    inner = model if isinstance(model, Net) else model.module
    return F.cross_entropy(model(x), y) + 0.01 * inner.first.weight.pow(2).sum()


def loss_in_evaluation_mode(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int
) -> torch.Tensor:
    model.eval()
    return F.cross_entropy(model(x), y)


def train_both(
    crew: shoal.JoinedCrew,
    sync: str,
    loss: Loss = plain_loss,
    set_to_none: bool = True,
    steps: int = FEW_STEPS,
) -> None:
    """Whole epochs of both; every rank begins from a seed of its own, rank 0's must win."""
    data = dataset()
    model = replicate(crew, net(seed=100 + crew.rank), sync=sync, bucket_bytes=BUCKET_BYTES)
    optimizer = sgd(model)
    loader = crew.loader(data, batch_size=BATCH)
    step = 0
    while step < steps:
        for x, y in loader:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss(model, x, y, step).backward()
            optimizer.step()
            step += 1
    compare(model, trained_alone(loss, set_to_none, step))
    model.close()


@functools.cache
def trained_alone(loss: Loss, set_to_none: bool, steps: int) -> Net:
    data = dataset()
    model = net(seed=100)
    optimizer = sgd(model)
    per_epoch = len(global_batches(data, 0))
    assert steps % per_epoch == 0, "whole epochs, as the crew has trained"
    whole = [batch for epoch in range(steps // per_epoch) for batch in global_batches(data, epoch)]
    for step, (x, y) in enumerate(whole):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss(model, x, y, step).backward()
        optimizer.step()
    return model


def case_twenty_steps(crew: shoal.JoinedCrew, sync: str) -> None:
    train_both(crew, sync, steps=STEPS)


def case_gradients_kept_as_zeros(crew: shoal.JoinedCrew, sync: str) -> None:
    train_both(crew, sync, set_to_none=False)


def case_parameter_used_in_some_steps(crew: shoal.JoinedCrew, sync: str) -> None:
    train_both(crew, sync, loss_with_a_layer_at_odd_steps)


def case_parameter_used_on_some_ranks(crew: shoal.JoinedCrew, sync: str) -> None:
    """Odd ranks use a layer that even ranks do not; one process uses it for those samples."""
    use_layer_on_odd_ranks(crew, sync, TensorDataset(*[t[:40] for t in dataset().tensors]))


def case_parameter_used_by_a_stand_in_only(crew: shoal.JoinedCrew, sync: str) -> None:
    """In the last batch, of one sample, odd ranks have none: the layer was not used at all."""
    use_layer_on_odd_ranks(crew, sync, TensorDataset(*[t[:25] for t in dataset().tensors]))


def use_layer_on_odd_ranks(crew: shoal.JoinedCrew, sync: str, data: TensorDataset) -> None:
    model = replicate(crew, net(seed=1 + crew.rank), sync=sync, bucket_bytes=BUCKET_BYTES)
    alone = net(seed=1)
    ours, theirs = sgd(model), sgd(alone)
    for _ in range(2):
        for x, y in crew.loader(data, batch_size=SIX_FOR_ALL):
            ours.zero_grad()
            F.cross_entropy(model(x, with_sometimes=crew.rank % 2 == 1), y).backward()
            ours.step()
        order = torch.from_numpy(sample_order(len(data), 0, 0))
        for batch in order.split(SIX_FOR_ALL):
            theirs.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for rank in range(crew.size):
                part = share(len(batch), rank, crew.size)
                mine = batch[part.start : part.stop]
                if len(mine):
                    x, y = data.tensors[0][mine], data.tensors[1][mine]
                    out = alone(x, with_sometimes=rank % 2 == 1)
                    total = total + F.cross_entropy(out, y, reduction="sum") / len(batch)
            total.backward()
            theirs.step()
    compare(model, alone)
    model.close()


def case_accumulation_without_sync(crew: shoal.JoinedCrew, sync: str) -> None:
    """Two global batches per step, the first under no_sync; shares differ between the two."""
    data = dataset()
    model = replicate(crew, net(seed=3 + crew.rank), sync=sync, bucket_bytes=BUCKET_BYTES)
    alone = net(seed=3)
    ours, theirs = sgd(model), sgd(alone)
    loader = crew.loader(data, batch_size=BATCH)
    for _ in range(2):
        whole = global_batches(data, loader.epoch)
        for number, ((x, y), (all_x, all_y)) in enumerate(zip(loader, whole, strict=True)):
            if number % 2 == 0 and number + 1 < len(loader):
                with model.no_sync():
                    F.cross_entropy(model(x), y).backward()
                F.cross_entropy(alone(all_x), all_y).backward()
                continue
            F.cross_entropy(model(x), y).backward()
            ours.step()
            ours.zero_grad()
            F.cross_entropy(alone(all_x), all_y).backward()
            theirs.step()
            theirs.zero_grad()
    ours.zero_grad()
    theirs.zero_grad()
    compare(model, alone)
    model.close()


def case_regulariser_outside_forward(crew: shoal.JoinedCrew, sync: str) -> None:
    """A term of the loss that does not pass through the model's output weighs as much as alone."""
    train_both(crew, sync, regularised_loss)


def case_two_backwards_per_step(crew: shoal.JoinedCrew, sync: str) -> None:
    """The second backward adds to gradients that are means already."""
    data = dataset()
    model = replicate(crew, net(seed=4 + crew.rank), sync=sync, bucket_bytes=BUCKET_BYTES)
    alone = net(seed=4)
    ours, theirs = sgd(model), sgd(alone)
    loader = crew.loader(data, batch_size=BATCH)
    whole = global_batches(data, loader.epoch)
    for (x, y), (all_x, all_y) in zip(loader, whole, strict=True):
        for optimizer, net_, inputs, targets in (
            (ours, model, x, y),
            (theirs, alone, all_x, all_y),
        ):
            optimizer.zero_grad()
            F.cross_entropy(net_(inputs), targets).backward()
            net_(inputs).pow(2).mean().backward()
            optimizer.step()
    compare(model, alone)
    model.close()


def case_unfrozen_half_way(crew: shoal.JoinedCrew, sync: str) -> None:
    data = dataset()
    model = replicate(crew, net(seed=6 + crew.rank), sync=sync, bucket_bytes=BUCKET_BYTES)
    alone = net(seed=6)
    for phase in range(2):
        if phase:
            model.module.frozen.requires_grad_(True)
            alone.frozen.requires_grad_(True)
        ours, theirs = sgd(model), sgd(alone)
        loader = crew.loader(data, batch_size=BATCH)
        loader.epoch = phase
        whole = global_batches(data, phase)
        for (x, y), (all_x, all_y) in zip(loader, whole, strict=True):
            ours.zero_grad()
            F.cross_entropy(model(x), y).backward()
            ours.step()
            theirs.zero_grad()
            F.cross_entropy(alone(all_x), all_y).backward()
            theirs.step()
    compare(model, alone)
    model.close()


def case_buffers_are_those_of_rank_0(crew: shoal.JoinedCrew, sync: str) -> None:
    data = dataset()
    torch.manual_seed(crew.rank)
    inner = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    model = replicate(crew, inner, sync=sync)
    optimizer = sgd(model)
    for x, y in crew.loader(TensorDataset(*[t[:40] for t in data.tensors]), batch_size=20):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for name, buffer in inner.named_buffers():
        own = buffer.clone()
        crew.broadcast_(buffer)
        assert torch.equal(own, buffer), f"{name} is not that of rank 0"
    assert inner[1].num_batches_tracked.item() == 2
    assert inner[1].running_mean.abs().max() > 0
    model.close()


def case_two_forwards_before_backward(crew: shoal.JoinedCrew, sync: str) -> None:
    """Batch norm's buffers change between forward and backward; autograd must not mind."""
    inner = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    model = replicate(crew, inner, sync=sync)
    x = torch.randn(8, 6, dtype=torch.float64)
    (model(x) + model(x * 2)).sum().backward()
    assert inner[0].weight.grad is not None
    model.close()


def case_weights_count_in_evaluation_mode_too(crew: shoal.JoinedCrew, sync: str) -> None:
    """Fine-tuning with batch norm and dropout held still is training all the same."""
    train_both(crew, sync, loss_in_evaluation_mode)


def case_looks_like_the_plain_model(crew: shoal.JoinedCrew, sync: str) -> None:
    plain = net(seed=0)
    plain.note = "mine"  # type: ignore[assignment]
    model = replicate(crew, plain, sync=sync)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert model.first is plain.first
    assert model.note == "mine"
    model.eval()
    assert not plain.training
    assert not plain.first.training
    assert model.train() is model
    assert plain.training
    assert not hasattr(model, "nothing_of_the_kind")
    model.close()


DIGITS_SEED, DIGITS_BATCH, DIGITS_STEPS = 9, 18, 5


@functools.cache
def digits() -> tuple[ImageSet, ImageSet]:
    train, test = read_sample()
    return ImageSet(*train, MNIST_MEAN_STD), ImageSet(*test, MNIST_MEAN_STD)


def digits_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


@functools.cache
def mnist_cnn_alone() -> MnistCnn:
    train, _ = digits()
    torch.manual_seed(DIGITS_SEED)
    model = MnistCnn()
    optimizer = digits_sgd(model)
    order = torch.from_numpy(sample_order(len(train), 0, 0))
    for batch in order.split(DIGITS_BATCH)[:DIGITS_STEPS]:
        x, y = train.take(batch)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def case_mnist_cnn_in_single_precision(crew: shoal.JoinedCrew, sync: str) -> None:
    """The default model on real digits, float32: equal to float tolerance."""
    torch.manual_seed(DIGITS_SEED + crew.rank)
    model = replicate(crew, MnistCnn(), sync=sync)
    optimizer = digits_sgd(model)
    loader = crew.loader(digits()[0], batch_size=DIGITS_BATCH)
    for x, y in itertools.islice(loader, DIGITS_STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    compare(model, mnist_cnn_alone(), tolerance=2e-5)
    model.close()


@functools.cache
def conv_net_alone() -> tuple[float, float]:
    """Untrained, on all digits: loss and accuracy."""
    _, test = digits()
    torch.manual_seed(0)
    x, y = test.take(torch.arange(len(test)))
    with torch.no_grad():
        output = ConvNet().eval()(x)
    return F.cross_entropy(output, y).item(), (output.argmax(1) == y).double().mean().item()


def case_evaluation_counts_each_sample_once(crew: shoal.JoinedCrew, sync: str) -> None:
    _, test = digits()
    torch.manual_seed(0)
    model = replicate(crew, ConvNet(), sync=sync)
    result = crew.evaluate(model, test, batch_size=333)
    assert result.samples == len(test)
    assert model.training
    loss, accuracy = conv_net_alone()
    assert result.accuracy == accuracy
    assert abs(result.loss - loss) < 1e-5
    model.close()


def case_bytes_sent(crew: shoal.JoinedCrew, sync: str) -> None:
    """All syncs send 2(N-1) times the gradient in total; ring and all-reduce share it equally."""
    model = replicate(crew, nn.Linear(1000, 12).double(), sync=sync)
    model(torch.ones(2, 1000, dtype=torch.float64)).sum().backward()
    size = (1000 * 12 + 12 + 2) * 8  # weight, bias, and a flag for each
    size -= 2 * 8 if sync == "ddp" else 0
    total = crew.sum_(torch.tensor([model.bytes_sent])).item()
    n = crew.size
    assert abs(total - 2 * (n - 1) * size) <= 2 * n, f"{total} of {2 * (n - 1) * size}"
    if sync == "ring":
        assert abs(model.bytes_sent - 2 * (n - 1) * size / n) <= 2 * n * 8, model.bytes_sent
    model.close()


CASES = {name.removeprefix("case_"): f for name, f in list(globals().items()) if "case_" in name}
NOT_FOR_DDP = {
    # torch: cannot tell a gradient of weight zero from none
    "parameter_used_by_a_stand_in_only",
    # torch: "marked as ready twice" for a parameter that is used outside forward()
    "regulariser_outside_forward",
    # torch: parameters unfrozen later are not known to DDP's reducer
    "unfrozen_half_way",
    # torch: at most one forward may precede a backward
    "two_forwards_before_backward",
}


WITHOUT_SYNC = {"evaluation_counts_each_sample_once"}
"""No gradients move there: with a model of our own and with one of torch's is enough."""


def names_for(sync: str) -> list[str]:
    if sync in LINKED:
        return [name for name in CASES if name in CASES_OF_LINKED]
    if sync == "ddp":
        return [name for name in CASES if name not in NOT_FOR_DDP]
    return [name for name in CASES if sync == "all-reduce" or name not in WITHOUT_SYNC]


def main(out: Path) -> None:
    results: dict[str, str | None] = {}
    torch.set_num_threads(1)
    crew = shoal.join(timeout_s=TIMEOUT_S)
    try:
        for sync in (*SYNCS, *LINKED):
            for name in names_for(sync):
                try:
                    CASES[name](crew, sync)
                    results[f"{sync}:{name}"] = None
                except Exception:
                    results[f"{sync}:{name}"] = traceback.format_exc()
                    raise  # this rank is out of step: what follows would only fail because of it
        crew.close()
    finally:
        (out / f"rank-{crew.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
