"""Where MNIST and Fashion-MNIST may lie: the names of their files, and the places to look.

A folder that the user points at is the only place looked at: what was meant is never replaced.
Without one, the system's package (Debian has Fashion-MNIST); what is not there, `obtain` brings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import DataError
from shoal.train.data import pairs
from shoal.train.data.pairs import IMAGE_SHAPE


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One of a source's files."""

    name: str
    """The usual name, without `.gz`."""
    shape: tuple[int, ...]
    """What the published file holds. (A user's own folder may hold another number of images.)"""
    sha256: str
    """Of the unpacked bytes: mirrors pack the same bytes differently."""

    @property
    def size_bytes(self) -> int:
        """Unpacked: magic, one number a dimension, payload."""
        return 4 + 4 * len(self.shape) + math.prod(self.shape)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Names the file goes by. Plain before gzip, as it costs nothing to check."""
        dotted = self.name.replace("-idx", ".idx")
        return (self.name, dotted, f"{self.name}.gz", f"{dotted}.gz")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set in four files, and where they may be had."""

    name: str
    files: tuple[SourceFile, SourceFile, SourceFile, SourceFile]
    """Images and labels to train on, images and labels to test with."""
    subfolders: tuple[str, ...] = ()
    """Places inside a user's folder, as other tools lay them out."""
    system_dir: Path | None = None
    """Where the system's package puts the files."""
    mirrors: tuple[str, ...] = ()
    """Addresses that end in a slash; `<file name>.gz` is appended. Tried in this order."""


Paths = tuple[Path, Path, Path, Path]
"""In the order of Source.files."""


def _four(
    train_images: str, train_labels: str, test_images: str, test_labels: str
) -> tuple[SourceFile, SourceFile, SourceFile, SourceFile]:
    # Both sets share names and shapes: that is what makes one a drop-in for the other.
    return (
        SourceFile(
            name="train-images-idx3-ubyte", shape=(60_000, *IMAGE_SHAPE), sha256=train_images
        ),
        SourceFile(name="train-labels-idx1-ubyte", shape=(60_000,), sha256=train_labels),
        SourceFile(name="t10k-images-idx3-ubyte", shape=(10_000, *IMAGE_SHAPE), sha256=test_images),
        SourceFile(name="t10k-labels-idx1-ubyte", shape=(10_000,), sha256=test_labels),
    )


MNIST = Source(
    name="mnist",
    # `zcat FILE | sha256sum` of the four usual files.
    files=_four(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    subfolders=("mnist", "MNIST/raw"),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
)

FASHION_MNIST = Source(
    name="fashion-mnist",
    # `zcat FILE | sha256sum` of the files in Debian's package dataset-fashion-mnist
    # (0.0~git20200523.55506a9-1), which is zalandoresearch/fashion-mnist at commit 55506a9.
    files=_four(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    subfolders=("fashion-mnist", "FashionMNIST/raw"),
    system_dir=Path("/usr/share/datasets/fashion-mnist"),
    mirrors=(
        # Plain http is the only way this host speaks; the sha256 is what makes it safe.
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
)

SOURCES: dict[str, Source] = {source.name: source for source in (MNIST, FASHION_MNIST)}


def locate(source: Source, data_dir: Path | None) -> Paths | None:
    """The four files in the user's folder or the system's; None if the cache must have them.

    DataError if `data_dir` is given and they are not in it. The files are found, not yet checked.
    """
    try:
        if data_dir is not None:
            return _in_data_dir(source, data_dir)
        if source.system_dir is not None:
            return _whole(source, source.system_dir)
    except OSError as err:
        raise DataError(f"data folder {err.filename}: no way to look into it ({err}).") from err
    return None


def faults(paths: Paths) -> list[str]:
    """Everything wrong with the four files: cut short, not IDX, labels that do not fit."""
    train_images, train_labels, test_images, test_labels = paths
    return pairs.faults(train_images, train_labels) + pairs.faults(test_images, test_labels)


def _in_data_dir(source: Source, data_dir: Path) -> Paths:
    if not data_dir.is_dir():
        what = "it is not a folder" if data_dir.exists() else "there is no such folder"
        raise DataError(f"data folder {data_dir}: {what}. Check the path given as --data-dir.")
    # The set's own subfolder first: a folder may hold MNIST itself and Fashion-MNIST below.
    folders = [data_dir / sub for sub in source.subfolders] + [data_dir]
    for folder in folders:
        there = _whole(source, folder)
        if there is not None:
            return there
    # Nowhere all four: say what is missing in the folder that comes nearest.
    nearest = min(folders[::-1], key=lambda folder: len(_missing(source, folder)))
    names = ", ".join(f"{file.name}[.gz]" for file in _missing(source, nearest))
    looked = ", ".join(str(folder) for folder in folders[::-1])
    raise DataError(
        f"data folder {data_dir}: {source.name} needs four files, missing in {nearest}: {names} "
        f"(looked in {looked}). Put them there, or leave out --data-dir to download them."
    )


def _whole(source: Source, folder: Path) -> Paths | None:
    first, second, third, fourth = (_one(file, folder) for file in source.files)
    # All four from one folder, never a mixture of two sets.
    if first is None or second is None or third is None or fourth is None:
        return None
    return (first, second, third, fourth)


def _missing(source: Source, folder: Path) -> Sequence[SourceFile]:
    return [file for file in source.files if _one(file, folder) is None]


def _one(file: SourceFile, folder: Path) -> Path | None:
    paths = (folder / spelling for spelling in file.spellings)
    return next((path for path in paths if path.is_file()), None)
