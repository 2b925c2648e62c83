"""Dtypes and devices as values that cross a cut: `device = x.device`, used in a later stage.

A device arrives as that of the stage that gets it: one process has all its tensors there.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.wire.slots import DTYPE_NAMES, DTYPES
from shoal.wire.tree import Tree, arrives_as_it_is


def crosses(tree: Tree) -> bool:
    """Whether it can be sent to a later stage, and arrives as what it is."""
    return _is_kind(tree) or arrives_as_it_is(tree)


def written(tree: Tree) -> dict[str, str] | None:
    """As a message holds it; None: it is neither."""
    if isinstance(tree, torch.dtype):
        return {"dtype": DTYPE_NAMES[tree]}
    return {"device": "of the stage"} if isinstance(tree, torch.device) else None


def read(content: dict[str, str], device: torch.device) -> Any:
    """device: of the stage that it came to."""
    return DTYPES[content["dtype"]] if "dtype" in content else device


def _is_kind(tree: Tree) -> bool:
    return isinstance(tree, torch.device) or (isinstance(tree, torch.dtype) and tree in DTYPE_NAMES)
