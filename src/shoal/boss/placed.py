"""A model whose parameters are on workers, as the boss's script sees it: an nn.Module.

loss = loss_fn(model(x), y)      forward on the workers; the output is a tensor of the boss's
loss.backward()                  its gradient goes to the last worker, and backward from there
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import nn

from shoal.boss import answers
from shoal.boss.desk import Desk
from shoal.boss.elsewhere import Elsewhere
from shoal.boss.orders import Backward, Forward, Load, Norms, Order, State, ZeroGrad
from shoal.errors import ModelError
from shoal.layout import Share
from shoal.pipeline import micro_batches
from shoal.pipeline.fixed import FixedNones, FixedValues
from shoal.pipeline.lying import packed
from shoal.pipeline.names import Names
from shoal.wire.tree import Tree, detached, tensors_of, with_tensors

T = TypeVar("T")
Prepare = Callable[[dict[str, Tree] | None], None]


class PlacedModel(Elsewhere):
    """Made by `Boss.place`. Its parameters are on the workers; here it has none."""

    def __init__(
        self,
        desk: Desk,
        inputs: Sequence[tuple[str, str]],
        names: Sequence[str],
        num_parameters: int,
        microbatches: int,
        prepare: Prepare,
        values: FixedValues,
    ) -> None:
        """inputs: each as a value of the graph, and as `forward` calls it. names: of the state.
        values: that the model was read with."""
        super().__init__()
        self.num_parameters = num_parameters
        self.stray: dict[str, torch.Tensor] = {}
        """What belongs to the state, though no step uses it."""
        self.names = Names({}, ())
        self._at: Desk | None = desk
        self._why_left = ""
        self._inputs = list(inputs)
        self._names = list(names)
        self._microbatches = microbatches
        self._prepare = prepare
        self._values, self._nones = values, FixedNones(inputs)
        self.mode: bool | None = None
        """What train() or eval() has said; None: every module is as it came."""
        self._num_calls = 0
        self._in_use: set[int] = set()
        """Numbers of calls that workers may keep something for."""
        self._forgotten: deque[int] = deque()
        self._origin = torch.zeros((), requires_grad=True)
        """What outputs depend on here, so that autograd comes to us."""

    def train(self, mode: bool = True) -> Self:
        self.mode = mode
        return super().train(mode)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """On the workers."""
        self._desk.order(ZeroGrad(set_to_none=set_to_none))

    @property
    def _desk(self) -> Desk:
        if self._at is None:
            raise ModelError(self._why_left)
        return self._at

    def _be_ready(self, named: dict[str, Tree] | None) -> None:
        """The workers have the stages of this model; named: inputs to choose the cuts with."""
        _ = self._desk  # raises, where another model has come
        self._values.check()
        if named is not None:
            self._nones.check(named)
        self._prepare(named)

    def leave(self, why: str) -> None:
        """The workers do not have it any more."""
        self._at, self._why_left = None, why

    # -- forward and backward ----------------------------------------------------------------------

    def forward(self, *args: Tree, **kwargs: Tree) -> Tree:
        named = self.named(args, kwargs)
        self._be_ready(detached(named))
        keep = torch.is_grad_enabled()
        call = self.begin(named)
        outputs: list[Tree] = []
        needs: list[bool] = []
        with self._desk.whole():
            self._desk.order(
                Forward(
                    call=call.number,
                    num_parts=len(call.parts),
                    keep=keep,
                    training=self.mode,
                    forget=self.take_forgotten(),
                )
            )
            self.send_inputs(call, named, keep)
            for number in range(len(call.parts)):
                tag = f"output {call.number} {number}"
                output, needs = self._desk.recv(self._desk.ranks[-1], tag, answers.output)
                outputs.append(output)
        output = micro_batches.join(outputs, call.parts)
        tensors = tensors_of(output)
        wanted = [path for path, need in zip(tensors, needs, strict=True) if need]
        if not keep or not wanted:
            self._forgotten.append(call.number)
            return output
        numbers = [path for path in wanted if len(call.parts) > 1 and not tensors[path].dim()]
        if numbers:  # whose gradient every micro-batch would take as its own
            raise ModelError(
                micro_batches.not_of_samples(numbers[0], "is one number, with a gradient")
            )
        wanting = [t for t in tensors_of(named).values() if t.requires_grad]
        call.wants_inputs = bool(wanting)
        made = _Remote.apply(  # type: ignore[no-untyped-call]
            call, len(wanted), self._origin, *(tensors[p] for p in wanted), *wanting
        )
        return with_tensors(output, {**tensors, **dict(zip(wanted, made, strict=True))})

    def begin(self, named: dict[str, Tree]) -> Call:
        """A new call, with its micro-batches.

        Numbers are used again: tags of messages recur with them, which makes messages cheaper.
        """
        parts = self.parts(named)
        self._desk.mend()  # or this call would count as one of those that workers drop with it
        number = next(n for n in itertools.count() if n not in self._in_use)
        self._in_use.add(number)
        return Call(self, number, parts)

    def parts(self, named: dict[str, Tree]) -> list[Share]:
        """The micro-batches of a batch. A batch that stays whole need not have samples."""
        samples = micro_batches.num_samples(named, "x") if self._microbatches > 1 else 1
        return micro_batches.shares(samples, self._microbatches, len(self._desk.ranks))

    def send_inputs(self, call: Call, named: dict[str, Tree], keep: bool) -> None:
        needs = {
            name: [keep and t.requires_grad for t in tensors_of(tree).values()]
            for name, tree in named.items()
        }
        for number, part in enumerate(micro_batches.split(detached(named), call.parts)):
            message = {name: [tree, needs[name]] for name, tree in part.items()}
            self._desk.send(message, 1, f"input {call.number} {number}")

    def take_forgotten(self) -> list[int]:
        """Calls that nobody can go backward from any more."""
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        self._in_use -= set(forgotten)
        return forgotten

    def named(self, args: Sequence[Tree], kwargs: dict[str, Tree]) -> dict[str, Tree]:
        """Inputs by the names of the graph."""
        names = [name for _, name in self._inputs]
        given = dict(zip(names, args, strict=False))
        faults = [f"{name} came twice" for name in kwargs if name in given]
        given |= kwargs
        faults += [f"{name} is missing" for name in names if name not in given]
        further = ["one more"] * (len(args) - len(names))
        further += [name for name in kwargs if name not in names]
        if further:
            faults.append(
                f"{', '.join(further)}: inputs besides those must be named when the model is "
                "placed, boss.place(model, inputs=[...])"
            )
        if faults:
            raise ModelError(f"the model takes {', '.join(names)}; {'; '.join(faults)}.")
        return {value: given[name] for value, name in self._inputs}

    # -- state -------------------------------------------------------------------------------------

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Gathered from the workers; loads into a plain model.

        destination, prefix: where this model is part of another module, whose state it is.
        """
        self._be_ready(None)
        state = self._united(self.ask_all("state", lambda call: State(call=call), answers.tensors))
        state |= {name: tensor.clone() for name, tensor in self.stray.items()}
        state = self.names.completed(state)
        if missing := [name for name in self._names if name not in state]:
            raise ModelError(f"no worker has sent {', '.join(missing[:5])}, of the model's state.")
        found = {prefix + name: state[name] for name in self._names}
        if destination is None:
            return found
        destination.update(found)
        return destination

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        missing, unexpected = self._differences(state_dict)
        faults = []
        if strict and (missing or unexpected):
            faults.append(f"state_dict: missing {missing}, not of this model {unexpected}.")
        if faults := self._load(state_dict, faults):
            raise ModelError(faults)
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As part of another module, whose load_state_dict() it is."""
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in state_dict.items()
            if name.startswith(prefix)
        }
        missing, unexpected = self._differences(own)
        missing_keys += [prefix + name for name in missing]
        unexpected_keys += [prefix + name for name in unexpected]
        error_msgs += self._load(own, [])

    def _differences(self, state: Any) -> tuple[list[str], list[str]]:
        """Names that are missing in a state, and those that are not of this model."""
        missing = [name for name in self._names if name not in state]
        return missing, [name for name in state if name not in self._names]

    def _load(self, state_dict: Any, known: list[str]) -> list[str]:
        """What is of this model; does nothing if there is a fault, and returns all.

        known: faults that have been found already.
        """
        self._be_ready(None)
        owned = self.ask_all("state", lambda call: State(call=call), answers.tensors)
        mine = self._united([*owned, self.stray])
        faults = known + [
            f"state_dict: {name} is {tuple(mine[name].shape)} in this model, and came as "
            f"{tuple(state_dict[name].shape)}."
            for name in mine
            if name in state_dict and state_dict[name].shape != mine[name].shape
        ]
        if faults:
            return faults
        state_dict = self.names.completed(self.names.last(state_dict))
        # Waits until all has gone: the caller's tensors may change after this.
        self._desk.order_each(
            [Load()] * len(owned),
            [{name: state_dict.get(name, part[name]) for name in part} for part in owned],
        )
        for name, tensor in self.stray.items():
            tensor.copy_(state_dict.get(name, tensor))
        return []

    def gradient_norm(self, kind: float) -> torch.Tensor:
        """Of all parameters together, put together in their order, as one process does."""
        parts = self.ask_all("norms", lambda call: Norms(call=call, kind=kind), answers.tensors)
        norms = self._united(parts)
        if not norms:
            return torch.zeros(())
        order = [name for name in self._names if name in norms]
        stacked = torch.stack([norms[name] for name in order])
        total: torch.Tensor = torch.linalg.vector_norm(stacked, kind)
        return total

    def ask_all(
        self, what: str, order: Callable[[int], Order], read: Callable[[Tree], T]
    ) -> list[T]:
        """What every worker answers, by stage."""
        self._num_calls += 1
        tag = f"{what} {self._num_calls}"
        with self._desk.whole():
            self._desk.order(order(self._num_calls))
            return [self._desk.recv(rank, tag, read) for rank in self._desk.ranks]

    @staticmethod
    def _united(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: tensor for part in parts for name, tensor in part.items()}


class Call:
    """One forward pass. When nobody can go backward from it any more, workers may forget it."""

    def __init__(self, model: PlacedModel, number: int, parts: list[Share]) -> None:
        self.model = model
        self.number = number
        self.parts = parts
        self.wants_inputs = False
        """Whether gradients of inputs are waited for."""
        self._is_over = False
        self._num_aborts = model._desk.num_aborts
        self._forget = weakref.finalize(self, model._forgotten.append, number)
        self._forget.atexit = False

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Of the outputs; returns those of the inputs that wanted one."""
        if self._is_over:
            raise RuntimeError(
                "backward() a second time through the same forward pass: the workers have freed "
                "what it needed. Call the model again."
            )
        desk = self.model._desk
        if self._num_aborts != desk.num_aborts:
            raise RuntimeError(
                "backward() through a forward pass from before an error on a worker, or before a "
                "call that was cut off: the workers have dropped what it needed. Call the model "
                "again."
            )
        self._is_over = True
        self._forget.detach()
        self.model._in_use.discard(self.number)
        with desk.whole():
            received = self._send_backward(desk, gradients)
        return [_joined(of_input) for of_input in zip(*received, strict=True)]

    def _send_backward(
        self, desk: Desk, gradients: Sequence[torch.Tensor | None]
    ) -> list[list[torch.Tensor | None]]:
        """Returns the gradients of the inputs, of each micro-batch, where they are wanted."""
        desk.order(
            Backward(call=self.number, num_parts=len(self.parts), wants_inputs=self.wants_inputs)
        )
        # Nobody waits for it, where no gradients come back: a copy, since the caller may go on.
        given = [g if g is None or self.wants_inputs else g.clone() for g in gradients]
        for number, part in enumerate(self.parts):
            whole = len(self.parts) == 1
            cut = [g if g is None or whole else g[part.start : part.stop] for g in given]
            desk.send([packed(g) for g in cut], desk.ranks[-1], f"gradient {self.number} {number}")
        if not self.wants_inputs:
            return []
        return desk.recv(1, f"input gradient {self.number}", answers.gradients)


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    if len(parts) == 1 or not present:
        return parts[0]
    if not present[0].dim():  # a number, which every micro-batch had
        return torch.stack(present).sum()
    return torch.cat(present)


class _Remote(torch.autograd.Function):
    """Joins the boss's graph with what the workers keep."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, count: int, origin: torch.Tensor, *tensors: torch.Tensor
    ) -> Any:
        ctx.call, ctx.count = call, count
        ctx.set_materialize_grads(False)
        return tuple(_no_view(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():  # what comes of this would be taken for a constant
            raise RuntimeError(
                "create_graph=True: a placed model is differentiated once, since its workers keep "
                "nothing for gradients of gradients. Leave it out, or use a plain model there."
            )
        of_inputs = ctx.call.backward(gradients)
        return (None, None, None, *[None] * ctx.count, *of_inputs)


def _no_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor of its own: a view could not be changed in place, out += 1."""
    memory, start = tensor.untyped_storage(), tensor.storage_offset()
    return tensor.new_empty(0).set_(memory, start, tensor.shape, tensor.stride())
