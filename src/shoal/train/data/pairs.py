"""Images and their labels: two files that must agree with each other."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import DataError
from shoal.train.data import idx

IMAGE_SHAPE = (28, 28)
NUM_CLASSES = 10


def faults(images: Path, labels: Path) -> list[str]:
    """Everything wrong with the two, each alone and both together, without keeping the images."""
    found: list[str] = []
    num_images: int | None = None
    try:
        num_images = idx.check(images, IMAGE_SHAPE)[0]
    except DataError as err:
        found.append(str(err))
    try:
        values = idx.read(labels, ())
    except DataError as err:
        found.append(str(err))
    else:
        found += _disagreements(images, labels, num_images, values)
    return found


def read(images: Path, labels: Path) -> tuple[idx.Bytes, idx.Bytes]:
    """The images (n, 28, 28) and the labels (n,); DataError on everything that `faults` finds."""
    pixels, values = idx.read(images, IMAGE_SHAPE), idx.read(labels, ())
    found = _disagreements(images, labels, len(pixels), values)
    if found:
        raise DataError("\n".join(found))
    return pixels, values


def _disagreements(
    images: Path, labels: Path, num_images: int | None, values: idx.Bytes
) -> list[str]:
    found: list[str] = []
    if num_images == 0:
        found.append(f"{images}: expected images, the file holds none. Is it the right file?")
    if num_images is not None and num_images != len(values):
        found.append(
            f"{labels}: expected {num_images:,} labels, one for each image of {images.name}, "
            f"got {len(values):,}. Are both files of the same set?"
        )
    # Unseen here, a label out of range would surface as an index error deep inside the loss.
    if len(values) and values.max() >= NUM_CLASSES:
        found.append(
            f"{labels}: expected labels from 0 to {NUM_CLASSES - 1}, got {values.max()}. "
            "Is it the right file?"
        )
    return found
