"""`shoal.join()`: the crew as a script sees it, with the methods of every room."""

from __future__ import annotations

import atexit
import builtins
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from shoal.crew import Crew
from shoal.errors import EXIT_FAILED, PeerLost, PeerSilent, SettingsError, lost_peer
from shoal.pipeline.build import Model
from shoal.pipeline.holding import Holding
from shoal.pipeline.losses import Loss as PipelineLoss
from shoal.pipeline.pipeline import Pipeline
from shoal.pipeline.plan import Plan, plan_faults
from shoal.rendezvous.roll import Fingerprint
from shoal.rendezvous.ways import choices_of_environment, find_way
from shoal.replicate import Replica, replicate
from shoal.replicate.averages import stage_averages
from shoal.replicate.replica import BUCKET_BYTES
from shoal.report.events import Failed, Waiting, launcher_emitter
from shoal.report.waiting import waiting_line
from shoal.settings import DEVICES, SYNCS, default_microbatches, unknown, whole_batch_note
from shoal.train.evaluate import Loss, evaluate
from shoal.train.loader import Collate, Loader
from shoal.train.task import Means, loss_of
from shoal.version import VERSION
from shoal.wire.header import DEFAULT_LIMIT_BYTES
from shoal.wire.link import Link
from shoal.wire.open_link import TRANSPORTS, LinkSettings, open_link
from shoal.wire.tree import Tree

MISSED_LATER_S = 2.0
"""By how much two ranks may differ in when they miss a third: signs of life come every second."""

log = logging.getLogger("shoal")


def join(
    init: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    interface: str | None = None,
    device: str | None = None,
    timeout_s: float = 300.0,
    settings: Mapping[str, Any] | None = None,
) -> JoinedCrew:
    """Meet the other ranks of this script; alone, a crew of one.

    init: `tcp://HOST:PORT`, `file:///PATH`, `env://`. Default: what the environment says (torchrun,
        Slurm, `shoal run`), else alone.
    interface: the network interface to use. Default: what the hosts.toml of `shoal run --hosts`
        says of this host, else the one on the route to the leader.
    device: `cpu`, `cuda` or `auto`. Default: what the hosts.toml says, else `cpu`.
    timeout_s: the longest wait for another rank, when meeting and in any step.
    settings: values that must be equal on every rank; a difference is named when they meet.
    """
    atexit.unregister(_blame_others)  # what an earlier crew lost is got over
    chosen_interface, chosen_device = choices_of_environment()
    device = device or chosen_device or "cpu"
    if faults := unknown("device=", device, DEVICES):
        raise SettingsError(faults)
    return JoinedCrew.open(
        find_way(init, rank, world_size),
        fingerprint=Fingerprint(
            shoal=VERSION, settings={k: str(v) for k, v in (settings or {}).items()}
        ),
        interface=interface or chosen_interface,
        device=device,
        timeout_s=timeout_s,
        notify=_notifier(is_of_launcher=init is None),
    )


def _notifier(*, is_of_launcher: bool) -> Callable[[str], None]:
    """Tells whom we wait for. is_of_launcher: the launcher too, which knows who has ended and will
    not come any more; of others than its ranks it knows nothing."""
    show = waiting_line(sys.stderr)
    emit = launcher_emitter() if is_of_launcher else None
    told = ""

    def notify(text: str) -> None:
        nonlocal told
        show(text)
        if emit is not None and text != told:  # which has the seconds in it
            told = text
            emit(Waiting(text=text))

    return notify


def _blame_others(rank: int, host: str) -> None:
    """As this process ends: tell its launcher, if it has one, that a peer was lost, whatever the
    script has made of it. Should it be a failure, then another rank is the cause."""
    if emit := launcher_emitter():
        emit(
            Failed(
                rank=rank, host=host, kind=PeerLost.__name__, message="", traceback="",
                exit_code=EXIT_FAILED, is_consequence=True,
            )
        )  # fmt: skip


class JoinedCrew(Crew):
    """All ranks of a script: `with shoal.join() as crew`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._links: list[Link] = []
        self._holdings: list[Holding] = []
        """Of pipelines."""

    def replicate(
        self,
        module: nn.Module,
        sync: str = "all-reduce",
        bucket_bytes: int = BUCKET_BYTES,
        link: Link | None = None,
    ) -> Replica:
        """The same model on every rank; `loss.backward()` leaves the mean gradient everywhere.

        link: what `ring` and `serial-ring` send over, instead of torch.distributed.
        """
        return replicate(module, self, sync, bucket_bytes, link)

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
    ) -> Loader:
        """This rank's share of each global batch of `batch_size`; reshuffles each epoch."""
        return Loader(
            dataset,
            self,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            num_workers=num_workers,
            collate_fn=collate_fn,
        )

    def evaluate(
        self,
        model: nn.Module | Pipeline,
        dataset: Dataset[Any],
        batch_size: int = 512,
        loss: Loss = loss_of,
    ) -> Means:
        """Mean loss and accuracy over all ranks; every sample counts exactly once."""
        return evaluate(model, dataset, self, batch_size, loss)

    def link(
        self,
        transport: str = "zmq",
        *,
        key: str | None = None,
        authorized_keys: str | None = None,
        insecure: bool = False,
        timeout_s: float | None = None,
        hung_s: float = 10.0,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
    ) -> Link:
        """Send any tree of tensors to any rank. Every rank must call this.

        transport: `zmq`, or `dist` for torch.distributed's own connections.
        key, authorized_keys: files, where they are not the ones of `shoal keygen`; needed only for
            zmq between several machines.
        insecure: use zmq between several machines without keys.
        timeout_s: the longest wait for a message, where a wait is not told otherwise.
        hung_s: a peer that gave no sign of life for so long is lost.
        limit_bytes: the largest message that this rank takes.
        """
        link = open_link(
            self,
            transport,
            LinkSettings(
                key=key,
                authorized_keys=authorized_keys,
                insecure=insecure,
                timeout_s=self.timeout_s if timeout_s is None else timeout_s,
                hung_s=hung_s,
                limit_bytes=limit_bytes,
            ),
        )
        self._resources.callback(_close, weakref.ref(link))
        self._links.append(link)
        return link

    def pipeline(
        self,
        model: Model,
        *,
        stages: int | None = None,
        schedule: str = "1f1b",
        microbatches: int | None = None,
        transport: str = "zmq",
        cuts: Sequence[str] | None = None,
        loss: PipelineLoss | None = None,
        reduction: str = "mean",
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        clip_norm: float | None = None,
        sync: str = "all-reduce",
        inputs: Sequence[str] | None = None,
        example: Tree = None,
        memory_bytes: Sequence[int] | None = None,
        seed: int = 0,
        link: Link | None = None,
        **optimizer_options: Any,
    ) -> JoinedPipeline:
        """Spread a model over `stages` ranks; with more ranks, over several replicas.

        model: a module that torch.fx can read, an nn.Sequential, a list of `shoal.Layer`; or what
            makes one, which is called on the meta device: each rank holds its own stage only.
        stages: default: as many as there are ranks.
        microbatches: default: twice the stages; always 1 with `sequential`, which takes the batch
            whole.
        cuts: modules that stages 1, 2, ... begin with. Default: where the slowest stage is fastest,
            by a short profile with `example`, or else with the first batch.
        reduction: what the loss is over a batch: the `mean` of its samples or their `sum`.
        clip_norm: gradients of all stages together are scaled down to this norm.
        sync: how replicas agree on gradients.
        inputs: names of the inputs of `forward` that come with every batch.
        memory_bytes: what each stage may hold. Default: what its host has free.
        """
        num_stages = self.size if stages is None else stages
        if microbatches is None:
            of_stages = num_stages if isinstance(num_stages, int) else 1  # else a fault, see below
            microbatches = default_microbatches(schedule, max(of_stages, 1))
        plan = Plan(
            stages=num_stages,
            schedule=schedule,
            microbatches=microbatches,
            cuts=cuts,
            loss=loss,
            reduction=reduction,
            optimizer=optimizer,
            optimizer_options=optimizer_options,
            clip_norm=clip_norm,
            inputs=inputs,
            memory_bytes=memory_bytes,
            seed=seed,
        )
        faults = plan_faults(plan, self.size) + unknown("sync=", sync, SYNCS)
        if link is None:
            known = [each for each in TRANSPORTS if each != "memory" or self.size == 1]
            faults += unknown("transport=", transport, known)
        if faults:
            raise SettingsError(faults)
        if note := whole_batch_note("microbatches=", schedule, microbatches):
            warnings.warn(note, stacklevel=2)
        self._close_unused()
        averages = stage_averages(self, plan.stages, sync)
        own = self.link(transport) if link is None else None
        # Not the pipeline: who lets go of it gets its memory back.
        holding = Holding(own, averages)
        self._holdings.append(holding)
        over = own or link
        assert over is not None
        pipe = JoinedPipeline(model, self, over, plan, example=example, averages=averages)
        pipe.holds(holding)
        return pipe

    def _close_unused(self) -> None:
        """What was made for pipelines which nobody holds any more.

        Here, and not when they are let go of: saying goodbye takes a moment, and must not come in
        the midst of something else.
        """
        for holding in [each for each in self._holdings if each.is_unused]:
            holding.give_back()
            self._holdings.remove(holding)
            if holding.link is not None:
                self._links.remove(holding.link)

    def close(self, error: BaseException | None = None) -> None:
        """Leave together; or, after an error, alone and at once, telling the others why.

        Alone also where a rank was lost and the script went on without it.
        """
        if self._is_inherited:
            return
        if error is not None:
            self._close_links(error)
        try:
            super().close(error)
        except PeerLost as lost:  # found as we wanted to leave together
            error = lost
            raise
        finally:
            for holding in self._holdings:
                holding.close()
            if lost_peer(error) is not None:
                atexit.register(_blame_others, self.rank, self.roster[self.rank].host)

    def _gather(self) -> BaseException | None:
        lost: BaseException | None = self._silence()
        if lost is None:
            # Nothing of theirs is under way between two calls. Who is still in one hears at once
            # that it waits for a rank at the end of its script.
            for holding in self._holdings:
                if holding.link is not None:
                    holding.link.close()
            try:
                return super()._gather()
            except PeerLost:
                # Did it leave alone, because it missed another rank a little earlier than we do?
                lost = self._silence(MISSED_LATER_S)
                if lost is None:
                    raise
                log.warning("%s. Leaving without it", lost)
        self._close_links(lost)
        return lost

    def _who_is_lost(self, doing: str, error: RuntimeError) -> PeerLost:
        """A link may know it already; and those whom it has lost are not to be asked again."""
        return self._silence() or super()._who_is_lost(doing, error)

    def _silence(self, limit_s: float = 0.0) -> PeerSilent | None:
        """Of a rank that will never answer again, if one is found so soon."""
        silences = (link.silence(limit_s) for link in self._links)
        return next((silence for silence in silences if silence), None)

    def _close_links(self, error: BaseException) -> None:
        for link in self._links:
            link.close_after(error)

    def print(self, *values: object) -> None:
        """On rank 0 only."""
        if self.rank == 0:
            builtins.print(*values, flush=True)


def _close(link: weakref.ref[Link]) -> None:
    if there := link():
        there.close()


class JoinedPipeline(Pipeline):
    """A pipeline as a script sees it."""

    _holding: Holding | None = None

    def holds(self, holding: Holding) -> None:
        """What was made for it alone, and ends with it."""
        self._holding = holding
        holding.is_of(self)
        self._calls.is_links_end = holding.link is not None

    def close(self) -> None:
        """It cannot be used again; what it holds of the network is given back."""
        super().close()
        if self._holding is not None:
            self._holding.give_back()

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
    ) -> Loader:
        """This replica's share of each global batch, on all of its stages the same samples."""
        return Loader(
            dataset,
            self.place,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            num_workers=num_workers,
            collate_fn=collate_fn,
        )
