"""The stages of a model, compared with the model itself before they are trained.

torch.fx reads what it sees, and a forward() may do more (unseen.py): then the stages would be
another model. Nobody can think of all the ways. So rank 0, which still has the whole model, lets it
compute a few samples, forward and backward, and lets all stages do the same, one after the other;
outputs, gradients and buffers must be the same. Weights are somewhat other ones than when the model
was read: what was taken for a constant then, and is none, shows. Where there is no room for that,
what would be computed is compared, step by step (dry_run.py).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import nn

from shoal.errors import ModelError
from shoal.pipeline.borders import Borders, names_by_memory
from shoal.pipeline.dry_run import faults_of_stages
from shoal.pipeline.graph import Graph
from shoal.pipeline.keeping import as_it_was
from shoal.pipeline.losses import difference_of_parts, name_of
from shoal.pipeline.meta import is_on_meta, materialise
from shoal.pipeline.micro_batches import copied
from shoal.pipeline.plan import Plan
from shoal.pipeline.routes import Routes
from shoal.pipeline.runner import Runner
from shoal.pipeline.samples import Outcome, Samples
from shoal.pipeline.schedule import backward_only, forward_only
from shoal.pipeline.sharing import SharedThings
from shoal.pipeline.stage import Stage
from shoal.pipeline.timeline import Timeline
from shoal.pipeline.trace import WAYS_OUT
from shoal.pipeline.unseen import LeftOver, memory_of
from shoal.wire.link import Job
from shoal.wire.memory import MemoryLink
from shoal.wire.tree import Tree, tensors_of

FEW = 4
"""Samples: more, up to a whole batch, only for a model that does not take so few."""
SOME = 16
"""Samples, from all over the batch, that tell what a loss counts by."""
SPREAD = 0.01
"""How much other its weights are."""
ROOM = 0.5
"""Of the free memory: what the copies of weights and gradients may take."""
MADE_BYTES = 64 * 2**20
"""Of weights: up to so many are made on one rank, of a model that nobody has whole."""

_OF_LOSSES = (
    " A loss is given the output and the target, and has nothing else: what it would make of "
    "weights is weight_decay= of the optimizer."
)
log = logging.getLogger("shoal.pipeline")

_UNEVEN = """\
loss=%s: is %s, weighed by their samples: with several micro-batches another model is trained than \
by one process. Does it count some samples or targets more than others (padding, weights of \
classes), or pairs of samples? Ways out: functional.cross_entropy or nll_loss, as it is or with \
functools.partial, whose way to count is known; reduction="sum", with pipe.backward(x, y, \
weight=1 / count) and pipe.update(); or schedule="sequential"."""


@dataclass(frozen=True)
class Comparison:
    """Of the stages of a model, which is still whole, with the model itself."""

    routes: Routes
    plan: Plan
    graph: Graph | None
    """On the rank that compares."""

    @classmethod
    def of(cls, graph: Graph, routes: Routes, plan: Plan, *, is_here: bool) -> Comparison:
        """is_here: whether it is this rank that compares."""
        if is_here and is_on_meta(graph.model):
            graph = replace(graph, model=copy.deepcopy(graph.model))
        return cls(routes, plan, graph if is_here else None)

    def check(self, inputs: dict[str, Tree], target: Tree, mode: bool | None) -> None:
        """Raises ModelError if the stages are another model.

        mode: what train() or eval() has said; None: every part has the mode that it came in.
        """
        assert self.graph is not None
        # In one stage the loss is this rank's own, and may count its calls where nobody finds that.
        loss = self.plan.loss if self.plan.stages > 1 else None
        samples = Samples(inputs, target, loss, self.plan.reduction)
        count = min((len(t) for t in tensors_of(inputs).values() if t.dim()), default=1)
        model = self.graph.model
        if not _has_room(model):
            self._check_dry(inputs, mode)
            return
        materialise(model, self.plan.seed, torch.device("cpu"))
        for is_training in dict.fromkeys((mode, False)) if count else ():
            self._fill_caches(samples, is_training)
            # A target that is none may fail the loss: it matters in the last stage only.
            tries = [
                (given.first(few), spread)
                for given in (samples, replace(samples, target=None))
                for few, spread in ((FEW, SPREAD), (FEW, 0.0), (count, 0.0))
            ]
            for few_samples, spread in tries:
                with as_it_was(model, self.plan.loss, with_weights=True):
                    if is_training is not None:
                        model.train(is_training)
                    _disturb(model, spread)
                    if self._is_done(few_samples, goes_back=model.training and mode is not False):
                        break

        if count > 1 and self.plan.microbatches > 1 and self.plan.schedule != "sequential":
            self._compare_losses(replace(samples.spread(SOME), loss=self.plan.loss), mode)

    def _check_dry(self, inputs: dict[str, Tree], mode: bool | None) -> None:
        """What would be computed, by a model that there is no room for."""
        assert self.graph is not None
        model = self.graph.model
        for is_training in dict.fromkeys((mode, False)):
            try:
                with as_it_was(model):
                    faults = faults_of_stages(self.graph, self.routes, inputs, is_training)
            except Exception as error:
                log.info(
                    "the stages are not compared with the model: it is too large to be computed, "
                    "and which steps it takes depends on values (%s)",
                    error,
                )
                return
            if faults:
                raise ModelError(_told(model, faults, "would compute the batch"))

    def _compare_losses(self, samples: Samples, mode: bool | None) -> None:
        """Tells of a loss that is another one of micro-batches, which nobody else would."""
        assert self.graph is not None
        model, loss = self.graph.model, samples.loss
        if loss is None or samples.target is None:
            return
        # What fails here fails in the first step, and is told there.
        with as_it_was(model, loss, with_weights=True), suppress(Exception), torch.no_grad():
            if mode is not None:
                model.train(mode)
            output = model(**self.graph.given(copied(samples.inputs)))
            if found := difference_of_parts(loss, output, samples.target, samples.reduction):
                log.warning(_UNEVEN, name_of(loss), found)

    def _fill_caches(self, samples: Samples, is_training: bool | None) -> None:
        """Those that nobody can put back, as functools.lru_cache has: with what the first call of
        the model would put there, while its weights are still the ones that it came with."""
        assert self.graph is not None
        for few in (FEW, None):
            with as_it_was(self.graph.model, with_weights=True), suppress(Exception):
                if is_training is not None:
                    self.graph.model.train(is_training)
                _outcome(self.graph, samples if few is None else samples.first(few), False)
                return

    def _is_done(self, samples: Samples, *, goes_back: bool) -> bool:
        """False: the model does not take these samples. Raises ModelError."""
        assert self.graph is not None
        model = self.graph.model
        try:
            alone = _outcome(self.graph, samples, goes_back)
        except LeftOver:
            raise
        except Exception:  # the model's own fault, or too few samples: the first step will tell
            return False
        borders = Borders(names_by_memory(model))
        try:
            in_stages = _outcome_of_stages(self.graph, self.routes, samples, goes_back, borders)
            faults = [alone.difference(in_stages)]
        except ModelError:
            raise
        except Exception as error:
            faults = [f"a stage fails where the model does not: {error}"]
        if borders.faults:
            remedy = _OF_LOSSES if self.plan.loss is not None and goes_back else ""
            raise ModelError(_told(model, [*borders.faults, *faults]) + remedy)
        if any(faults):
            if again := alone.difference(_outcome(self.graph, samples, goes_back)):
                log.warning(
                    "the stages of %s could not be compared with it: it does not compute the same "
                    "when it is called again with the same samples (%s). If it counts calls by "
                    "what nobody can put back (an iterator), that is some calls ahead now",
                    type(model).__name__,
                    again,
                )
                return True
            raise ModelError(_told(model, faults))
        return True


def _told(
    model: nn.Module, faults: Sequence[str], did: str = "computed the first samples of the batch"
) -> str:
    what = type(model).__name__
    shown = "\n".join(f"  {fault}" for fault in faults if fault)
    return (
        f"{what} in stages is not {what}. Both {did}, and:\n"
        f"{shown}\nSomething that {what} does is not seen by torch.fx, or reaches over a cut. "
        + WAYS_OUT
    )


# -- the model, and its stages ---------------------------------------------------------------------


def _outcome(graph: Graph, samples: Samples, goes_back: bool) -> Outcome:
    """Of the model itself."""
    model = graph.model
    with as_it_was(model, samples.loss), torch.set_grad_enabled(goes_back):
        _forget_gradients(model)
        output = model(**graph.given(copied(samples.inputs)))
        loss = samples.loss_of(output) if goes_back else None
        if loss is not None:
            loss.backward()
        return Outcome.of(model, output)


def _outcome_of_stages(
    graph: Graph, routes: Routes, samples: Samples, goes_back: bool, borders: Borders
) -> Outcome:
    model, count = graph.model, routes.num_stages
    stages = [Stage.of(graph, routes, number) for number in range(count)]
    links = _Messages.crew(count)
    for link in links:
        link.borders = borders
    runners = [
        Runner(stage, link, range(count), Timeline())
        for stage, link in zip(stages, links, strict=True)
    ]
    shared = SharedThings(model, [stage.module for stage in stages])
    owned = [{memory_of(tensor) for tensor in stage.tensors().values()} for stage in stages]
    outputs: list[Any] = []

    def finish(number: int, output: Any) -> torch.Tensor | None:
        outputs.append(output)
        return samples.loss_of(output) if goes_back else None

    inputs = copied(samples.inputs)
    with as_it_was(model, samples.loss), torch.set_grad_enabled(goes_back):
        _forget_gradients(model)
        for number, runner in enumerate(runners):
            with borders.around(number, owned[number]):
                runner.run(forward_only(count, 1), feed=lambda _: inputs, finish=finish)
            borders.faults |= dict.fromkeys(shared.changed_by(number))
        for number, runner in reversed(list(enumerate(runners)) if goes_back else []):
            with borders.around(number, owned[number]):
                runner.run(backward_only(count, 1))
            borders.faults |= dict.fromkeys(shared.changed_by(number))
        trained = {id(weight) for stage in stages for weight in stage.module.parameters()}
        return Outcome.of(model, outputs[0], trained)


class _Messages(MemoryLink):
    """Between stages: what crosses a border here may do so."""

    borders: Borders

    def isend(self, tree: Tree, to: int, tag: str = "", *, lend: bool = False) -> Job:
        with self.borders.crossed():
            return super().isend(tree, to, tag, lend=lend)


def _forget_gradients(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.grad = None


def _disturb(model: nn.Module, spread: float) -> None:
    """Somewhat other weights, of which zeros are none any more; other buffers, of the same sign."""
    generator = torch.Generator().manual_seed(0)
    seen: set[int] = set()
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()] if spread else []
    for tensor in tensors:
        least = spread / 10 if isinstance(tensor, nn.Parameter) else 0.0
        memory = memory_of(tensor)
        if memory in seen or not tensor.is_floating_point() or 0 in tensor.stride():
            continue
        seen.add(memory)
        noise = torch.rand(tensor.shape, generator=generator).to(tensor)
        tensor.data.mul_(1 + spread * noise).add_(least * noise)


def _has_room(model: nn.Module) -> bool:
    """For another set of weights, and two of gradients; on meta there are none yet."""
    size = sum(weight.nbytes for weight in model.parameters())
    if is_on_meta(model) and size > MADE_BYTES:
        return False
    return bool(3 * size <= ROOM * psutil.virtual_memory().available)
