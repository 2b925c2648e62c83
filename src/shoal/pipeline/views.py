"""Steps that may give back the memory that they were given, and whose memory a value may share.

Nothing is believed to make new memory unless it is known to: what is changed in place is then seen
by all who may share it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import fx, nn

from shoal.pipeline.nodes import changes_in_place, is_unit

VIEWS = frozenset(
    {
        "alpha_dropout", "chunk", "contiguous", "detach", "diagonal", "double", "dropout",
        "dropout1d", "dropout2d", "dropout3d", "expand", "expand_as", "feature_alpha_dropout",
        "feature_dropout", "flatten", "float", "getattr", "getitem", "half", "identity", "movedim",
        "narrow", "permute", "ravel", "requires_grad_", "reshape", "select", "split", "squeeze",
        "swapaxes", "t", "tensor_split", "to", "transpose", "type", "unbind", "unflatten",
        "unsqueeze", "view", "view_as",
    }
)  # fmt: skip
"""Steps that may give back the memory of the first thing that they were given, and of no other."""
_VIEWING_MODULES = {name.replace("_", "") for name in VIEWS} | {"quantstub", "dequantstub"}

_MAKE_NEW = frozenset(
    {
        "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
        "adaptive_max_pool2d", "adaptive_max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
        "batch_norm", "bilinear", "concat", "concatenate", "conv1d", "conv2d", "conv3d",
        "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "cosine_similarity",
        "cross_entropy", "dim", "embedding", "embedding_bag", "gelu", "glu", "group_norm",
        "instance_norm", "interpolate", "layer_norm", "leaky_relu", "linear", "log_softmax",
        "matmul", "max", "max_pool1d", "max_pool2d", "max_pool3d", "min", "mse_loss", "nll_loss",
        "normalize", "numel", "one_hot", "outer", "pad", "rms_norm", "scaled_dot_product_attention",
        "selu", "size", "softmax", "softmin", "square", "std", "tile", "true_divide", "var",
        "where",
    }
)  # fmt: skip
"""Steps that torch puts together of others, so that their schemas do not tell, and whose result is
never what they were given."""


@functools.cache
def _makes_new(name: str) -> bool:
    """Whether what a function or method of torch gives is never what it was given."""
    if name in _MAKE_NEW:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if name in VIEWS or not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        aliases = [given.alias_info for given in schema.returns if given.alias_info is not None]
        if any(info.is_write for info in aliases):  # out=, which no step has
            continue
        if aliases or _is_put_together(f"{schema.name}.{schema.overload_name}".rstrip(".")):
            return False
    return True


def _is_put_together(overload: str) -> bool:
    """Whether it is made of other steps, and may give back what it was given without saying so."""
    if overload not in _all_of_torchs():  # one of TorchScript's, on numbers or lists
        return False
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(overload, key))


@functools.cache
def _all_of_torchs() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


def shares_with(node: fx.Node, model: nn.Module) -> list[fx.Node]:
    """The values whose memory a step may give back."""
    first = node.all_input_nodes[:1]
    if changes_in_place(node, model):
        return first
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        if not type(module).__module__.startswith("torch."):
            return node.all_input_nodes
        return first if type(module).__name__.lower() in _VIEWING_MODULES else []
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    if getattr(node.target, "__module__", "") == "_operator":
        return first if name in (*VIEWS, "pos") else []
    if name in VIEWS:
        return first
    return [] if _makes_new(name) else node.all_input_nodes


def memory_roots(model: nn.Module, nodes: Iterable[fx.Node]) -> dict[str, set[str]]:
    """Of each value: those whose memory it may share, directly or through views; or itself."""
    roots: dict[str, set[str]] = {}
    for node in nodes:
        found: set[str] = set()
        for source in shares_with(node, model) if is_unit(node) else []:
            found |= roots.get(source.name, {source.name})
        roots[node.name] = found or {node.name}
    return roots
