"""Watches a backward pass: packs gradients as they appear, starts a bucket as soon as it is full.

    backward   ... fc2, fc1 ─┐ conv3, conv2, conv1 ─┐ end
    buckets       0 full ────┴──> sum under way      │
                  1 full ────────────────────────────┴──> sum under way
    finish                                              wait for all, hand the means out

Buckets start in their order on every rank, whatever order the gradients come in, because the
ranks' sums are matched by order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils.hooks import RemovableHandle

from shoal.errors import SyncError
from shoal.replicate.buckets import (
    Bucket,
    LoneBucket,
    Packable,
    PackedBucket,
    Parameter,
    plan_buckets,
)
from shoal.replicate.sync import Pending, Sync

LONE_BYTES = 2**20
"""A gradient of this size or more is averaged where it lies, and not packed with others."""


class Reducer:
    """Averages the gradients of `parameters` with `sync` in every backward pass, unless paused."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        sync: Sync,
        bucket_bytes: int,
        buffer_device: torch.device | None,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        plan = plan_buckets(
            [
                Packable(p.numel(), p.element_size(), f"{p.dtype} {buffer_device or p.device}")
                for p in parameters
            ],
            bucket_bytes,
            min(bucket_bytes, LONE_BYTES),
        )
        self.buckets: list[Bucket] = []
        for planned in plan:
            members = [parameters[i] for i in planned.indices]
            kin = members[0] if members else parameters[0]
            device = buffer_device or kin.device
            if planned.is_packed:
                num_flags = len(parameters) if planned is plan[-1] else 0
                self._last = PackedBucket(members, kin.dtype, device, num_flags)
                self.buckets.append(self._last)
            else:
                self.buckets.append(LoneBucket(kin, device))
        self.paused = False
        self.is_stand_in = False
        """This rank has no sample in the batch at hand, and works on one of weight zero."""
        self.before_finish: list[Pending] = []
        """Other transfers of this step that must be over when the backward pass returns."""
        self._sync = sync
        self._guard = guard
        self._scale = 1.0 / sync.peers.size if sync.scales_first else 1.0
        self._running = False
        self._pending: list[Pending] = []
        self._handles: list[RemovableHandle] = []
        for number, bucket in enumerate(self.buckets):
            for slot, parameter in enumerate(bucket.parameters):
                self._handles.append(self._watch(parameter, number, slot))

    def _watch(self, parameter: Parameter, number: int, slot: int) -> RemovableHandle:
        def on_gradient(_: torch.Tensor) -> None:
            if not self.paused:
                self._take(number, slot)

        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(on_gradient)
        return handle

    def check_idle(self) -> None:
        """Called before each forward pass: a backward that raised half way leaves a mess."""
        if self._running:
            raise SyncError(
                "The last backward pass on this rank did not finish, so its gradients were only "
                "partly averaged and the ranks are out of step. Let the error end the run."
            )

    @torch.no_grad()
    def _take(self, number: int, slot: int) -> None:
        if not self._running:
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        bucket = self.buckets[number]
        if not bucket.fill(slot, self._scale, self.is_stand_in):
            raise SyncError(
                "A parameter got its gradient twice in one backward pass. Reentrant checkpointing "
                "does that: use torch.utils.checkpoint(..., use_reentrant=False)."
            )
        self._start_full_buckets()

    def _start_full_buckets(self) -> None:
        while len(self._pending) < len(self.buckets):
            bucket = self.buckets[len(self._pending)]
            if bucket.num_missing:
                break
            if bucket is self._last:  # all others are full by now, so all flags are known
                self._last.flags.copy_(torch.tensor(self._used_here(), dtype=torch.float32))
            self._pending.append(self._sync.start(bucket.payload()))

    def _used_here(self) -> list[bool]:
        return [bool(has) for bucket in self.buckets for has in bucket.has_gradient]

    def _finish(self) -> None:
        for bucket in self.buckets[len(self._pending) :]:
            with torch.no_grad():
                bucket.fill_rest(self._scale, self.is_stand_in)
        with torch.no_grad():
            self._start_full_buckets()
        for pending in self.before_finish:
            pending.wait()
        with self._guard():
            for pending in self._pending:
                pending.wait()
        used_here = self._used_here()
        used = used_here if all(used_here) else self._last.flags.ne(0).tolist()
        number = 0
        for bucket in self.buckets:
            count = len(bucket.parameters)
            bucket.hand_out([not each for each in used[number : number + count]])
            number += count
        self.before_finish.clear()
        self._pending.clear()
        self._running = False

    def detach(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
