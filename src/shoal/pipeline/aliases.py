"""Values that may be one tensor by two names: steps that may give back the very one they got.

One process adds up the gradients of a tensor in the order of all its uses, by whatever name. So the
gradients of such values go one way, from stage to stage that uses any of them (routes.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import fx, nn

from shoal.pipeline.nodes import changes_in_place, is_unit, is_unknown

_ITSELF = frozenset(
    {
        "adjoint", "alpha_dropout", "as_tensor", "asarray", "bfloat16", "cdouble", "cfloat",
        "chain_matmul", "chalf", "coalesce", "conj", "conj_physical", "contiguous", "cpu", "cuda",
        "dequantize", "double", "dropout", "dropout1d", "dropout2d", "dropout3d",
        "feature_alpha_dropout", "feature_dropout", "flatten", "float", "half", "identity",
        "pin_memory", "pos", "positive", "real", "requires_grad_", "resolve_conj", "resolve_neg",
        "sum_to_size", "to", "to_dense", "type", "type_as",
    }
)  # fmt: skip
"""Steps of torch that give back the first thing they were given where there is nothing to do."""
_ALL = frozenset({"atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "cartesian_prod"})
"""Steps that do so with several things, as a tuple or one by one."""
_MODULES = {name.replace("_", "") for name in _ITSELF}


def known_pairs(model: nn.Module, *modes: fx.Graph) -> Iterator[tuple[str, str]]:
    """A value, and another that may be its tensor by what is known of torch's steps."""
    for node in itertools.chain(*(graph.nodes for graph in modes)):
        for source in _known_to_give_back(node, model) if is_unit(node) else []:
            yield source.name, node.name


def possible_pairs(model: nn.Module, *modes: fx.Graph) -> Iterator[tuple[str, str]]:
    """The same of steps of which nothing is known: modules that are kept whole."""
    for node in itertools.chain(*(graph.nodes for graph in modes)):
        if is_unit(node) and is_unknown(node, model):
            for source in node.all_input_nodes:
                yield source.name, node.name


def joined(aliases: dict[str, str], one: str, other: str) -> dict[str, str]:
    """aliases: by value, the first of those that may be its tensor; none for one that is alone."""
    first, second = (aliases.get(name, name) for name in (one, other))
    others = {name: first for name, its in aliases.items() if its == second}
    return {**aliases, one: first, other: first, second: first, **others}


def _known_to_give_back(node: fx.Node, model: nn.Module) -> list[fx.Node]:
    """The values of which a step may give back one."""
    if changes_in_place(node, model):
        return node.all_input_nodes[:1]
    if node.op == "call_module":
        kind = type(model.get_submodule(str(node.target)))
        is_torchs = kind.__module__.startswith("torch.")
        return node.all_input_nodes[:1] if is_torchs and kind.__name__.lower() in _MODULES else []
    name = _name(node)
    if name in _ALL:
        return node.all_input_nodes
    is_of_several = name == "getitem" and _name(node.all_input_nodes[0]) in _ALL
    return node.all_input_nodes[:1] if name in _ITSELF or is_of_several else []


def _name(node: fx.Node) -> str:
    """Of a function, a method or an attribute."""
    if node.target is getattr:
        return str(node.args[1])
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
