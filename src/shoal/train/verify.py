"""Proof on the user's own model: the chosen layout against one process, on the same batches.

Both start from the same weights and take the same few steps, the last with a batch that is short
and does not divide by the ranks. In double precision where the model allows it, so that
rounding cannot hide a wrong average. The model is held in evaluation mode: what batch norm and
dropout compute in training depends on how a batch is shared out, by their nature.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset, default_collate

from shoal.crew import Crew
from shoal.layout import Share
from shoal.replicate import replicate
from shoal.report.events import Verified
from shoal.settings import TrainSettings, microbatches_made
from shoal.train.build import build_optimizer, num_samples
from shoal.train.data.load import Data
from shoal.train.loader import Loader, Sharer
from shoal.train.spread import spread
from shoal.train.task import as_pair, loss_of
from shoal.wire.link import Link

NUM_STEPS = 5
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DEPENDS_ON_SHARING = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)


class _OneProcess:
    """Stands where a crew is expected, and has one rank."""

    rank, size = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.share: Share | None = None


def verify(
    model: nn.Module,
    data: Data,
    crew: Crew,
    settings: TrainSettings,
    link: Link | None = None,
) -> Verified:
    """Every rank must call this; all return the same verdict."""
    samples = _few_batches(data.train, settings.batch_size)
    notes = _hold_still(model)
    if len(samples) < settings.batch_size * NUM_STEPS // 2:
        notes.append(f"the training set is small: samples to compare on: {len(samples)}")
    dtype = torch.float64 if _runs_in_double(model, samples) else torch.float32
    if dtype == torch.float32:
        notes.append("the model does not run in double precision; compared in single")
    model = model.to(crew.device, dtype)
    alone = copy.deepcopy(model)

    if settings.stages > 1 and link is not None:
        largest, name, steps = _in_stages(model, alone, samples, crew, link, settings, dtype)
    else:
        replica = replicate(model, crew, settings.sync, link=link)
        steps = _take_steps(replica, samples, crew, settings, dtype)
        if crew.rank == 0:
            _take_steps(alone, samples, _OneProcess(crew.device), settings, dtype)
        largest, name = _largest_difference(model, alone, crew)
        replica.close()
    tolerance = 0.0 if _is_exact(crew, settings) else TOLERANCE[dtype]
    if largest > TOLERANCE[dtype]:
        notes.append(
            "a model that draws random numbers in forward(), such as F.dropout without "
            "training=self.training, cannot be compared"
        )
    return Verified(
        passed=largest <= tolerance,
        steps=steps,
        replicas=crew.size // settings.stages,
        sync=settings.sync,
        transport=settings.transport,
        stages=settings.stages,
        schedule=settings.schedule,
        microbatches=microbatches_made(settings, crew.size // settings.stages),
        largest_difference=largest if largest == largest else None,
        parameter=name,
        tolerance=tolerance,
        dtype=str(dtype).removeprefix("torch."),
        notes=notes,
    )


def _is_exact(crew: Crew, settings: TrainSettings) -> bool:
    """Whether not even a rounding may differ: stages that take the batch whole, on one machine
    (processors of different kinds round differently)."""
    takes_it_whole = settings.schedule == "sequential" or settings.microbatches == 1
    is_one_replica = crew.size == settings.stages > 1
    return takes_it_whole and is_one_replica and len({h.machine for h in crew.roster}) == 1


def _in_stages(
    model: nn.Module,
    alone: nn.Module,
    samples: Subset[Any],
    crew: Crew,
    link: Link,
    settings: TrainSettings,
    dtype: torch.dtype,
) -> tuple[float, str, int]:
    """The same with the model in stages: every one is compared, of every replica."""
    pipe = spread(model, samples, crew, link, settings, lambda x: _cast(x, dtype))
    pipe.eval()
    loader = Loader(samples, pipe.place, batch_size=settings.batch_size, seed=settings.seed)
    for x, y in map(as_pair, loader):
        pipe.step(_cast(x, dtype), _cast(y, dtype))
    if crew.rank == 0:
        _take_steps(alone, samples, _OneProcess(crew.device), settings, dtype)
        for rank in range(1, crew.size):
            link.send(alone.state_dict(), rank, "reference")
        reference = alone.state_dict()
    else:
        reference = link.recv(0, "reference")
    worst: list[Any] = [-1.0, ""]
    with torch.no_grad():
        for name, parameter in pipe.module.named_parameters():
            difference = (
                float((parameter - reference[name]).abs().max()) if parameter.numel() else 0
            )
            if difference > worst[0] or math.isnan(difference):
                worst = [difference, name]
    told = crew.exchange("differences", [repr(worst[0]), worst[1]])
    largest, name = max(
        ((float(d), n) for d, n in told), key=lambda pair: (pair[0] != pair[0], pair[0])
    )
    pipe.close()
    return largest, name, len(loader)


def _few_batches(dataset: Dataset[Any], batch_size: int) -> Subset[Any]:
    wanted = (NUM_STEPS - 1) * batch_size + batch_size // 2 + 1
    return Subset(dataset, range(min(wanted, num_samples(dataset))))


def _hold_still(model: nn.Module) -> list[str]:
    model.eval()
    kinds = sorted({type(m).__name__ for m in model.modules() if isinstance(m, DEPENDS_ON_SHARING)})
    return [f"held in evaluation mode for the comparison: {', '.join(kinds)}"] if kinds else []


def _runs_in_double(model: nn.Module, samples: Subset[Any]) -> bool:
    x, _ = as_pair(default_collate([samples[0]]))  # as the loader gives it
    trial = copy.deepcopy(model).double()
    try:
        with torch.no_grad():
            output = trial(x.double() if x.is_floating_point() else x)
    except RuntimeError:  # "expected scalar type ...": it fixes its own dtype somewhere
        return False
    return isinstance(output, torch.Tensor) and output.dtype == torch.float64


def _take_steps(
    model: nn.Module,
    samples: Subset[Any],
    crew: Sharer,
    settings: TrainSettings,
    dtype: torch.dtype,
) -> int:
    optimizer = build_optimizer(settings, model)
    loader = Loader(samples, crew, batch_size=settings.batch_size, seed=settings.seed)
    for x, y in map(as_pair, loader):
        loss = loss_of(model(_cast(x, dtype)), _cast(y, dtype))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return len(loader)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@torch.no_grad()
def _largest_difference(model: nn.Module, alone: nn.Module, crew: Crew) -> tuple[float, str]:
    """Over all parameters and all ranks; `alone` is rank 0's."""
    names = [name for name, _ in model.named_parameters()]
    table = torch.zeros(crew.size, len(names), dtype=torch.float64, device=crew.device)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    for column, (ours, reference) in enumerate(pairs):
        crew.broadcast_(reference.data)
        table[crew.rank, column] = (ours - reference).abs().max() if ours.numel() else 0.0
    crew.sum_(table)
    worst, where = table.amax(0).max(0)
    return float(worst), names[int(where)]
