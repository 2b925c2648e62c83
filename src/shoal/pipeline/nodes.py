"""Steps of a model that was read, one by one: what each is, where it stands, what it may change."""

from __future__ import annotations

from torch import fx, nn

from shoal.pipeline.unseen import Line

LINE, INSIDE = "shoal_line", "shoal_inside"
"""Of a step: where in the user's file it is taken, and in which module's forward()."""
OPERATORS_IN_PLACE = (
    "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow",
    "iand", "ior", "ixor", "ilshift", "irshift",
)  # fmt: skip
_NO_USERS = ("torch", "_operator", "builtins", "math")


def inside(node: fx.Node) -> str:
    """The module in whose forward a step is; nothing: the model's own."""
    return str(node.meta.get(INSIDE, ""))


def line_of(node: fx.Node) -> str:
    """Where in the user's own file a step is, as a line of a message; may be nothing."""
    line: Line | None = node.meta.get(LINE)
    return f"\n  {line}" if line else ""


def is_of_the_users(node: fx.Node) -> bool:
    """A function that torch.fx.wrap keeps from being read: it may do more than give something."""
    module = str(getattr(node.target, "__module__", None) or "torch")
    return node.op == "call_function" and module.split(".")[0] not in _NO_USERS


def is_unknown(node: fx.Node, model: nn.Module) -> bool:
    """Whether nobody knows what a step does to memory: it is the user's, and was not read."""
    if node.op == "call_module":
        kind = type(model.get_submodule(str(node.target)))
        return kind.__module__.split(".")[0] not in _NO_USERS
    return is_of_the_users(node)


def is_unit(node: fx.Node) -> bool:
    """Whether it is a step of the computation, not an input, a constant or the output."""
    return node.op in ("call_module", "call_function", "call_method")


def changes_in_place(node: fx.Node, model: nn.Module) -> bool:
    """Whether a step overwrites its input, as ReLU(inplace=True) does."""
    target = node.target
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(target)), "inplace", False))
    if node.op not in ("call_method", "call_function"):
        return False
    if getattr(target, "__module__", "") == "_operator":
        return getattr(target, "__name__", "") in OPERATORS_IN_PLACE
    name = str(target) if node.op == "call_method" else getattr(target, "__name__", "")
    if name == "requires_grad_":  # which leaves the values as they are
        return False
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return True
    return bool(node.kwargs.get("inplace"))
