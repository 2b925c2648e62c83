"""Steps that may give back the memory that they were given, and whose memory a value may share."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx, nn

from shoal.pipeline.trace import changes_in_place, is_unit

VIEWS = frozenset(
    {
        "alpha_dropout", "chunk", "contiguous", "detach", "diagonal", "double", "dropout",
        "dropout1d", "dropout2d", "dropout3d", "expand", "expand_as", "feature_dropout",
        "flatten", "float", "getattr", "getitem", "half", "identity", "movedim", "narrow",
        "permute", "ravel", "reshape", "select", "split", "squeeze", "swapaxes", "t",
        "tensor_split", "to", "transpose", "type", "unbind", "unflatten", "unsqueeze", "view",
        "view_as",
    }
)  # fmt: skip
"""Steps that may give back the memory that they were given."""


def _may_alias(node: fx.Node, model: nn.Module) -> bool:
    if changes_in_place(node, model):
        return True
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        own = not type(module).__module__.startswith("torch.")
        return own or type(module).__name__.lower() in VIEWS
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return str(name) in VIEWS


def memory_roots(model: nn.Module, nodes: Iterable[fx.Node]) -> dict[str, str]:
    """Of each value: the one whose memory it may share, directly or through views."""
    roots: dict[str, str] = {}
    for node in nodes:
        sources = node.all_input_nodes[:1]
        if sources and is_unit(node) and _may_alias(node, model):
            roots[node.name] = roots.get(sources[0].name, sources[0].name)
        else:
            roots[node.name] = node.name
    return roots
