"""The mean of gradients over some ranks of a crew, at once, after a backward pass.

For the replicas of a pipeline's stage: their backward pass is many, one per micro-batch, so there
is none to hide the transfer behind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from shoal.crew import Crew
from shoal.errors import SettingsError
from shoal.layout import Layout
from shoal.replicate.post import GroupPost, LinkPost
from shoal.replicate.replica import SYNC_CLASSES, by_dtype
from shoal.replicate.sync import Peers, Sync
from shoal.settings import unaveraged, unknown
from shoal.wire.link import Link


def stage_averages(
    crew: Crew, num_stages: int, sync: str, link: Link | None = None
) -> StageAverages | None:
    """Between the replicas of this rank's stage; None where there is one. Every rank calls this."""
    if faults := unaveraged(sync) or unknown("--sync", sync, SYNC_CLASSES):
        raise SettingsError(faults)
    layout = Layout(replicas=crew.size // num_stages, stages=num_stages)
    if layout.replicas == 1:
        return None
    mine = None
    for stage in range(num_stages):  # torch wants every rank to take part in making each group
        ranks = layout.ranks_of_stage(stage)
        group = dist.new_group(ranks)
        if stage == layout.stage_of(crew.rank):
            mine = ranks, group
    assert mine is not None
    ranks, group = mine
    post = GroupPost() if link is None else LinkPost(link)
    peers = Peers(tuple(ranks), layout.replica_of(crew.rank), group, post)
    return StageAverages(crew, SYNC_CLASSES[sync](peers, crew.timeout_s))


class StageAverages:
    """Keeps a stage equal on all replicas."""

    def __init__(self, crew: Crew, sync: Sync) -> None:
        self._crew = crew
        self._sync = sync

    @property
    def bytes_sent(self) -> int:
        return self._sync.bytes_sent

    @torch.no_grad()
    def average(self, module: nn.Module) -> None:
        """Gradients become their means; buffers those of the first replica."""
        parameters = [p for p in module.parameters() if p.requires_grad]
        with self._crew.naming_the_lost("the averaging of gradients"):
            for group in by_dtype(parameters):
                self._average(group)
            if module.training:
                for group in by_dtype(module.buffers()):
                    self._copy_from_first(group)

    def _average(self, parameters: Sequence[torch.Tensor]) -> None:
        scale = 1.0 / self._sync.peers.size if self._sync.scales_first else 1.0
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        # Behind the gradients: which of them there are at all, on any replica.
        has = torch.tensor([float(p.grad is not None) for p in parameters])
        flat = torch.cat([*(g.reshape(-1) for g in grads), has.to(grads[0])])
        flat[: -len(has)].mul_(scale)
        self._sync.start(flat).wait()
        parts = flat[: -len(has)].split([g.numel() for g in grads])
        for parameter, part, used in zip(
            parameters, parts, flat[-len(has) :].ne(0).tolist(), strict=True
        ):
            parameter.grad = part.view(parameter.shape).clone() if used else None

    def _copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        flat = torch.cat([t.detach().reshape(-1) for t in tensors])
        dist.broadcast(flat, self._sync.peers.ranks[0], group=self._sync.peers.group)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def close(self) -> None:
        self._sync.close()
