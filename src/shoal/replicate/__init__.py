"""Data parallel: the same weights on every rank, other samples, kept equal by a sync.

`replica` wraps a model, `buckets` packs its gradients, and each sync file is one way to average
a bucket over the ranks. Start with `replicate()`.
"""

from shoal.replicate.replica import Replica, replicate

__all__ = ["Replica", "replicate"]
