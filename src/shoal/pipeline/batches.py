"""What a pipeline makes of a batch: inputs by name, and the micro-batches that it is cut into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shoal.errors import ModelError
from shoal.layout import Share
from shoal.pipeline import micro_batches
from shoal.pipeline.fixed import FixedNones
from shoal.pipeline.plan import Plan
from shoal.settings import kind_of
from shoal.wire.tree import Tree


class Batches:
    """Of one model and one plan."""

    def __init__(self, inputs: Sequence[tuple[str, str]], plan: Plan) -> None:
        """inputs: each as a value of the graph, and as `forward` calls it."""
        self._inputs = inputs
        in_turns = plan.schedule == "sequential"
        self._num_parts = 1 if in_turns else plan.microbatches
        self._num_stages = 1 if in_turns else plan.stages
        self._nones = FixedNones(inputs)

    def parts(self, samples: int) -> list[Share]:
        """The micro-batches of a batch of so many samples."""
        return micro_batches.shares(samples, self._num_parts, self._num_stages)

    def inputs(self, x: Tree) -> tuple[dict[str, Tree], list[Share]]:
        """The inputs of a batch, by value, and its micro-batches."""
        named = self._named(x)
        self._nones.check(named)
        return named, self.parts(micro_batches.num_samples(named, "x"))

    def targets(self, y: Tree, parts: Sequence[Share]) -> list[Tree]:
        """Of each micro-batch."""
        if y is None:
            raise ModelError(
                "y is None on the rank of the last stage, where the loss is made. For a loss that "
                "needs no target, give any tensor with as many samples, such as x."
            )
        samples = micro_batches.num_samples(y, "y")
        if samples != parts[0].total:
            raise ModelError(
                f"y has {samples} samples, x has {parts[0].total}: they must be of one batch."
            )
        return micro_batches.split(y, parts)

    @contextmanager
    def explaining(self, x: Tree) -> Iterator[None]:
        """Faults that come of several inputs where the model takes one, or of one that is None."""
        try:
            yield
        except ModelError as error:
            if nones := self._nones_in(x):
                raise ModelError(
                    f"{error}\nx: {' and '.join(nones)} is None here, and what comes with every "
                    "batch is read as a tensor. If it is always None, let it have that as its "
                    "default in forward(), and leave it out of the batch and of inputs=[...]."
                ) from None
            if len(self._inputs) > 1 or not isinstance(x, tuple | dict):
                raise
            (_, name), kind = self._inputs[0], type(x).__name__
            raise ModelError(
                f"{error}\nx is a {kind} of {len(x)} here, and all of it is the input {name!r}. If "
                "these are inputs of forward() that have defaults, name them: inputs=[...]."
            ) from None

    def _nones_in(self, x: Tree) -> list[str]:
        """Inputs that are None in this batch, as `forward` calls them."""
        try:
            named = self._named(x)
        except ModelError:  # it is not made of the inputs at all
            return []
        return [name for value, name in self._inputs if named[value] is None]

    def _named(self, x: Tree) -> dict[str, Tree]:
        names = [name for _, name in self._inputs]
        if isinstance(x, dict) and set(x) == set(names):
            return {value: x[name] for value, name in self._inputs}
        if isinstance(x, tuple | list) and len(x) == len(names) and not _is_one_list(x):
            return {value: each for (value, _), each in zip(self._inputs, x, strict=True)}
        if len(names) == 1 and x is not None:
            return {self._inputs[0][0]: x}
        got = "nothing" if x is None else kind_of(x)
        if isinstance(x, dict | tuple | list):
            got += f" of {len(x)}"
        raise ModelError(f"x: the model takes {', '.join(names)}; got {got}.")


def _is_one_list(x: Tree) -> bool:
    """A list of one: the input itself, where the model takes a list of tensors."""
    return isinstance(x, list) and len(x) == 1
