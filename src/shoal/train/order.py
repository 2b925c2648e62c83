"""The order of the samples: a pure function of (seed, epoch), whatever the layout.

The global batch of step s is `order[s * batch_size : (s + 1) * batch_size]`; each replica takes
its share of that (layout.share). Nothing here knows how many ranks there are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def sample_order(num_samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """A permutation. Made from raw bits and a stable sort, which no numpy release may change."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    return np.argsort(bits.random_raw(num_samples), kind="stable")
