"""A model that is spread over stages, as every rank sees it.

    pipe = crew.pipeline(Net(), stages=2, schedule="1f1b", microbatches=8,
                         loss=F.cross_entropy, optimizer=torch.optim.SGD, lr=0.01)
    loss = pipe.step(x, y)

Every rank makes the same calls. A step is announced by stage 0, which has the batch, and ends with
the loss, which comes from the last stage; between them everything follows the schedule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import nn

from shoal.crew import Crew
from shoal.errors import ModelError, SettingsError
from shoal.layout import Layout, Share
from shoal.pipeline import micro_batches
from shoal.pipeline.alike import SameTarget, draw_alike, mark_of
from shoal.pipeline.batches import Batches
from shoal.pipeline.build import (
    Model,
    as_module,
    check_stages,
    check_state,
)
from shoal.pipeline.calls import Calls, together
from shoal.pipeline.chance import Chance
from shoal.pipeline.comparison import Comparison
from shoal.pipeline.cutting import best_cuts, found_by_rank_0, named_cuts
from shoal.pipeline.dice import is_dice
from shoal.pipeline.graph import Graph, check_shared, modules_in, read
from shoal.pipeline.in_place import check_in_place
from shoal.pipeline.losses import loss_of_part, part_weights
from shoal.pipeline.outline import outline
from shoal.pipeline.over_stages import OverStages, thinks_in_vectors
from shoal.pipeline.plan import (
    Plan,
    ReplicaPlace,
    check_optimizer,
    no_parameter,
    plan_faults,
    terms,
)
from shoal.pipeline.reach import around, reachable
from shoal.pipeline.replicas import Alone, Averages
from shoal.pipeline.routes import Routes, route
from shoal.pipeline.runner import Finish, Runner
from shoal.pipeline.schedule import Schedule, check_schedule, forward_only, make_schedule
from shoal.pipeline.shared_loss import SharedLoss
from shoal.pipeline.stage import Stage
from shoal.pipeline.stale import check_not_stale, note_trained
from shoal.pipeline.timeline import Timeline
from shoal.pipeline.weights import weighted_stage
from shoal.pipeline.whole import Whole
from shoal.wire.link import Link
from shoal.wire.tree import Tree

NOTHING_TO_LEARN = (
    "the loss has no gradient: it depends on no parameter that is trained. Are all of them frozen, "
    "or does loss= take it off with detach(), item() or torch.no_grad()?"
)
Watch = Callable[[torch.Tensor, Any, Any, int], None]


class Pipeline:
    """One replica's stages, seen from one of them."""

    def __init__(
        self,
        model: Model,
        crew: Crew,
        link: Link,
        plan: Plan,
        *,
        averages: Averages | None = None,
        example: Tree = None,
    ) -> None:
        if faults := plan_faults(plan, crew.size):
            raise SettingsError(faults)
        self.plan = plan
        self.layout = Layout(replicas=crew.size // plan.stages, stages=plan.stages)
        self.replica = self.layout.replica_of(crew.rank)
        self.stage_number = self.layout.stage_of(crew.rank)
        self.place = ReplicaPlace(self.replica, self.layout.replicas, crew.device)
        self.timeline = Timeline()
        self.watch: Watch | None = None
        """Told of every micro-batch in the last stage: its loss, output, target and samples."""
        self.num_parameters = 0
        """Of the whole model."""
        self._crew = crew
        self._link = link
        self._loss = SharedLoss(crew, link, self.layout, plan.reduction)
        self._averages = averages or Alone()
        self._ranks = self.layout.ranks_of_replica(self.replica)
        self._schedules: dict[tuple[str, int], Schedule] = {}
        self._mode: bool | None = None
        """What train() or eval() has said; None: every module is as it came."""
        self._calls = Calls(link, self._ranks)
        self._same_target = SameTarget(self._ranks[0], self._ranks[-1])
        self._num_steps = 0
        self._is_trained = False
        self._is_accumulating = False
        """There are gradients that no update has used."""
        self._chance: Chance | None = None
        self._graph: Graph | None = None
        self._comparison: Comparison | None = None
        """With the model itself, in the first call."""
        self._is_compared = False
        self._stage: Stage | None = None

        self._is_own_init = not isinstance(model, nn.Module) and callable(model)
        module = as_module(model, plan.seed, example)
        check_state(module)
        found_by_rank_0(crew, "weights of the model", lambda: check_not_stale(module))
        self._averages.check(module)
        graph = read(module, plan.inputs)
        check_stages(graph, plan.stages)
        crew.agree("how the model is trained", terms(plan))
        crew.agree("the model", outline(graph))
        draw_alike(crew, link, self._ranks)
        inputs = list(zip(graph.inputs, graph.input_names, strict=True))
        self._batches = Batches(inputs, plan)
        shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
        self._whole = Whole(crew, link, self._ranks, shapes)
        self._values = graph.values
        self._given = weakref.ref(module)
        self._given_mode = module.training
        """Of the model that was given, when it was looked at last."""
        self.num_parameters = sum(p.numel() for p in module.parameters())
        self._graph = graph
        if plan.cuts is not None:
            known = None if example is None else lambda: self._batches.inputs(example)
            self._build(named_cuts(crew, plan, graph, known))
        elif plan.stages == 1 or example is not None:
            self.prepare(example)

    # -- building ----------------------------------------------------------------------------------

    def prepare(self, x: Tree) -> None:
        """Decide where to cut, by a profile with `x`, unless that has been decided."""
        if self._stage is not None:
            return
        graph = self._graph
        assert graph is not None
        given = (self._crew, self._link, self.layout, self.plan, graph)
        with self._batches.explaining(x):
            cuts = best_cuts(*given, inputs=lambda: self._batches.inputs(x))
        self._build(cuts)

    def _build(self, cuts: list[int]) -> None:
        graph = self._graph
        assert graph is not None
        names = graph.names()
        self._crew.agree("the cuts", [names[cut] for cut in cuts])
        check_shared(graph, cuts)
        check_in_place(graph, cuts)
        self.routes: Routes = route(graph, cuts)
        stretches = [self.routes.units_of(stage) for stage in range(self.plan.stages)]
        self.units = [graph.units[units.start : units.stop] for units in stretches]
        """Of each stage: the steps that it computes."""
        self.modules = [modules_in(graph, units) for units in stretches]
        """Of each stage: names of the model's own modules."""
        seed = self.plan.seed if self._is_own_init else None
        self._comparison = Comparison.of(graph, self.routes, self.plan, is_here=not self._crew.rank)
        given = (self._crew, self._link, self.layout, graph, self.routes)
        stage, self._names, self._stray = weighted_stage(*given, seed)
        self._graph = None  # and, after the first call, the other stages' parameters
        self._stage = stage
        if self._crew.size > 1:  # alone, it is one process
            loss = getattr(self.plan.loss, "__globals__", {}).values()
            things = [*reachable(graph.model), *around(graph.model), *loss]
            self._chance = Chance(self._crew.rank, self._crew.device, filter(is_dice, things))
        self._runner = Runner(stage, self._link, self._ranks, self.timeline)
        self._optimizer = self._calls.begun_by_all(
            self._crew, "the optimizer", self._make_optimizer
        )

    def _compare(self, x: Tree, y: Tree = None, *, goes_back: bool = False) -> None:
        """With the model itself, by the first samples of the first batch; and once more before it
        is trained, if that was in eval mode, in which there are no gradients."""
        comparison = self._comparison
        if comparison is None or (self._is_compared and not goes_back):
            return
        self._is_compared = True
        if goes_back or self.module.training or self.plan.loss is None:
            self._comparison = None
        found_by_rank_0(
            self._crew,
            "the model in stages",
            lambda: comparison.check(self._batches.inputs(x)[0], y, self._mode),
        )

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        if self.plan.optimizer is None:
            return None
        # Frozen ones too: they may be trained later. A stage without any has an optimizer all the
        # same, as schedulers want one.
        mine = list(self.module.parameters()) or [no_parameter()]
        made = self.plan.optimizer(mine, **self.plan.optimizer_options)
        check_optimizer(made)
        return made

    @property
    def stage(self) -> Stage:
        if self._stage is None:
            raise ModelError(
                "The cuts are chosen by a profile with the first batch, so before the first step "
                "there is no stage yet. Give cuts=, or example= (a batch of inputs), or call "
                "pipe.prepare(x) first."
            )
        return self._stage

    @property
    def is_last(self) -> bool:
        """Whether this rank has the model's last stage."""
        return self.stage_number == self.plan.stages - 1

    @property
    def bytes_sent(self) -> int:
        """Payload of gradients between replicas that this rank has sent so far."""
        return self._averages.bytes_sent

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model."""
        return self.stage.module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of this rank's parameters. Learning-rate schedulers take it, on every rank alike."""
        stage = self.stage
        if self._optimizer is None:
            raise ModelError(
                f"stage {stage.number}: pipeline() was given no optimizer=, such as "
                "optimizer=torch.optim.SGD, lr=0.01."
            )
        return self._optimizer

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's."""
        return self.module.parameters()

    @property
    def training(self) -> bool:
        return self._given_mode if self._stage is None else self._stage.module.training

    def train(self, mode: bool = True) -> Self:
        self._mode = mode
        given = self._given()
        if self._stage is not None:
            self._stage.module.train(mode)
        elif given is not None:  # whose modules it will have, in the modes that they have then
            given.train(mode)
        self._given_mode = mode if given is None else given.training
        return self

    def eval(self) -> Self:
        return self.train(False)

    # -- a step ------------------------------------------------------------------------------------

    def step(self, x: Tree = None, y: Tree = None) -> torch.Tensor:
        """Forward, backward and update; the loss over the global batch, on every rank the same.

        x matters in stage 0, y in the last one. Several inputs: a tuple, or a dict by name.
        """
        if self.plan.optimizer is not None:
            self.prepare(x)
            if thinks_in_vectors(self.optimizer):
                return self._step_together(x, y)
        loss = self.backward(x, y)
        self.update()
        return loss

    def _step_together(self, x: Tree, y: Tree) -> torch.Tensor:
        """The optimizer asks for the loss as often as it likes, on all ranks alike."""
        if self._is_accumulating:
            kind = type(self.optimizer).__name__
            raise ModelError(
                f"step(): there are gradients of an earlier backward(), and {kind} begins anew "
                "each time that it computes the loss. Use pipe.step(x, y) alone."
            )

        def evaluate() -> torch.Tensor:
            self._begin_anew()
            loss = self.backward(x, y)
            with self.timeline.span("update"):
                self._agree_and_clip()
            return loss

        with self._calls.to_its_end():
            loss = OverStages(self._link, self._ranks).step(self.optimizer, evaluate)
            self._begin_anew()
        self._note_update()
        return loss

    def backward(self, x: Tree = None, y: Tree = None, weight: float = 1.0) -> torch.Tensor:
        """Forward and backward only: gradients add up until `update()`.

        weight: of this batch, where several are to make one update.
        """
        if self.plan.loss is None:
            raise ModelError(
                "pipeline() was given no loss=, so there is nothing to go back from; such as "
                "loss=torch.nn.functional.mse_loss."
            )
        self.prepare(x)
        self._compare(x, y, goes_back=True)
        parts, inputs = self._begin("step", x, y)
        if not parts[0].total:
            raise ModelError("x: the batch is empty, so there is nothing to learn from.")
        self._num_steps += 1
        schedule = self._schedule(self.plan.schedule, len(parts))
        try:
            with torch.enable_grad(), self._calls.to_its_end():
                finish = self._loss_of_parts(y, parts, weight) if self.is_last else None
                self._run(schedule, inputs, finish)
        finally:
            self.stage.forget()
        self._is_accumulating = True
        with self.timeline.span("wait"), together(self._link, "step"):
            return self._loss.hear(self._num_steps)

    def _loss_of_parts(self, y: Tree, parts: Sequence[Share], weight: float) -> Finish:
        """In the last stage: what makes the loss of each micro-batch, and tells that of all."""
        assert self.plan.loss is not None
        counts = self._counts()
        rule, reduction = self.plan.loss, self.plan.reduction
        targets = self._batches.targets(y, parts)
        weights = part_weights(rule, targets, parts, reduction)
        total = torch.zeros((), device=self._crew.device)
        to_come = len(parts)

        def finish(number: int, output: Any) -> torch.Tensor:
            nonlocal total, to_come
            target, own = targets[number], weights[number]
            loss = loss_of_part(rule, output, target, own, reduction)
            if not loss.requires_grad:
                raise ModelError(NOTHING_TO_LEARN)
            if self.watch is not None:
                self.watch(loss, output, target, parts[number].size)
            total = total + loss.detach() * own
            to_come -= 1
            if not to_come:
                share = self.place.share
                self._loss.tell(self._num_steps, total, share.size if share else 1)
            scale = own * counts * weight
            return loss if scale == 1.0 else loss * scale

        return finish

    def _run(
        self, schedule: Schedule, inputs: list[dict[str, Tree]], finish: Finish | None
    ) -> None:
        with self._own_chance():
            turn = self._calls.turn
            self._runner.run(schedule, feed=inputs.__getitem__, finish=finish, call=turn)

    def update(self) -> None:
        """Let the replicas agree, clip, and take the optimizer's step; gradients begin anew."""
        optimizer = self.optimizer
        if thinks_in_vectors(optimizer):
            raise ModelError(
                f"update(): {type(optimizer).__name__} computes the loss again within its step, "
                "which needs the batch. Use pipe.step(x, y)."
            )
        self._calls.count()
        with self.timeline.span("update"), self._calls.to_its_end():
            self._agree_and_clip()
            optimizer.step()
            self._begin_anew()
        self._note_update()

    def _note_update(self) -> None:
        if not self._is_trained and (given := self._given()) is not None:
            note_trained(given, self.module)
        self._is_trained = True

    def _begin_anew(self) -> None:
        self.module.zero_grad()
        self._is_accumulating = False

    def _agree_and_clip(self) -> None:
        self._averages.average(self.module)
        if self.plan.clip_norm is not None:
            self._whole.clip(self.module, self.plan.clip_norm)

    def _own_chance(self) -> AbstractContextManager[None]:
        return nullcontext() if self._chance is None else self._chance.own()

    def _counts(self) -> float:
        """How much this replica's mean counts, relative to others."""
        if self.place.share is None or self.layout.replicas == 1:
            return 1.0
        if self.plan.reduction == "sum":
            return float(self.layout.replicas) if self.place.share.size else 0.0
        return self.place.share.weight_over_mean(self.layout.replicas)

    def _begin(
        self, what: str, x: Tree, y: Tree = None
    ) -> tuple[list[Share], list[dict[str, Tree]]]:
        """The shares of the micro-batches and, in stage 0, their inputs."""
        is_training = self.module.training
        self._values.check()
        self._check_mode()
        if self.stage_number > 0:
            with self.timeline.span("wait"):
                samples, mark = self._calls.hear(what, is_training=is_training)
            if self.is_last and y is not None:
                self._same_target.check(mark, y)
            return self._batches.parts(samples), []
        self._calls.check()
        named, parts = self._batches.inputs(x)
        self._calls.announce(what, parts[0].total, is_training=is_training, mark=mark_of(y))
        return parts, micro_batches.split(named, parts)

    def _check_mode(self) -> None:
        """That nobody has called train() or eval() of the model itself, and not the pipeline's."""
        given, is_training = self._given(), self.module.training
        if given is None:
            return
        if given.training not in (self._given_mode, is_training):
            was = "train" if given.training else "eval"
            raise ModelError(
                f"{type(given).__name__}.{was}() was called on the model, which changes some of "
                f"its steps in stages, and not others. Call pipe.{was}()."
            )
        self._given_mode = given.training

    def _schedule(self, name: str, count: int) -> Schedule:
        key = (name, count)
        if key not in self._schedules:
            num_stages = self.plan.stages
            made = (
                forward_only(num_stages, count)
                if not name
                else make_schedule(name, num_stages, count)
            )
            check_schedule(made)
            self._schedules[key] = made
        return self._schedules[key]

    # -- inference ---------------------------------------------------------------------------------

    def __call__(self, x: Tree = None, *, everywhere: bool = True) -> Tree:
        """The model's output, on every rank; without gradients, and nothing is kept for them.

        everywhere: False leaves it in the last stage, and the others get None.
        """
        self.prepare(x)
        self._compare(x)
        parts, inputs = self._begin("inference", x)
        outputs: list[Tree] = []

        def finish(number: int, output: Any) -> None:
            outputs.append(output)

        with torch.no_grad(), self._calls.to_its_end():
            self._run(self._schedule("", len(parts)), inputs, finish)
        if not self.is_last:
            with together(self._link, "pipe(x)"):
                return self._link.recv(self._ranks[-1], "output") if everywhere else None
        output = micro_batches.join(outputs, parts)
        if everywhere:
            micro_batches.check_output(output)
        for rank in self._ranks[:-1] if everywhere else []:
            self._link.send(output, rank, "output")
        return output

    # -- what is more than one rank's --------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of all stages so that together they have at most this norm."""
        self._calls.begin("clip_grad_norm_()")
        return self._whole.clip(self.module, max_norm)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Whole, on rank 0, as a plain model's, and a copy; empty on the others."""
        self._calls.check()  # which those with no part in it do not otherwise
        mine = self.module.state_dict()
        if self.replica == 0:  # which has rank 0
            self._calls.begin("state_dict()")
        return self._whole.gather({**mine, **self._stray}, self._names)

    def load_state_dict(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """A whole state, and nothing else, on rank 0; the others may give None."""
        module = self.module
        self._calls.begin("load_state_dict()")
        self._whole.spread(state, module, self._stray, self._names)

    def close(self) -> None:
        self._averages.close()
