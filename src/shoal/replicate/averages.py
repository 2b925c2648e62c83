"""The mean of gradients over some ranks of a crew, at once, after a backward pass.

For the replicas of a pipeline's stage: their backward pass is many, one per micro-batch, so there
is none to hide the transfer behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.crew import Crew
from shoal.errors import SettingsError
from shoal.layout import Layout
from shoal.replicate.drift import check_no_drift
from shoal.replicate.post import GroupPost, LinkPost
from shoal.replicate.replica import SYNC_CLASSES, by_dtype
from shoal.replicate.sync import Peers, Sync
from shoal.settings import SYNCS, unknown
from shoal.wire.link import Link


def stage_averages(
    crew: Crew, num_stages: int, sync: str, link: Link | None = None
) -> StageAverages | None:
    """Between the replicas of this rank's stage; None where there is one. Every rank calls this."""
    if faults := unknown("sync=", sync, SYNCS):
        raise SettingsError(faults)
    layout = Layout(replicas=crew.size // num_stages, stages=num_stages)
    if layout.replicas == 1:
        return None
    mine = None
    for stage in range(num_stages):  # torch wants every rank to take part in making each group
        ranks = layout.ranks_of_stage(stage)
        group = dist.new_group(ranks, timeout=timedelta(seconds=crew.timeout_s))
        if stage == layout.stage_of(crew.rank):
            mine = ranks, group
    assert mine is not None
    ranks, group = mine
    post = GroupPost() if link is None else LinkPost(link)
    peers = Peers(tuple(ranks), layout.replica_of(crew.rank), group, post)
    if sync == "ddp":
        return DdpAverages(crew, peers)
    return SyncAverages(crew, peers, SYNC_CLASSES[sync](peers, crew.timeout_s))


class StageAverages(ABC):
    """Keeps a stage equal on all replicas."""

    def __init__(self, crew: Crew, peers: Peers) -> None:
        self._crew = crew
        self._peers = peers
        self._is_under_way = False
        """Or was left in the midst of it."""

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Payload of gradients that this rank has sent so far."""

    def check(self, model: nn.Module) -> None:
        """Raises ModelError where replicas of the whole model would not stay equal."""
        check_no_drift(model)

    @torch.no_grad()
    def average(self, module: nn.Module) -> None:
        """Gradients become their means; buffers those of the first replica."""
        parameters = [p for p in module.parameters() if p.requires_grad]
        self._is_under_way = True
        with self._crew.naming_the_lost("the averaging of gradients"):
            rows = [(p, self._rows_anywhere(p)) for p in _sparse(module) if p.requires_grad]
            for parameter in parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
            if parameters:
                self._average(parameters)
            for parameter, mine in rows:
                _keep_rows(parameter, mine)
            if module.training:
                for group in by_dtype(module.buffers()):
                    self._copy_from_first(group)
        self._is_under_way = False

    @abstractmethod
    def _average(self, parameters: list[nn.Parameter]) -> None: ...

    def _rows_anywhere(self, parameter: nn.Parameter) -> torch.Tensor:
        """Of a sparse gradient: the rows that it has on any replica."""
        has = torch.zeros(len(parameter), dtype=torch.uint8, device=parameter.device)
        if parameter.grad is not None and parameter.grad.is_sparse:
            has[parameter.grad.coalesce().indices()[0]] = 1
        dist.all_reduce(has, dist.ReduceOp.MAX, group=self._peers.group)
        return has.nonzero()[:, 0]

    def _copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        flat = torch.cat([t.detach().reshape(-1) for t in tensors])
        dist.broadcast(flat, self._peers.ranks[0], group=self._peers.group)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def close(self) -> None:  # noqa: B027 (a choice: not every way holds something)
        """Give back what is held by this rank alone."""

    def leave(self) -> None:
        """Give back the connections, too, while the crew goes on.

        Not after an error in the midst of averaging: gloo would wait for what is under way.
        """
        self.close()
        if not self._is_under_way and dist.is_initialized():
            dist.destroy_process_group(self._peers.group)
        self._is_under_way = True  # so that it is done once


def _sparse(module: nn.Module) -> list[nn.Parameter]:
    """Those of tables whose gradients are sparse. Each replica knows, though it may have none."""
    tables = [each for each in module.modules() if getattr(each, "sparse", False) is True]
    return list(dict.fromkeys(p for table in tables for p in table.parameters(recurse=False)))


def _keep_rows(parameter: nn.Parameter, rows: torch.Tensor) -> None:
    """Make a gradient sparse again: optimizers leave alone what is not in it."""
    if parameter.grad is not None:
        parameter.grad = torch.sparse_coo_tensor(
            rows[None], parameter.grad[rows], parameter.shape, check_invariants=False
        )


class SyncAverages(StageAverages):
    """By one of our own syncs, all gradients of a dtype in one buffer."""

    def __init__(self, crew: Crew, peers: Peers, sync: Sync) -> None:
        super().__init__(crew, peers)
        self._sync = sync
        self._scale = 1.0 / peers.size if sync.scales_first else 1.0

    @property
    def bytes_sent(self) -> int:
        return self._sync.bytes_sent

    def _average(self, parameters: list[nn.Parameter]) -> None:
        for group in by_dtype(parameters):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
            # Behind the gradients: which of them there are at all, on any replica.
            has = torch.tensor([float(p.grad is not None) for p in group])
            flat = torch.cat([*(g.reshape(-1) for g in grads), has.to(grads[0])])
            flat[: -len(has)].mul_(self._scale)
            self._sync.start(flat).wait()
            means = flat[: -len(has)].split([g.numel() for g in grads])
            used = flat[-len(has) :].ne(0).tolist()
            for parameter, mean, is_used in zip(group, means, used, strict=True):
                parameter.grad = mean.view(parameter.shape) if is_used else None

    def close(self) -> None:
        self._sync.close()


class DdpAverages(StageAverages):
    """By torch's DistributedDataParallel.

    It averages what one backward pass makes, and a pipeline's step has many. So there is one more:
    of Σ p·g, of which the gradient with respect to p is the g that is to be averaged.
    """

    def __init__(self, crew: Crew, peers: Peers) -> None:
        super().__init__(crew, peers)
        self._ddp: DistributedDataParallel | None = None
        self._bytes_sent = 0

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent

    def _average(self, parameters: list[nn.Parameter]) -> None:
        if self._ddp is None:
            self._ddp = DistributedDataParallel(
                _Products(parameters),
                process_group=self._peers.group,
                init_sync=False,
                find_unused_parameters=True,
            )
        gradients = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad():
            self._ddp(gradients).backward()
        n = self._peers.size
        self._bytes_sent += 2 * (n - 1) * sum(p.nbytes for p in parameters) // n  # gloo's ring

    def leave(self) -> None:
        self._ddp = None  # which has the group
        super().leave()


class _Products(nn.Module):
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.own = nn.ParameterList(parameters)
        # DDP speaks with its peers when gradients come; a replica may have none, and others some.
        self.always = nn.Parameter(torch.zeros((), device=parameters[0].device))

    def forward(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        total = self.always * 1.0
        for parameter, gradient in zip(self.own, gradients, strict=True):
            if gradient is not None:
                total = total + (parameter * gradient).sum()
        return total
