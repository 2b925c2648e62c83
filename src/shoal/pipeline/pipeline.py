"""A model that is spread over stages, as every rank sees it.

    pipe = crew.pipeline(Net(), stages=2, schedule="1f1b", microbatches=8,
                         loss=F.cross_entropy, optimizer=torch.optim.SGD, lr=0.01)
    loss = pipe.step(x, y)

Every rank makes the same calls. A step is announced by stage 0, which has the batch, and ends with
the loss, which comes from the last stage; between them everything follows the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from shoal.crew import Crew
from shoal.errors import ModelError, SettingsError, reason_of
from shoal.layout import Layout, Share
from shoal.pipeline import micro_batches
from shoal.pipeline.build import (
    Model,
    as_module,
    check_stages,
    check_state,
    is_on_meta,
    materialise,
    outline,
)
from shoal.pipeline.chance import Chance
from shoal.pipeline.footprint import bytes_per_weight_byte
from shoal.pipeline.graph import Graph, check_in_place, check_shared, cuts_at, modules_in, read
from shoal.pipeline.losses import loss_of_part, part_weights
from shoal.pipeline.measure import measure_costs
from shoal.pipeline.over_stages import OverStages, thinks_in_vectors
from shoal.pipeline.partition import Costs
from shoal.pipeline.plan import (
    Plan,
    ReplicaPlace,
    check_optimizer,
    no_parameter,
    plan_faults,
    terms,
)
from shoal.pipeline.profile import check_shapes, choose_cuts_of_batch
from shoal.pipeline.replicas import Alone, Averages
from shoal.pipeline.routes import Routes, route
from shoal.pipeline.runner import Finish, Runner
from shoal.pipeline.schedule import Schedule, check_schedule, forward_only, make_schedule
from shoal.pipeline.shared_loss import SharedLoss
from shoal.pipeline.stage import Stage
from shoal.pipeline.timeline import Timeline
from shoal.pipeline.whole import Whole
from shoal.settings import kind_of
from shoal.wire.link import Link
from shoal.wire.tree import Tree

NUM_CALLS = 8
"""That messages tell apart: no stage is as far ahead of another. The same tags come again, and with
them headers of messages that are known."""
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
        self._num_begun = 0
        self._num_steps = 0
        self._failed = ""
        """Why a call did not come to its end: stages are at different places since then."""
        self._is_accumulating = False
        """There are gradients that no update has used."""
        self._chance: Chance | None = None
        self._graph: Graph | None = None
        self._stage: Stage | None = None

        self._is_own_init = not isinstance(model, nn.Module) and callable(model)
        module = as_module(model, plan.seed, example)
        check_state(module)
        self._averages.check(module)
        graph = read(module, plan.inputs)
        check_stages(graph, plan.stages)
        crew.agree("how the model is trained", terms(plan))
        crew.agree("the model", outline(graph))
        self._inputs = list(zip(graph.inputs, graph.input_names, strict=True))
        """Each as a value of the graph, and as `forward` calls it."""
        shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
        self._whole = Whole(crew, link, self._ranks, shapes)
        self.num_parameters = sum(p.numel() for p in module.parameters())
        self._graph = graph
        if plan.cuts is not None:
            cuts = cuts_at(graph, plan.cuts, plan.stages)
            self._try_shapes(graph, example)
            self._build(cuts)
        elif plan.stages == 1 or example is not None:
            self.prepare(example)

    # -- building ----------------------------------------------------------------------------------

    def prepare(self, x: Tree) -> None:
        """Decide where to cut, by a profile with `x`, unless that has been decided."""
        if self._stage is not None:
            return
        graph = self._graph
        assert graph is not None
        cuts: list[int] | None = None
        fault = ""
        in_turns = self.plan.schedule == "sequential"
        costs = measure_costs(self._crew, self._link, self.layout, in_turns=in_turns)
        held = bytes_per_weight_byte(
            self.plan.optimizer, self.plan.optimizer_options, self.layout.replicas
        )
        costs = replace(costs, bytes_per_parameter_byte=held)
        if self.plan.memory_bytes is not None:
            costs = replace(costs, memory_bytes=self.plan.memory_bytes)
        if self._crew.rank == 0 and self.plan.stages > 1:
            try:
                cuts = self._chosen_cuts(graph, x, costs)
            except ModelError as error:
                fault = str(error)
        chosen, fault = self._crew.exchange("the cuts", [cuts, fault])[0]
        if fault:
            raise ModelError(fault)
        self._build(chosen or [])

    def _try_shapes(self, graph: Graph, x: Tree) -> None:
        """With no profile to find it: does every step take what comes to it, where x is known?"""
        fault = ""
        if self._crew.rank == 0 and x is not None:
            try:
                check_shapes(graph, *self._in_parts(x))
            except ModelError as error:
                fault = str(error)
        fault = self._crew.exchange("the shapes of the model", fault)[0]
        if fault:
            raise ModelError(fault)

    def _in_parts(self, x: Tree) -> tuple[dict[str, Tree], list[Share]]:
        named = self._named_inputs(x)
        return named, self._parts(micro_batches.num_samples(named, "x"))

    def _chosen_cuts(self, graph: Graph, x: Tree, costs: Costs) -> list[int]:
        named, parts = self._in_parts(x)
        schedule = self._schedule(self.plan.schedule, len(parts))
        return choose_cuts_of_batch(graph, named, parts, costs, schedule)

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
        stage = self._weighted_stage(graph)
        self._graph = None  # and with it the other stages' parameters
        self._stage = stage
        if self._crew.size > 1:  # alone, it is one process
            self._chance = Chance(self._crew.rank, self._crew.device)
        self._runner = Runner(stage, self._link, self._ranks, self.timeline)
        self._optimizer = self._make_optimizer()
        if self._mode is not None:
            stage.module.train(self._mode)

    def _weighted_stage(self, graph: Graph) -> Stage:
        """With rank 0's weights on every rank; or, where each makes its own, of one seed."""
        device = self._crew.device
        stages = [Stage.of(graph, self.routes, number) for number in range(self.plan.stages)]
        names = [list(stage.module.state_dict()) for stage in stages]
        mine = names[self.stage_number]
        used = {name for each in names for name in each}
        stray = [name for name in self._whole.shapes if name not in used and self.stage_number == 0]
        if self._is_own_init and is_on_meta(graph.model):
            materialise(graph.model, self.plan.seed, device, {*mine, *stray})
        state = graph.model.state_dict()
        self._stray = {name: state[name] for name in stray}
        """What belongs to the model's state, though no step uses it."""
        stage = Stage.of(graph, self.routes, self.stage_number)
        stage.module.to(device)
        if not self._is_own_init and self._crew.rank == 0:
            for rank in range(1, self._crew.size):
                theirs = stages[self.layout.stage_of(rank)].tensors()
                self._link.send(theirs, rank, "weights")
        elif not self._is_own_init:
            weights = self._link.recv(0, "weights")
            for name, tensor in stage.tensors().items():
                if not torch.equal(tensor, weights[name]):  # one that was expanded takes no values
                    tensor.copy_(weights[name])
        return stage

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
            raise ModelError(f"stage {stage.number}: pipeline() was given no optimizer=.")
        return self._optimizer

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's."""
        return self.module.parameters()

    def train(self, mode: bool = True) -> Self:
        self._mode = mode
        if self._stage is not None:
            self._stage.module.train(mode)
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

        loss = OverStages(self._link, self._ranks).step(self.optimizer, evaluate)
        self._begin_anew()
        return loss

    def backward(self, x: Tree = None, y: Tree = None, weight: float = 1.0) -> torch.Tensor:
        """Forward and backward only: gradients add up until `update()`.

        weight: of this batch, where several are to make one update.
        """
        if self.plan.loss is None:
            raise ModelError("pipeline() was given no loss=, so there is nothing to go back from.")
        self.prepare(x)
        parts, inputs = self._begin("step", x)
        if not parts[0].total:
            raise ModelError("x: the batch is empty, so there is nothing to learn from.")
        self._num_steps += 1
        schedule = self._schedule(self.plan.schedule, len(parts))
        try:
            with torch.enable_grad(), self._to_its_end():
                finish = self._loss_of_parts(y, parts, weight) if self.is_last else None
                self._run(schedule, inputs, finish)
        finally:
            self.stage.forget()
        self._is_accumulating = True
        with self.timeline.span("wait"):
            return self._loss.hear(self._num_steps)

    def _loss_of_parts(self, y: Tree, parts: Sequence[Share], weight: float) -> Finish:
        """In the last stage: what makes the loss of each micro-batch, and tells that of all."""
        assert self.plan.loss is not None
        counts = self._counts()
        rule, reduction = self.plan.loss, self.plan.reduction
        targets = self._targets(y, parts)
        weights = part_weights(rule, targets, parts, reduction)
        total = torch.zeros((), device=self._crew.device)
        to_come = len(parts)

        def finish(number: int, output: Any) -> torch.Tensor:
            nonlocal total, to_come
            target, own = targets[number], weights[number]
            loss = loss_of_part(rule, output, target, own, reduction)
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
            call = self._num_begun % NUM_CALLS
            self._runner.run(schedule, feed=inputs.__getitem__, finish=finish, call=call)

    @contextmanager
    def _to_its_end(self) -> Iterator[None]:
        """Of a call that all stages have begun: if it fails in one, nobody can go on from there."""
        try:
            yield
        except BaseException as error:
            if self._crew.size > 1:
                self._failed = f"call {self._num_begun} failed with {reason_of(error)}"
            raise

    def update(self) -> None:
        """Let the replicas agree, clip, and take the optimizer's step; gradients begin anew."""
        optimizer = self.optimizer
        if thinks_in_vectors(optimizer):
            raise ModelError(
                f"update(): {type(optimizer).__name__} computes the loss again within its step, "
                "which needs the batch. Use pipe.step(x, y)."
            )
        with self.timeline.span("update"):
            self._agree_and_clip()
            optimizer.step()
            self._begin_anew()

    def _begin_anew(self) -> None:
        self.module.zero_grad()
        self._is_accumulating = False

    def _agree_and_clip(self) -> None:
        self._averages.average(self.module)
        if self.plan.clip_norm is not None:
            self.clip_grad_norm_(self.plan.clip_norm)

    def _own_chance(self) -> AbstractContextManager[None]:
        return nullcontext() if self._chance is None else self._chance.own()

    def _counts(self) -> float:
        """How much this replica's mean counts, relative to others."""
        if self.place.share is None or self.layout.replicas == 1:
            return 1.0
        if self.plan.reduction == "sum":
            return float(self.layout.replicas) if self.place.share.size else 0.0
        return self.place.share.weight_over_mean(self.layout.replicas)

    def _begin(self, what: str, x: Tree) -> tuple[list[Share], list[dict[str, Tree]]]:
        """Stage 0 tells the others what comes; the shares of the micro-batches."""
        if self._failed:
            raise ModelError(
                f"this pipeline cannot go on: {self._failed}, and its stages have been at "
                "different places since then. Make a new one, with weights that you have kept."
            )
        self._num_begun += 1
        inputs: list[dict[str, Tree]] = []
        if self.stage_number == 0:
            named, parts = self._in_parts(x)
            announced = [what, self._num_begun, parts[0].total, self.module.training]
            for rank in self._ranks[1:]:
                self._link.isend(announced, rank, "begin")
            inputs = micro_batches.split(named, parts)
        else:
            with self.timeline.span("wait"):
                announced = self._link.recv(self._ranks[0], "begin")
            expected = [what, self._num_begun, announced[2], self.module.training]
            if announced != expected:
                raise ModelError(
                    f"rank {self._crew.rank} does {_told(expected)}; rank {self._ranks[0]} does "
                    f"{_told(announced)}. Every rank must make the same calls of the pipeline."
                )
            parts = self._parts(announced[2])
        return parts, inputs

    def _parts(self, samples: int) -> list[Share]:
        in_turns = self.plan.schedule == "sequential"
        num_stages = 1 if in_turns else self.plan.stages
        return micro_batches.shares(samples, 1 if in_turns else self.plan.microbatches, num_stages)

    def _named_inputs(self, x: Tree) -> dict[str, Tree]:
        names = [name for _, name in self._inputs]
        if isinstance(x, dict) and set(x) == set(names):
            return {value: x[name] for value, name in self._inputs}
        if isinstance(x, tuple | list) and len(x) == len(names):
            return {value: each for (value, _), each in zip(self._inputs, x, strict=True)}
        if len(names) == 1 and x is not None:
            return {self._inputs[0][0]: x}
        got = "nothing" if x is None else kind_of(x)
        if isinstance(x, dict | tuple | list):
            got += f" of {len(x)}"
        raise ModelError(f"x: the model takes {', '.join(names)}; got {got}.")

    def _targets(self, y: Tree, parts: Sequence[Share]) -> list[Tree]:
        samples = micro_batches.num_samples(y, "y")
        if samples != parts[0].total:
            raise ModelError(
                f"y has {samples} samples, x has {parts[0].total}: they must be of one batch."
            )
        return micro_batches.split(y, parts)

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
        parts, inputs = self._begin("inference", x)
        outputs: list[Tree] = []

        def finish(number: int, output: Any) -> None:
            outputs.append(output)

        with torch.no_grad(), self._to_its_end():
            self._run(self._schedule("", len(parts)), inputs, finish)
        if not self.is_last:
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
        return self._whole.clip(self.module, max_norm)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Whole, on rank 0, as a plain model's, and a copy; empty on the others."""
        return self._whole.gather({**self.module.state_dict(), **self._stray})

    def load_state_dict(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """A whole state, and nothing else, on rank 0; the others may give None."""
        self._whole.spread(state, self.module, self._stray)

    def close(self) -> None:
        self._averages.close()


def _told(announced: Sequence[Any]) -> str:
    what, number, _, training = announced
    return f"{what} (call {number}, {'train' if training else 'eval'} mode)"
