"""The reducer: buckets start in order while the backward pass goes on, flags tell who was used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.errors import SyncError
from shoal.replicate.reducer import Reducer
from shoal.replicate.sync import Peers, Pending, Sync

CPU = torch.device("cpu")


class Recording(Sync):
    """Two ranks; the other one's part of each bucket is `theirs`, and every start is noted."""

    name = "recording"

    def __init__(self, theirs: float = 0.0) -> None:
        super().__init__(Peers((0, 1), 0), timeout_s=1)
        self.theirs = theirs
        self.started: list[int] = []

    def start(self, buffer: torch.Tensor) -> Pending:
        self.started.append(buffer.numel())
        buffer.add_(self.theirs)

        class Done:
            def wait(self) -> None:
                return None

        return Done()


def reducer_for(model: nn.Module, sync: Sync, bucket_bytes: int = 100) -> Reducer:
    return Reducer(list(model.parameters()), sync, bucket_bytes, CPU)


def test_buckets_start_while_the_backward_pass_goes_on() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    sync = Recording()
    reducer_for(model, sync)
    seen: list[int] = []
    x = torch.ones(1, 10, requires_grad=True)
    x.register_hook(lambda _: seen.append(len(sync.started)))  # the very end of the backward pass
    model(x).sum().backward()
    assert seen[0] >= 1, "the last layer's bucket was under way before the first layer's gradient"
    assert sync.started == [100, 100, 2]  # two layers of their own, and their flags


def test_all_small_gradients_go_in_one_message_with_their_flags() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    sync = Recording()
    reducer_for(model, sync, bucket_bytes=4096)
    model(torch.ones(1, 3)).sum().backward()
    assert sync.started == [9 + 3 + 6 + 2 + 4]


def test_unused_here_and_there_stays_none_and_unused_here_only_does_not() -> None:
    for theirs, expected in ((0.0, None), (1.0, [1.0, 1.0])):
        used, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        Reducer([used, other], Recording(theirs), 4096, CPU)
        used.sum().backward()
        got = None if other.grad is None else other.grad.tolist()
        assert got == expected
        assert used.grad is not None


def test_nothing_is_averaged_while_paused() -> None:
    p = nn.Parameter(torch.ones(2))
    sync = Recording()
    reducer = Reducer([p], sync, 4096, CPU)
    reducer.paused = True
    p.sum().backward()
    assert sync.started == []
    reducer.paused = False
    p.sum().backward()
    assert p.grad is not None
    assert p.grad.tolist() == [1.0, 1.0]  # (1 + 1) of ours, nothing of theirs, halved


def test_detached_it_leaves_the_parameters_alone() -> None:
    p = nn.Parameter(torch.ones(2))
    sync = Recording()
    Reducer([p], sync, 4096, CPU).detach()
    p.sum().backward()
    assert sync.started == []


def test_a_backward_pass_that_raised_half_way_is_found_out() -> None:
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("half way")

    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    reducer = reducer_for(nn.Sequential(first, second), Recording())
    reducer.check_idle()
    with pytest.raises(ValueError, match="half way"):
        second(Fail.apply(first(torch.ones(1, 2)))).sum().backward()
    with pytest.raises(SyncError, match="did not finish"):
        reducer.check_idle()
