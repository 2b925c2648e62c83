"""Weights on disk: safetensors, which loads into the plain model and can execute nothing."""

from __future__ import annotations

import errno
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Every entry of the state dict, whole; tied weights are written once for each name."""
    state = {k: v.detach().cpu().contiguous().clone() for k, v in weights.items()}
    try:
        save_file(state, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it wraps the system's error in a text
        full = "No space left" in str(error) or "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error
