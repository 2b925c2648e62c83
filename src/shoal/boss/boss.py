"""The boss: waits for workers, spreads a model over them, and drives it from one plain script.

with shoal.Boss(listen="tcp://0.0.0.0:1024", workers=2) as boss:
    model = boss.place(Net())
    optimizer = boss.optimizer(torch.optim.Adam, lr=3e-3)
    for x, y in loader:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from shoal.boss import answers
from shoal.boss.calls import Status, WorkerStatus
from shoal.boss.desk import Desk
from shoal.boss.hiring import hire, option_faults
from shoal.boss.losses import loss_to_data
from shoal.boss.optimizer import PlacedOptimizer
from shoal.boss.orders import Order, Place, Scale, Times, TrainStep
from shoal.boss.placed import PlacedModel
from shoal.errors import ModelError, SettingsError, WireError
from shoal.interrupts import prompt_interrupts
from shoal.pipeline import micro_batches
from shoal.pipeline.build import Model, as_module, check_stages
from shoal.pipeline.comparison import Comparison
from shoal.pipeline.graph import Graph, check_shared, cuts_at, modules_in, read
from shoal.pipeline.in_place import check_in_place
from shoal.pipeline.losses import REDUCTIONS, Loss, loss_faults, part_weights
from shoal.pipeline.meta import materialise
from shoal.pipeline.names import Names
from shoal.pipeline.partition import Costs
from shoal.pipeline.plan import Plan, name_faults, whole_number_faults
from shoal.pipeline.portable import pack, to_data
from shoal.pipeline.profile import check_shapes, choose_cuts_of_batch
from shoal.pipeline.routes import Routes, route
from shoal.pipeline.schedule import make_schedule
from shoal.pipeline.split import stage_module, values_kept, values_made
from shoal.report.waiting import waiting_line
from shoal.settings import SCHEDULES, unknown
from shoal.train.factory import factory_faults, find_factory
from shoal.wire.open_link import LinkSettings
from shoal.wire.tree import Tree

ASSUMED = Costs(seconds_per_byte=1e-9, seconds_per_message=2e-4)
"""What links between workers cost, where cuts are chosen."""
TAKEN = (
    "another model has been placed since: the workers have that one now. Place this one again, or "
    "use another boss for it."
)
CLOSED = "this boss was closed, and its workers are free: open another one."


class Boss:
    """Use it as a context manager: workers are free again when it ends."""

    def __init__(
        self,
        listen: str = "tcp://127.0.0.1:1024",
        workers: int = 2,
        *,
        key: str | None = None,
        authorized_keys: str | None = None,
        insecure: bool = False,
        timeout_s: float = 300.0,
        hung_s: float = 10.0,
        wait_s: float = float("inf"),
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """Waits for the workers, saying for whom.

        wait_s: how long at most. timeout_s: the longest wait for a result. notify: is told whom we
            wait for, instead of the terminal.
        """
        if faults := option_faults(workers, timeout_s=timeout_s, hung_s=hung_s, wait_s=wait_s):
            raise SettingsError(faults)
        self._interrupts = prompt_interrupts()
        self._interrupts.__enter__()
        self._routes: Routes | None = None
        self.modules: list[list[str]] = [[] for _ in range(workers)]
        """Of each stage: names of the model's own modules."""
        self.parameters = [0] * workers
        """Of each stage: how many numbers it trains."""
        self._model: PlacedModel | None = None
        self._optimizer: PlacedOptimizer | None = None
        self._desk: Desk | None = None
        self._wanted = workers
        self._graph: Graph | None = None
        self._comparison: Comparison | None = None
        """Of the stages with the model itself, by the first batch."""
        self._seed: int | None = None
        self._loss: Loss | None = None
        """What the last worker knows."""
        self._pending: list[Order] = []
        """Orders for when the workers have their stages."""
        try:
            self._staff = hire(
                listen,
                workers,
                LinkSettings(
                    key=key,
                    authorized_keys=authorized_keys,
                    insecure=insecure,
                    timeout_s=timeout_s,
                    hung_s=hung_s,
                ),
                self.status,
                wait_s=wait_s,
                notify=notify or on_terminal(),
            )
        except BaseException as error:
            self._interrupts.__exit__(None, None, None)
            if isinstance(error, KeyboardInterrupt):  # how we waited is of no interest
                raise error.with_traceback(None) from None
            raise
        self._desk = Desk(self._staff)

    @property
    def desk(self) -> Desk:
        if self._desk is None:
            raise WireError(CLOSED)
        return self._desk

    # -- the model ---------------------------------------------------------------------------------

    def place(
        self,
        model: Model | str,
        *,
        cuts: Sequence[str] | None = None,
        microbatches: int = 1,
        inputs: Sequence[str] | None = None,
        init: str = "local",
        seed: int = 0,
        example: Tree = None,
    ) -> PlacedModel:
        """Spread a model over the workers.

        model: an nn.Module, a list of layers, or "package.module:factory".
        cuts: modules that stages 1, 2, ... begin with. Default: where it is best, by a profile with
            the first batch (or `example`).
        inputs: names of the inputs of `forward` that come with every batch.
        init: `remote`: every worker makes the weights of its own stage; the boss never has them.
        """
        faults = whole_number_faults("microbatches=", microbatches) + name_faults("cuts=", cuts)
        if init not in ("local", "remote"):
            faults.append(f"init={init!r}: must be 'local' or 'remote'.")
        if faults:
            raise SettingsError(faults)
        made = _made(model, init, seed, example)
        graph = read(made, inputs)
        check_stages(graph, self._wanted)
        pairs = list(zip(graph.inputs, graph.input_names, strict=True))
        names = list(made.state_dict())
        num_parameters = sum(p.numel() for p in made.parameters())
        placed = PlacedModel(
            self.desk, pairs, names, num_parameters, microbatches, self._prepare, graph.values
        )
        placed.training = made.training
        found = self._cuts(graph, placed, cuts, example)
        # Until here there may be faults, and the workers have the model that they had.
        if self._model is not None:
            self._model.leave(TAKEN)
        if self._optimizer is not None:
            self._optimizer.leave("another model has been placed since, and needs one of its own")
        self._model, self._optimizer = placed, None
        self._graph, self._seed = graph, seed if init == "remote" else None
        self._routes, self._loss, self._pending = None, None, []
        if found is not None:
            self._spread(found)
        return placed

    def _cuts(
        self, graph: Graph, placed: PlacedModel, cuts: Sequence[str] | None, example: Tree
    ) -> list[int] | None:
        """Where to cut; None: that is chosen with the first batch."""
        named: dict[str, Tree] | None = None
        if example is not None:
            named = placed.named(example if isinstance(example, tuple) else (example,), {})
        if cuts is not None:
            found = cuts_at(graph, cuts, self._wanted)
            check_shared(graph, found)
            check_in_place(graph, found)
            if named is not None:
                check_shapes(graph, named, placed.parts(named))
            return found
        if self._wanted == 1:
            return []
        return None if named is None else self._choose(graph, placed, named)

    def _prepare(self, named: dict[str, Tree] | None) -> None:
        """Decide where to cut, with the inputs of a batch, unless that has been decided."""
        if self._routes is not None:
            self._compare(named)
            return
        if named is None:
            raise ModelError(
                "The cuts are chosen by a profile with the first batch, so before that no worker "
                "has a stage. Give cuts=, or example= (inputs), to boss.place()."
            )
        assert self._graph is not None
        self._spread(self._choose(self._graph, self.model, named))
        self._compare(named)

    def _compare(self, named: dict[str, Tree] | None) -> None:
        """The stages with the model itself, by the inputs of the first batch."""
        if self._comparison is not None and named is not None:
            comparison, self._comparison = self._comparison, None
            comparison.check(named, None, self.model.mode)

    def _choose(self, graph: Graph, placed: PlacedModel, named: dict[str, Tree]) -> list[int]:
        parts = placed.parts(named)
        name = "gpipe" if len(parts) > 1 else "sequential"
        schedule = make_schedule(name, self._wanted, len(parts))
        found = choose_cuts_of_batch(graph, named, parts, ASSUMED, schedule)
        check_shared(graph, found)
        check_in_place(graph, found)
        return found

    def _spread(self, cuts: list[int]) -> None:
        graph = self._graph
        assert graph is not None
        routes = route(graph, cuts)
        plan = Plan(stages=self._wanted, seed=self._seed or 0)
        self._comparison = Comparison.of(graph, routes, plan, is_here=True)
        orders, tensors = [], []
        used: set[str] = set()
        for stage in range(self._wanted):
            module = stage_module(graph, routes, stage)
            used |= set(module.state_dict())
            data, held = to_data(module)
            orders.append(
                Place(
                    stage=stage,
                    cuts=routes.cuts,
                    num_units=routes.num_units,
                    ports=[[(p.value, p.source) for p in ports] for ports in routes.ports],
                    aliases=routes.aliases,
                    inputs=list(graph.inputs),
                    makes=values_made(graph, routes, stage),
                    keeps=values_kept(graph, routes, stage),
                    module=pack(data),
                    seed=self._seed,
                )
            )
            tensors.append(held)
            self.parameters[stage] = sum(p.numel() for p in module.parameters())
        self.desk.order_each(orders, tensors)
        for order in self._pending:
            self.desk.order(order)
        self._settle()
        self.modules = [modules_in(graph, routes.units_of(s)) for s in range(self._wanted)]
        self.model.names = Names.of(graph.model, used)
        self.model.stray = self._strays(graph.model, self.model.names.strays)
        self._routes = routes
        self._graph = None  # and, after the first batch, the weights
        self._pending = []

    def _settle(self) -> None:
        """Wait until the workers have done what they were told, and hear of what went wrong.

        Else an error on one of them, in whatever came before, would have all drop it.
        """
        self.seconds()

    def _strays(self, made: nn.Module, names: list[str]) -> dict[str, torch.Tensor]:
        """What belongs to the model's state, though no step uses it: it stays here."""
        if self._seed is not None:
            materialise(made, self._seed, torch.device("cpu"), names)
        state = made.state_dict()
        return {name: state[name].detach().clone() for name in names}

    def _order(self, order: Order) -> None:
        """Now, or as soon as the workers have their stages."""
        if self._routes is None:
            self._pending.append(order)
        else:
            self.desk.order(order)

    # -- training ----------------------------------------------------------------------------------

    @property
    def model(self) -> PlacedModel:
        if self._model is None:
            raise ModelError("no model has been placed: boss.place(model) comes first.")
        return self._model

    def optimizer(self, kind: type[torch.optim.Optimizer], **options: Any) -> PlacedOptimizer:
        """Of torch.optim; on every worker one for its own parameters."""
        made = PlacedOptimizer(self._order, kind, options, self._num_aborts)
        if self._optimizer is not None:
            self._optimizer.leave("boss.optimizer() has been called since")
        self._optimizer = None  # until all workers have the new one; some may, where one fails
        if self._routes is not None:
            self._settle()
        self._optimizer = made
        return made

    def _num_aborts(self) -> int:
        """With the one that the next order would bring."""
        self.desk.mend()
        return self.desk.num_aborts

    def train_step(
        self,
        *inputs: Tree,
        loss: Loss,
        schedule: str = "1f1b",
        reduction: str = "mean",
    ) -> torch.Tensor:
        """Forward, loss on the last worker, backward and update, pipelined; returns the loss.

        inputs: those of the model, and last the target. loss: a function of
        torch.nn.functional, or a module of torch.nn.
        """
        if self._optimizer is None:
            raise ModelError("no optimizer has been made: boss.optimizer(...) comes first.")
        faults = unknown("schedule=", schedule, SCHEDULES)
        faults += unknown("reduction=", reduction, REDUCTIONS) or loss_faults(loss, reduction)
        if len(inputs) < 2:
            faults.append("train_step(x, y, loss=...): the inputs of the model, then the target.")
        if faults:
            raise SettingsError(faults)
        *given, target = inputs
        model, optimizer = self.model, self._optimizer
        named = model.named(given, {})
        self._prepare(named)
        optimizer.zero_grad()
        call = model.begin(named)
        targets = micro_batches.split(target, call.parts)
        data, held = (None, {}) if loss is self._loss else loss_to_data(loss)
        self._loss = None  # until the last worker has shown that it knows this one
        order = TrainStep(
            call=call.number,
            schedule=schedule,
            training=None if model.mode is None else True,
            weights=part_weights(loss, targets, call.parts, reduction),
            reduction=reduction,
            loss=data,
            forget=model.take_forgotten(),
        )
        last = self.desk.ranks[-1]
        with self.desk.whole():
            self.desk.order(order, [None] * (self._wanted - 1) + [held])
            model.send_inputs(call, named, keep=False)
            for number, part in enumerate(targets):
                self.desk.send(part, last, f"target {call.number} {number}")
            optimizer.step()
            result = self.desk.recv(last, f"loss {call.number}", answers.tensor)
        self._loss = loss
        return result

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of all workers so that together they have at most this norm.

        The arguments are those of torch.nn.utils.clip_grad_norm_.
        """
        total = self.model.gradient_norm(float(norm_type))
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the gradients of all workers have the norm {total.item()}: they were not clipped."
            )
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self.desk.order(Scale(), [scale] * self._wanted)
        return total

    # -- how it is going ---------------------------------------------------------------------------

    def status(self) -> Status:
        """The boss, and every worker: host, stage, device, memory, step, last seen."""
        now = time.monotonic()
        step = 0 if self._optimizer is None else self._optimizer.num_steps
        workers = []
        if self._desk is not None:
            for rank, application in enumerate(self._staff.applications, start=1):
                workers.append(
                    WorkerStatus(
                        rank=rank,
                        host=application.host,
                        pid=application.pid,
                        device=application.device,
                        memory_bytes=self._desk.memory_bytes[rank],
                        stage=rank - 1 if self._routes is not None else None,
                        modules=self.modules[rank - 1],
                        step=self._desk.steps[rank],
                        num_kept=self._desk.num_kept[rank],
                        last_seen_s=now - self._desk.seen_at[rank],
                        is_lost=self._desk.is_lost(rank),
                        is_busy=self._desk.is_busy[rank],
                    )
                )
        return Status(
            host=socket.gethostname(),
            pid=os.getpid(),
            user=getpass.getuser(),
            script=Path(sys.argv[0]).name or "python",
            step=step,
            wanted=self._wanted,
            workers=workers,
        )

    def seconds(self) -> list[tuple[float, float]]:
        """By stage: how long it has worked, and waited."""
        return self.model.ask_all("times", lambda call: Times(call=call), answers.times)

    # -- ending ------------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """Let the workers go; they wait for the next boss."""
        if self._desk is not None:
            desk, self._desk = self._desk, None
            if self._model is not None:
                self._model.leave(CLOSED)
            try:
                desk.close(error)
            finally:
                self._interrupts.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(error)


def on_terminal() -> Callable[[str], None]:
    """The line that says whom a boss waits for."""
    return waiting_line(sys.stderr)


def _made(model: Model | str, init: str, seed: int, example: Tree) -> nn.Module:
    """The model, made here or, where workers make its weights, on meta."""
    if isinstance(model, str):
        if faults := factory_faults("boss.place", model):
            raise ModelError(faults)
        model = find_factory(model)
    if init == "remote":
        if isinstance(model, nn.Module):
            raise SettingsError(
                ['init="remote" needs what makes the model, or "package.module:factory": this one '
                 "is made already."]
            )  # fmt: skip
        made = as_module(model, seed, example)
        # A stage has torch's own layers as they are, but of others only what they do: what those
        # begin with is made here.
        own = {
            f"{path}.{name}" if path else name
            for path, layer in made.named_modules()
            if not type(layer).__module__.startswith("torch.nn.")
            for name, _ in layer.named_parameters(recurse=False)
        }
        materialise(made, seed, torch.device("cpu"), own)
        return made
    if not isinstance(model, nn.Module) and callable(model):
        given = model()
        return given if isinstance(given, nn.Module) else as_module(given, example=example)
    return as_module(model, example=example)
