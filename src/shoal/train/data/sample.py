"""5,000 images of MNIST inside the package (see NOTICE): a first run needs no network."""

from __future__ import annotations

import zipfile
import zlib
from importlib import resources

import numpy as np

from shoal.errors import DataError
from shoal.train.data.idx import Bytes

FILE_NAME = "mnist_sample.npz"
NUM_TRAIN = 4_000
NUM_TEST = 1_000


def read() -> tuple[tuple[Bytes, Bytes], tuple[Bytes, Bytes]]:
    """(images, labels) to train on and to test with.

    The file is stored in this order, shuffled and with every digit equally often in both parts.
    """
    place = resources.files(__package__) / FILE_NAME
    try:
        with place.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            images: Bytes = stored["images"]
            labels: Bytes = stored["labels"]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as err:
        raise DataError(
            f"{place}: expected the sample that comes with shoal, cannot read it ({err}). "
            "Install shoal again."
        ) from err
    return (images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])
