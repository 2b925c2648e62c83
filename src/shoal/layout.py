"""How a model and a batch are laid over ranks. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A crew of `replicas` × `stages` ranks."""

    replicas: int
    stages: int = 1

    @property
    def num_ranks(self) -> int:
        return self.replicas * self.stages

    def replica_of(self, rank: int) -> int:
        """The stages of a replica are neighbours: they talk more than the replicas do."""
        return rank // self.stages

    def stage_of(self, rank: int) -> int:
        return rank % self.stages

    def ranks_of_replica(self, replica: int) -> list[int]:
        """Its stages, in order."""
        return list(range(replica * self.stages, (replica + 1) * self.stages))

    def ranks_of_stage(self, stage: int) -> list[int]:
        """That stage of every replica: the ranks with the same weights."""
        return list(range(stage, self.num_ranks, self.stages))


@dataclass(frozen=True)
class Share:
    """One rank's part of one global batch: samples [start, stop) of `total`."""

    start: int
    stop: int
    total: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def weight_over_mean(self, num_ranks: int) -> float:
        """How much this rank's mean counts in the global mean, relative to 1 / num_ranks.

        The mean over the global batch is Σ (size / total) · mean_of_rank. A sync divides by
        num_ranks; this is the factor that makes up the difference. 1.0 when shares are equal.
        """
        return self.size * num_ranks / self.total


def share(total: int, rank: int, num_ranks: int) -> Share:
    """The part of `total` samples that falls to `rank`: contiguous, sizes differ by at most one.

    The larger parts go to the lower ranks, so rank 0 is never empty unless all are.
    """
    size, extra = divmod(total, num_ranks)
    start = rank * size + min(rank, extra)
    return Share(start, start + size + (1 if rank < extra else 0), total)
