"""Which models there are and what they take. Imports no torch: the launcher reads this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelEntry:
    factory: str
    """Name in the zoo module."""
    input_shape: tuple[int, ...]
    """Of one sample."""
    num_steps: int
    """As a pipeline reads it: no more stages than that."""


MODELS = {
    "mnist-cnn": ModelEntry("MnistCnn", (1, 28, 28), 13),
    "convnet": ModelEntry("ConvNet", (1, 28, 28), 10),
    "tutorial-cnn": ModelEntry("TutorialCnn", (1, 28, 28), 12),
    "residual-mlp": ModelEntry("ResidualMlp", (1,), 11),
}
