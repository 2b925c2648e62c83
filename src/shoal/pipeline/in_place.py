"""Steps that change what they are given, in place: no cut may come between them and who sees it.

Over a cut memory is not shared, so that the change would not be seen there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import fx

from shoal.errors import ModelError
from shoal.pipeline.graph import Graph
from shoal.pipeline.nodes import changes_in_place, is_unit
from shoal.pipeline.views import memory_roots


class _Change(NamedTuple):
    """A step changes what is used later."""

    first: int
    """The unit that makes what is changed; -1: it is an input."""
    last: int
    """The last that uses it; `len(units)` stands for the model's output."""
    fault: str
    """What to say of a cut after `first` and not after `last`."""


def _changes(graph: Graph) -> Iterator[_Change]:
    for mode in (graph.training, graph.evaluating):
        yield from _changes_in(graph, mode)


def _changes_in(graph: Graph, mode: fx.Graph) -> Iterator[_Change]:
    number = {name: i for i, name in enumerate(graph.units)}
    names = [*graph.names(), "the output"]
    told = dict(zip(graph.inputs, graph.input_names, strict=True))
    told |= dict(zip(graph.units, names, strict=False))
    roots = memory_roots(graph.model, mode.nodes)
    users = graph.users()
    for node in filter(is_unit, mode.nodes):
        if not (changes_in_place(node, graph.model) and node.all_input_nodes):
            continue
        here = number[node.name]
        changed = roots[node.name]
        own = changed & told.keys() or changed  # rather than a constant
        first = min(own, key=lambda root: number.get(root, -1))
        for value, uses in users.items():
            made_before = number.get(value, -1) < here
            later = [use for use in uses if use > here]
            if roots[value].isdisjoint(changed) or not made_before or not later:
                continue
            what = told[value]
            yield _Change(
                number.get(first, -1),
                later[-1],
                f"{names[here]} changes {what} in place, and {names[later[0]]} uses {what} "
                f"later; with a cut between them it would not see the change. {_remedy(node)} "
                f"Or cut elsewhere: not between {told.get(first, first)} and {names[later[-1]]}.",
            )


def _remedy(node: fx.Node) -> str:
    """How to write a step so that it changes nothing."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    plain = str(name).removesuffix("_")
    if node.op == "call_module" or node.kwargs.get("inplace"):
        return "Use inplace=False there."
    if hasattr(torch.Tensor, plain) or hasattr(torch.nn.functional, plain):
        return f"Use {plain} instead of {name} there, and what it gives."
    return "Make a new tensor there, with torch.where for example."


def changed_in_place(graph: Graph) -> list[tuple[int, int]]:
    """Pairs of units that must be in one stage, as the second is to see a change in place."""
    end = len(graph.units) - 1
    return sorted({(max(it.first, 0), min(it.last, end)) for it in _changes(graph)})


def check_in_place(graph: Graph, cuts: Sequence[int]) -> None:
    """Raises ModelError where a step changes what is used later, and a cut comes between."""
    faults = [it.fault for it in _changes(graph) if any(it.first < cut <= it.last for cut in cuts)]
    if faults:
        raise ModelError(list(dict.fromkeys(faults)))
