"""A batch cut into micro-batches, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from shoal.errors import ModelError
from shoal.layout import Share, share
from shoal.wire.tree import Tree, tensors_of, with_tensors


def num_samples(batch: Tree, what: str) -> int:
    """How many samples a batch has: the first extent of its tensors, which must be the same."""
    tensors = tensors_of(batch)
    sizes = {len(t) for t in tensors.values() if t.dim()}
    if len(sizes) != 1:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors.values()) or "no tensor"
        raise ModelError(
            f"{what}: the tensors of a batch must have the same number of samples, in their first "
            f"dimension; got {shapes}."
        )
    return sizes.pop()


def shares(total: int, num_parts: int, num_stages: int = 1) -> list[Share]:
    """Of at most `num_parts` micro-batches, each with at least one sample.

    While the first one is on its way to the last stage, and the last one back, others have nothing
    to do; so in a pipeline these two are smaller, 1 - 1 / num_stages of the rest: with few
    micro-batches a step is about 5 % shorter, whether backwards take as long as forwards or twice.
    But not of one sample, where all could have two: batch norm cannot train on one.
    """
    count = max(1, min(total, num_parts))
    even = [share(total, part, count) for part in range(count)]
    if num_stages == 1 or count < 3 or total < count * num_stages:
        return even
    weights = [num_stages - 1, *[num_stages] * (count - 2), num_stages - 1]
    ends = [round(total * end / sum(weights)) for end in accumulate(weights, initial=0)]
    parts = [Share(start, stop, total) for start, stop in pairwise(ends)]
    return parts if min(parts[0].size, parts[-1].size) > 1 else even


def split(batch: Tree, parts: Sequence[Share]) -> list[Tree]:
    """Tensors are cut along their first dimension; all else goes into every part."""
    if len(parts) == 1:
        return [batch]
    tensors = tensors_of(batch)
    return [
        with_tensors(
            batch,
            {path: t[part.start : part.stop] if t.dim() else t for path, t in tensors.items()},
        )
        for part in parts
    ]


def join(outputs: Sequence[Tree]) -> Tree:
    """What the model gave for each part, as if it had been given for the whole."""
    if len(outputs) == 1:
        return outputs[0]
    by_part = [tensors_of(output) for output in outputs]
    whole = {
        path: torch.cat([tensors[path] for tensors in by_part]) if tensor.dim() else tensor
        for path, tensor in by_part[0].items()
    }
    return with_tensors(outputs[0], whole)
