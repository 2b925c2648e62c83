"""A model that is kept equal on every rank.

    model = replicate(Net(), crew, sync="ring")
    loss = loss_fn(model(x), y); loss.backward()     # now every rank has the mean gradient

The mean is over *samples*: where the crew's loader gave this rank more or fewer samples than its
peers, its gradient counts accordingly. Buffers (batch norm's statistics) are those of rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from shoal.crew import Crew
from shoal.errors import SettingsError, SyncError
from shoal.replicate.all_reduce import AllReduce
from shoal.replicate.central import Central
from shoal.replicate.drift import check_no_drift
from shoal.replicate.post import GroupPost, LinkPost
from shoal.replicate.reducer import Reducer
from shoal.replicate.ring import Ring
from shoal.replicate.serial_ring import SerialRing
from shoal.replicate.sync import Peers, Sync
from shoal.settings import SYNCS, link_faults, unknown
from shoal.wire.link import Link

SYNC_CLASSES: dict[str, type[Sync]] = {
    cls.name: cls for cls in (AllReduce, Central, Ring, SerialRing)
}
BUCKET_BYTES = 4 * 2**20


def replicate(
    module: nn.Module,
    crew: Crew,
    sync: str = "all-reduce",
    bucket_bytes: int = BUCKET_BYTES,
    link: Link | None = None,
) -> Replica:
    """Wrap `module`, made equal to rank 0's, so that backward passes average its gradients.

    link: what `ring` and `serial-ring` send over, instead of torch.distributed.
    """
    faults = unknown("sync=", sync, SYNCS) or link_faults(sync, link is not None, "sync=")
    if faults:
        raise SettingsError(faults)
    module.to(crew.device)
    crew.agree("sync= of replicate()", sync)
    crew.agree("bucket_bytes= of replicate()", bucket_bytes)
    _same_everywhere(module, crew)
    if crew.size == 1:
        return Replica(module, crew)
    check_no_drift(module)
    CopyFromRank0([t for _, t in _tensors(module)], crew).wait()
    if sync == "ddp":
        return DdpReplica(module, crew, bucket_bytes)
    post = GroupPost() if link is None else LinkPost(link)
    peers = Peers(tuple(range(crew.size)), crew.rank, post=post)
    return SyncedReplica(module, crew, SYNC_CLASSES[sync](peers, crew.timeout_s), bucket_bytes)


class Replica(nn.Module):
    """One full copy of the model, which looks like the model it wraps.

    It shares the model's own tables of parameters, buffers and submodules, so that their names
    have no prefix, and what it does not have itself it takes from the model.
    """

    module: nn.Module
    """The plain model."""

    def __init__(self, module: nn.Module, crew: Crew) -> None:
        super().__init__()
        self.__dict__["module"] = module  # not a submodule: it would put a prefix to all names
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = module.__dict__[table]
        self.training = module.training
        self._crew = crew

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__:
                raise
            return getattr(self.__dict__["module"], name)

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        self.module.train(mode)
        return self

    @property
    def bytes_sent(self) -> int:
        """Payload of gradients that this rank has sent so far."""
        return 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes inside stay local and add up until the next one outside."""
        yield

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def close(self) -> None:
        """Stop watching the model and give threads back."""


class _WeightedReplica(Replica):
    """What all syncs share: samples weigh equally, buffers follow rank 0."""

    def __init__(self, module: nn.Module, crew: Crew) -> None:
        super().__init__(module, crew)
        self._weight = 1.0
        self._weighing: list[RemovableHandle] = []
        self._trainable: list[nn.Parameter] = []
        self._frozen: list[nn.Parameter] = []
        self._has_buffers = any(True for _ in module.buffers())
        self._watch_parameters()

    def _watch_parameters(self) -> None:
        parameters = list(self.module.parameters())
        self._trainable = [p for p in parameters if p.requires_grad]
        self._frozen = [p for p in parameters if not p.requires_grad]
        if not self._trainable:
            raise SyncError(
                "Every parameter of the model is frozen (requires_grad=False): there is no "
                "gradient to average. Use the model itself, without replicate()."
            )
        self._stop_weighing()

    def _stop_weighing(self) -> None:
        for handle in self._weighing:
            handle.remove()
        self._weighing = []

    def _weigh(self, gradient: torch.Tensor) -> torch.Tensor:
        # Runs before the gradient is added to .grad, so that it weighs this backward pass only and
        # not what earlier ones have accumulated there.
        return gradient * self._weight

    def _before_forward(self) -> None:
        """Remember how much this batch counts; the backward pass that follows will need it.

        Only where shares are unequal are there hooks at all: autograd has to copy a gradient that
        a hook has seen, where otherwise it would just move it.
        """
        share = self._crew.share
        self._weight = 1.0 if share is None else share.weight_over_mean(self._crew.size)
        if self._weight == 1.0:
            self._stop_weighing()
        elif not self._weighing:
            self._weighing = [p.register_hook(self._weigh) for p in self._trainable]


class SyncedReplica(_WeightedReplica):
    """Kept equal by one of our own syncs, overlapped with the backward pass."""

    def __init__(self, module: nn.Module, crew: Crew, sync: Sync, bucket_bytes: int) -> None:
        super().__init__(module, crew)
        self._sync = sync
        self._bucket_bytes = bucket_bytes
        self._reducer = self._make_reducer()

    def _make_reducer(self) -> Reducer:
        # Gradients of GPUs are staged in host memory where the sync or the crew needs them there.
        staged = self._sync.on_host or not self._crew.gpu_collectives
        return Reducer(
            self._trainable,
            self._sync,
            self._bucket_bytes,
            torch.device("cpu") if staged else None,
            lambda: self._crew.naming_the_lost("the averaging of gradients"),
        )

    @property
    def bytes_sent(self) -> int:
        return self._sync.bytes_sent

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if any(p.requires_grad for p in self._frozen):  # unfrozen since: watch it too
            self._reducer.detach()
            paused = self._reducer.paused
            self._watch_parameters()
            self._reducer = self._make_reducer()
            self._reducer.paused = paused
        self._reducer.check_idle()
        self._before_forward()
        self._reducer.is_stand_in = self._weight == 0.0
        output = self.module(*args, **kwargs)
        if self._has_buffers and self.training and not self._reducer.paused:
            self._reducer.before_finish.append(CopyFromRank0(self.module.buffers(), self._crew))
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._reducer.paused = self._reducer.paused, True
        try:
            yield
        finally:
            self._reducer.paused = before

    def close(self) -> None:
        self._reducer.detach()
        self._stop_weighing()
        self._sync.close()


class DdpReplica(_WeightedReplica):
    """Kept equal by torch's DistributedDataParallel."""

    def __init__(self, module: nn.Module, crew: Crew, bucket_bytes: int) -> None:
        super().__init__(module, crew)
        # Buffers are ours to copy, after each step, as with the other syncs (see forward).
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module, [name for name, _ in module.named_buffers()]
        )
        ddp = DistributedDataParallel(
            module,
            init_sync=False,
            bucket_cap_mb=bucket_bytes / 2**20,
            find_unused_parameters=True,  # without it, one unused parameter ends the run
        )
        # Not a submodule: the parameters would be there twice, under two names.
        self.__dict__["_ddp"] = ddp
        self._paused = False
        self._bytes_sent = 0
        self._bytes_per_sync = sum(p.nbytes for p in self._trainable)

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._before_forward()
        output = self.__dict__["_ddp"](*args, **kwargs)
        if not self._paused:
            n = self._crew.size
            self._bytes_sent += 2 * (n - 1) * self._bytes_per_sync // n  # gloo's ring
            if self._has_buffers and self.training:
                CopyFromRank0(self.module.buffers(), self._crew).wait()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            with self.__dict__["_ddp"].no_sync():
                yield
        finally:
            self._paused = before

    def close(self) -> None:
        self._stop_weighing()


def _same_everywhere(module: nn.Module, crew: Crew) -> None:
    """All ranks must have the same tensors; the first that differs is named."""
    mine = [f"{name} {str(t.dtype)[6:]} {tuple(t.shape)}" for name, t in _tensors(module)]
    for rank, theirs in enumerate(crew.exchange("the model", mine)):
        if theirs == mine:
            continue
        pairs = zip_longest(theirs, mine, fillvalue="nothing")
        other, own = next(pair for pair in pairs if pair[0] != pair[1])
        raise SyncError(
            f"{crew.roster[rank].who} and {crew.roster[crew.rank].who} have different models: "
            f"the one has {other}, the other {own}. Do all ranks run the same version of the code?"
        )


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(str(tensor.dtype), []).append(tensor)
    return [groups[dtype] for dtype in sorted(groups)]


class CopyFromRank0:
    """`tensors` on their way to become rank 0's, in one message per dtype."""

    def __init__(self, tensors: Iterable[torch.Tensor], crew: Crew) -> None:
        self._crew = crew
        self._parts: list[tuple[list[torch.Tensor], torch.Tensor, dist.Work]] = []
        for group in by_dtype(tensors):
            flat = torch.cat([t.detach().reshape(-1) for t in group])
            work = dist.broadcast(flat, 0, async_op=True)
            assert work is not None
            self._parts.append((group, flat, work))

    def wait(self) -> None:
        for group, flat, work in self._parts:
            with self._crew.naming_the_lost("a broadcast"):
                work.wait()
            if self._crew.rank == 0:
                continue
            for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
                # .data: batch norm's own updates do not count as modifications to autograd
                # either, and a graph that saved the buffer must stay usable.
                tensor.data.copy_(part.view(tensor.shape))
