"""A worker at work: it holds one stage and does what the boss orders, until the boss leaves.

What goes wrong in an order is told to the boss, and the worker stays: it waits for the boss's
`abort`, drops what it was at, and goes on with the next order.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import psutil
import torch
from torch import nn

from shoal.boss.answers import Report, Trouble
from shoal.boss.orders import (
    Backward,
    Forward,
    Load,
    MakeOptimizer,
    Norms,
    Order,
    Place,
    Scale,
    State,
    Step,
    Times,
    TrainStep,
    ZeroGrad,
    read_order,
)
from shoal.errors import ModelError, PeerLost, WireError
from shoal.pipeline.chance import Chance
from shoal.pipeline.known import Allowed
from shoal.pipeline.losses import loss_of_part
from shoal.pipeline.lying import packed, unpacked
from shoal.pipeline.meta import materialise
from shoal.pipeline.plan import no_parameter
from shoal.pipeline.portable import unpack
from shoal.pipeline.rebuild import fill, from_data
from shoal.pipeline.routes import Port, Routes
from shoal.pipeline.runner import Runner
from shoal.pipeline.schedule import Schedule, backward_only, forward_only, make_schedule
from shoal.pipeline.stage import Arrival, Roots, Stage, arrivals_of, needing
from shoal.pipeline.timeline import Timeline
from shoal.wire.inbox import ReceiveJob
from shoal.wire.link import Job
from shoal.wire.tree import Tree, detached, tensors_of, with_tensors
from shoal.wire.zmq_link import ZmqLink

BOSS = 0
REPORT_S = 2.0
WAIT_S = 60.0
LOOK_S = 1.0
"""Between two looks whether the boss has called off what others do not take."""
"""The longest single wait; of longer ones there are several."""
DATA_TAGS = ("forward ", "backward ", "input ", "gradient ", "target ")


class _Aborted(Exception):
    """The boss has called off what we are at."""


class Hand:
    """One worker's stage. `work` returns when the boss has left, with the reason it gave."""

    def __init__(self, link: ZmqLink, allowed: Allowed, device: torch.device) -> None:
        self._link = link
        link.align()
        self._allowed = allowed
        self._device = device
        self._stage: Stage | None = None
        self._runner: Runner | None = None
        self._chance: Chance | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._loss: nn.Module | None = None
        self._arrivals: dict[tuple[int, int], list[Arrival]] = {}
        """By call and micro-batch, in the first stage: inputs whose gradients the boss wants."""
        self._outputs: dict[tuple[int, int], list[torch.Tensor]] = {}
        """In the last stage: what it gave the boss, and gets gradients for."""
        self._num_orders = 0
        self._drained = {rank: 0 for rank in range(1, link.size) if rank != link.rank}
        """By the other workers: up to which abort nothing old comes from them any more."""
        self._is_waiting = False
        """For what others send; else this worker is busy."""
        self._step = 0
        self._timeline = Timeline()
        self._abort: ReceiveJob = link.irecv(BOSS, "abort")
        self._is_over = threading.Event()

    def work(self) -> str:
        reporter = threading.Thread(target=self._report, name="shoal-report")
        reporter.start()
        try:
            while not self._abort.has_failed:
                try:
                    self._do(*self._next_order())
                except _Aborted:
                    self._recover()
                except Exception as error:
                    self._give_way(error)
                    self._recover()
        except PeerLost as lost:  # without whom nothing can be recovered
            if not self._abort.has_failed:
                return str(lost)
        finally:
            self._is_over.set()
            reporter.join()
        return self._farewell()

    # -- orders ------------------------------------------------------------------------------------

    def _next_order(self) -> tuple[Order, Tree]:
        message = self._wait(self._link.irecv(BOSS, "order"))
        self._num_orders += 1
        return read_order(message)

    def _do(self, order: Order, tensors: Tree) -> None:
        match order:
            case Place():
                self._place(order, tensors)
            case MakeOptimizer():
                self._make_optimizer(order)
            case Forward():
                self._forward(order)
            case Backward():
                self._backward(order)
            case TrainStep():
                self._train_step(order, tensors)
            case ZeroGrad():
                self._zero_grad(order)
            case Step():
                self._take_step(order)
            case Norms():
                self._send(_norms(self.stage.module, order.kind), f"norms {order.call}")
            case Scale():
                for parameter in self.stage.module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(tensors.to(self._device))
            case State():
                # Not later: the next order may change what is being sent.
                state = dict(self.stage.module.state_dict())
                self._link.send(state, BOSS, f"state {order.call}")
            case Times():
                times = [self._timeline.busy_s, self._timeline.waited_s]
                self._send(times, f"times {order.call}")
            case Load():
                self.stage.module.load_state_dict(tensors)

    @property
    def stage(self) -> Stage:
        if self._stage is None:
            raise ModelError("no stage has been placed here")
        return self._stage

    def _place(self, order: Place, tensors: Tree) -> None:
        self._stage = self._optimizer = None  # whatever happens, the one before is not wanted
        ports = [[Port(value, source) for value, source in each] for each in order.ports]
        routes = Routes(order.cuts, ports, order.num_units, order.aliases)
        module = from_data(unpack(order.module), self._allowed)
        missing = fill(module, tensors)
        if missing and order.seed is None:
            raise ModelError(f"stage {order.stage}: no values came for {', '.join(missing[:5])}")
        if order.seed is not None:
            materialise(module, order.seed, self._device)
        module.to(self._device)
        self._stage = Stage(
            routes,
            order.stage,
            module,
            inputs=order.inputs,
            makes=order.makes,
            keeps=order.keeps,
        )
        self._chance = Chance(order.stage, self._device)  # workers all have the same seed
        ranks = range(1, routes.num_stages + 1)
        self._runner = Runner(self._stage, self._link, ranks, self._timeline, self._wait)
        self._arrivals.clear()
        self._outputs.clear()

    def _make_optimizer(self, order: MakeOptimizer) -> None:
        kind = getattr(torch.optim, order.name, None)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise ModelError(f"torch.optim has no optimizer {order.name!r}")
        trainable = [p for p in self.stage.module.parameters() if p.requires_grad]
        self._optimizer = kind(trainable or [no_parameter()], **order.options)
        self._step = 0

    def _take_step(self, order: Step) -> None:
        if self._optimizer is None:
            raise ModelError("no optimizer has been made here")
        for mine, theirs in zip(self._optimizer.param_groups, order.groups or [], strict=False):
            mine.update(theirs)
        with self._timeline.span("update"):
            self._optimizer.step()
        self._step += 1

    # -- forward and backward ----------------------------------------------------------------------

    def _forward(self, order: Forward) -> None:
        self._forget(order.forget)
        self._set_mode(order.training)
        schedule = forward_only(self.stage.routes.num_stages, order.num_parts)

        def finish(number: int, output: Tree) -> None:
            tensors = tensors_of(output).values()
            needs = [order.keep and tensor.requires_grad for tensor in tensors]
            if order.keep:
                self._outputs[order.call, number] = needing(output)
            self._send([detached(output), needs], f"output {order.call} {number}")

        with torch.set_grad_enabled(order.keep):
            self._run(schedule, order.call, feed=self._feed(order.call, order.keep), finish=finish)

    def _feed(self, call: int, keep: bool) -> Callable[[int], dict[str, Tree]]:
        def feed(number: int) -> dict[str, Tree]:
            message = self._wait(self._link.irecv(BOSS, f"input {call} {number}"))
            values, arrivals = {}, []
            for name, (tree, needs) in message.items():
                values[name], found = arrivals_of(_to(tree, self._device), needs)
                arrivals += found
            if keep:
                self._arrivals[call, number] = arrivals
            return values

        return feed

    def _zero_grad(self, order: ZeroGrad) -> None:
        self.stage.module.zero_grad(order.set_to_none)

    def _backward(self, order: Backward) -> None:
        if order.zero_grad is not None:
            self._zero_grad(order.zero_grad)
        schedule = backward_only(self.stage.routes.num_stages, order.num_parts)

        def begin(number: int) -> Roots:
            gradients = self._wait(self._link.irecv(BOSS, f"gradient {order.call} {number}"))
            outputs = self._outputs.pop((order.call, number))
            pairs = zip(outputs, map(unpacked, _to(gradients, self._device)), strict=True)
            return [(output, gradient) for output, gradient in pairs if gradient is not None]

        self._run(schedule, order.call, begin=begin)
        if self.stage.number == 0:
            gradients = [
                [packed(each.gradient) for each in self._arrivals.pop((order.call, number))]
                for number in range(order.num_parts)
            ]
        if self.stage.number == 0 and order.wants_inputs:
            self._send(gradients, f"input gradient {order.call}")

    def _train_step(self, order: TrainStep, tensors: Tree) -> None:
        self._forget(order.forget)
        self._set_mode(order.training)
        stages = self.stage.routes.num_stages
        schedule = make_schedule(order.schedule, stages, len(order.weights))
        if order.loss is not None and self.stage.is_last:
            self._loss = from_data(unpack(order.loss), self._allowed)
            fill(self._loss, tensors)
            self._loss.to(self._device)
        total = torch.zeros((), device=self._device)

        def finish(number: int, output: Any) -> torch.Tensor:
            nonlocal total
            assert self._loss is not None
            target = self._wait(self._link.irecv(BOSS, f"target {order.call} {number}"))
            target, weight = _to(target, self._device), order.weights[number]
            loss = loss_of_part(self._loss, output, target, weight, order.reduction)
            total = total + loss.detach() * weight
            return loss if weight == 1.0 else loss * weight

        with torch.enable_grad():
            self._run(schedule, order.call, feed=self._feed(order.call, False), finish=finish)
        self.stage.forget(order.call)
        if self.stage.is_last:
            self._send(total, f"loss {order.call}")

    def _set_mode(self, training: bool | None) -> None:
        if training is not None:
            self.stage.module.train(training)

    def _run(self, schedule: Schedule, call: int, **how: Any) -> None:
        assert self._runner is not None
        assert self._chance is not None
        with self._chance.own():
            self._runner.run(schedule, call=call, **how)

    def _forget(self, calls: list[int]) -> None:
        for call in calls:
            self.stage.forget(call)
        for kept in (self._arrivals, self._outputs):
            for key in [key for key in kept if key[0] in calls]:
                del kept[key]

    # -- with the boss -----------------------------------------------------------------------------

    def _wait(self, job: Job | ReceiveJob) -> Tree:
        """For a message, however long: the boss knows when it is too late, and calls off."""
        if isinstance(job, ReceiveJob):
            self._wait_any(job, self._abort)
            if self._abort.is_over:
                self._link.give_up(job)
                raise _Aborted
        while not job.done():  # another worker is to take what was sent to it
            if self._abort.is_over:
                raise _Aborted
            with suppress(WireError):
                job.wait(LOOK_S)
        return job.wait(0)

    def _wait_any(self, *jobs: ReceiveJob) -> None:
        self._is_waiting = True
        try:
            while not self._link.wait_any(jobs, WAIT_S):
                continue
        finally:
            self._is_waiting = False

    def _send(self, tree: Tree, tag: str) -> None:
        self._link.isend(tree, BOSS, tag)

    def _give_way(self, error: Exception) -> None:
        """Tell the boss, and do nothing more of what it ordered: others will not do it either."""
        trouble = Trouble(
            kind=type(error).__name__,
            text=str(error),
            traceback="".join(traceback.format_exception(error)),
            is_consequence=isinstance(error, PeerLost),
        )
        with suppress(PeerLost):  # it is gone: then it will not call off either
            self._send(msgspec.to_builtins(trouble), "trouble")
        self._wait_any(self._abort)

    def _recover(self) -> None:
        """For each time that the boss has called off. It may do so again while we are at it."""
        while self._abort.is_over and not self._abort.has_failed:
            number, num_orders = self._abort.wait(0)
            self._abort = self._link.irecv(BOSS, "abort")
            with suppress(_Aborted):
                self._drop(number, num_orders)

    def _drop(self, number: int, num_orders: int) -> None:
        """What was under way here; then wait until nobody sends any of it any more.

        Others may be busy with it, however long.
        """
        while self._num_orders < num_orders:
            self._wait(self._link.irecv(BOSS, "order"))
            self._num_orders += 1
        for rank in self._drained:
            self._link.isend(number, rank, "drained")
        for rank in self._drained:
            while self._drained[rank] < number:
                self._drained[rank] = self._wait(self._link.irecv(rank, "drained"))
        self._link.discard(*DATA_TAGS)
        if self._stage is not None:
            self._stage.forget()
        self._arrivals.clear()
        self._outputs.clear()
        self._send(number, "recovered")

    def _farewell(self) -> str:
        """Why the boss is gone. Others may have gone before it."""
        try:
            self._abort.wait(0)
        except PeerLost as lost:
            return str(lost)
        raise AssertionError("the boss is there")

    def _report(self) -> None:
        """Tell the boss now and then that we are here, also while the stage computes."""
        process = psutil.Process()
        while not self._is_over.wait(REPORT_S):
            kept = 0 if self._stage is None else self._stage.num_kept
            try:
                held = process.memory_info().rss
                told = Report(held, self._step, kept, is_busy=not self._is_waiting)
                self._send(msgspec.to_builtins(told), "report")
            except (PeerLost, WireError):
                return  # whoever works notices too


def _norms(module: nn.Module, kind: float) -> dict[str, torch.Tensor]:
    return {
        name: torch.linalg.vector_norm(parameter.grad, kind)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def _to(tree: Tree, device: torch.device) -> Tree:
    return with_tensors(tree, {path: t.to(device) for path, t in tensors_of(tree).items()})
