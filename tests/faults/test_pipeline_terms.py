"""Scripts whose ranks do not say the same of a pipeline, or ask for what none can do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import SHOAL, Ranks
from warm import Nursery

SOON_S = 60.0

SCRIPT = """
import sys, torch, torch.nn.functional as F, shoal
from torch import nn

class Own(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


class CannotBeMade(torch.optim.SGD):
    def __init__(self, parameters, **options):
        if list(parameters):
            raise RuntimeError("no room for it")
        super().__init__(parameters, **options)


CannotBeMade.__qualname__ = "SGD"


for what in sys.argv[1:]:
    with shoal.join(timeout_s=30) as crew:
        net, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.ones(4, 2)
        words = dict(cuts=["2"], loss=F.mse_loss, optimizer=torch.optim.SGD, schedule="1f1b")
        if what == "schedule" and crew.rank:
            words["schedule"] = "gpipe"
        if what == "cuts" and crew.rank:
            del words["cuts"]
        if what == "shapes":
            net[2] = nn.Linear(3, 2)
            words["example"] = x if crew.rank == 0 else None
        if what == "optimizer":
            words["optimizer"] = Own
        if what == "frozen":
            net[0].requires_grad_(False)
            words["clip_norm"] = 1.0
        if what == "nothing":
            net.requires_grad_(False)
        if what == "lr":
            words["lr"] = 0.1 + crew.rank
        if what == "another loss" and crew.rank:
            words["loss"] = F.l1_loss
        if what == "transport":
            words["transport"] = "zmq" if crew.rank else "dist"
        if what == "making" and crew.rank:
            words["optimizer"] = CannotBeMade
        if what == "whole":
            words |= dict(schedule="sequential", microbatches=8)
        if what == "words":
            words |= dict(stages="2", cuts=[1], loss="mse")
        if what == "loss":
            words |= dict(stages=1, cuts=[], loss=lambda a, b: (a - b) ** 2)
        try:
            pipe = crew.pipeline(net, **words)
            loss = pipe.step(x[:0], x[:0]) if what == "empty" else pipe.step(x, x)
            print(what, "is fine", flush=True)
        except (shoal.ShoalError, RuntimeError) as error:
            print(f"{what}: {error}", flush=True)
"""


SENTENCES = {
    "words": "- stages='2': must be a whole number.",
    "schedule": "do not agree on how the model is trained",
    "cuts": "do not agree on how the model is trained",
    "shapes": "module 2 (Linear) does not take what comes to it, of shapes (1, 2)",
    "lr": "do not agree on how the model is trained",
    "another loss": "do not agree on how the model is trained",
    "transport": "do not agree on the transport of a link",
    "making": "no room for it",
    "nothing": "the loss has no gradient: it depends on no parameter that is trained",
    "optimizer": "Own: its step() needs a closure",
    "empty": "x: the batch is empty",
    "loss": "loss=: gave a tensor of shape (2, 2); it must give one number, the mean",
}
"""What every rank is told."""


def test_every_rank_is_told(start, tmp_path: Path) -> None:
    """In one run of two ranks."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    whats = (*SENTENCES, "frozen", "whole")
    run = start(*SHOAL, "run", "--workers", "2", "--threads", "1", str(path), *whats)
    assert run.end() == 0, run.said
    for rank in range(2):
        for what, sentence in SENTENCES.items():
            assert f"[{rank}] {what}: " in run.out
            assert sentence in run.out.partition(f"[{rank}] {what}: ")[2].splitlines()[0]
        assert f"[{rank}] frozen is fine" in run.out
        assert f"[{rank}] whole is fine" in run.out
    assert run.said.count("microbatches=8: sequential takes the batch whole, so there is one.") == 2


GOING_ON = """
import torch, torch.nn.functional as F, shoal
from torch import nn

torch.manual_seed(0)
net, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.ones(8, 2)
with shoal.join() as crew:
    link = crew.link("zmq", timeout_s=3)
    pipe = crew.pipeline(
        net, stages=2, cuts=["2"], loss=F.mse_loss, optimizer=torch.optim.SGD, lr=0.1, link=link
    )
    losses = [pipe.step(x, x)]
    if pipe.replica == 0:
        pipe(x)  # which is no business of the other replica
    losses.append(pipe.step(x, x))
    assert losses[1] < losses[0]
    print("goes on", flush=True)
    for batch in (torch.ones(8, 3), x, x):
        try:
            print("loss", pipe.step(batch, x), flush=True)
        except Exception as error:
            print(str(error).splitlines()[0], flush=True)
"""


def test_replicas_may_differ_in_inference_and_a_call_that_failed_is_the_last(
    start, tmp_path: Path
) -> None:
    """Inputs of one batch met targets of another, where a script went on after an error."""
    path = tmp_path / "script.py"
    path.write_text(GOING_ON)
    run = start(*SHOAL, "run", "--workers", "4", "--threads", "1", str(path))
    assert run.end() == 0, run.said
    assert run.out.count("goes on") == 4, run.said
    assert "loss" not in run.out.replace("loss 3", "")
    for rank in range(4):
        told = [line for line in run.out.splitlines() if line.startswith(f"[{rank}]")]
        assert "cannot go on: call" in told[-1], run.said


CAUGHT = """
import sys, torch, torch.nn.functional as F, shoal
from torch import nn

class Stumbles(torch.optim.SGD):
    steps = 0
    def step(self, closure=None):
        Stumbles.steps += 1
        if Stumbles.steps == 2 and torch.distributed.get_rank() == 1:
            raise RuntimeError("a slip")
        return super().step(closure)


class Peeks(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.layer, self.other = nn.Linear(2, 2), [other]

    def forward(self, x):
        y = self.layer(x) if not x.isnan().any() else x
        return y * self.other[0].weight.mean() if self.training else y


x = torch.ones(4, 2)
for what in sys.argv[1:]:
    with shoal.join(timeout_s=30) as crew:
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        words = dict(cuts=["2"], loss=F.mse_loss, optimizer=torch.optim.SGD)
        if what == "optimizer":
            words["optimizer"] = Stumbles
        if what == "evaluated first":
            net[2] = Peeks(net[0])
        pipe = crew.pipeline(net, **words)
        if what == "evaluated first":
            pipe.eval()
            pipe(x)
            pipe.train()
        for step in range(4):
            if what == "mode" and step == 2:
                pipe.eval()
                net.eval()
                pipe(x)
                pipe.train()
                pipe.step(x, x)  # both were told
                net.train()
                pipe.step(x, x)
                net.eval()
            try:
                pipe.step(x, x)
            except Exception as error:
                print(f"{what} {step}: {' '.join(str(error).split())}", flush=True)
"""


def test_what_a_script_catches_is_told_again(start, tmp_path: Path) -> None:
    """The optimizer's step had been taken by one stage, not by the other, and training went on; a
    model was compared in eval() and never in training; half of its steps had another mode."""
    path = tmp_path / "script.py"
    path.write_text(CAUGHT)
    whats = ("optimizer", "mode", "evaluated first")
    run = start(*SHOAL, "run", "--workers", "2", "--threads", "1", str(path), *whats)
    assert run.end() == 0, run.said
    for rank in range(2):
        told = [line for line in run.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert "a slip" in "".join(told), run.said
        assert "cannot go on: call" in _after(told, f"[{rank}] optimizer 3: "), run.said
        assert "Sequential.eval() was called" in _after(told, f"[{rank}] mode 2: ")
        assert "0.weight, which is not in that stage" in _after(told, f"[{rank}] evaluated first 0")


def _after(lines: list[str], begin: str) -> str:
    return next((line for line in lines if line.startswith(begin)), f"nothing begins with {begin}")


LEAVES = """
import sys, torch, torch.nn.functional as F, shoal
from torch import nn

net, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.ones(4, 2)
with shoal.join() as crew:
    pipe = crew.pipeline(
        net, cuts=["2"], loss=F.mse_loss, optimizer=torch.optim.SGD, transport=sys.argv[1]
    )
    for step in range(3 if crew.rank == int(sys.argv[2]) else 4):
        pipe.step(x, x)
"""


@pytest.mark.parametrize(("transport", "leaver"), [("zmq", 0), ("zmq", 1), ("dist", 1)])
def test_a_rank_that_ends_a_step_early(start, tmp_path: Path, transport: str, leaver: int) -> None:
    """The others waited for it for 300 s."""
    path = tmp_path / "script.py"
    path.write_text(LEAVES)
    run = start(
        *SHOAL, "run", "--workers", "2", "--threads", "1", str(path), transport, str(leaver)
    )
    assert run.end(SOON_S) == 1, run.said
    assert re.search(
        rf"OutOfStepError: rank {leaver} .* has left, and this rank waited for it", run.said
    )


ONE_ALONE = """
import sys, torch, torch.nn.functional as F, shoal
from torch import nn

torch.manual_seed(0)
net, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.ones(8, 2)
call, who = sys.argv[1], int(sys.argv[2])
with shoal.join() as crew:
    pipe = crew.pipeline(net, stages=2, cuts=["2"], loss=F.mse_loss, optimizer=torch.optim.SGD)
    pipe.backward(x, x)
    if crew.rank == who:
        with_what = {"load_state_dict": [net.state_dict()], "clip_grad_norm_": [1.0]}
        getattr(pipe, call)(*with_what.get(call, []))
    pipe.step(x, x)
    print("not told", flush=True)
"""


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("call", ["state_dict", "load_state_dict", "update", "clip_grad_norm_"])
def test_who_makes_a_call_alone_is_told_at_once(start, tmp_path: Path, call: str, who: int) -> None:
    """`if crew.rank == 0: pipe.state_dict()` waited until all waiting was over, five minutes; and
    after an update of one stage only, training went on."""
    path = tmp_path / "script.py"
    path.write_text(ONE_ALONE)
    run = start(*SHOAL, "run", "--workers", "2", "--threads", "1", str(path), call, str(who))
    assert run.end(SOON_S) == 1, run.said
    assert "not told" not in run.out
    assert re.search(r"rank 1 does \S+ \(call .*; rank 0 does \S+ \(call ", run.said), run.said


ONE_MORE = """
import sys, torch, torch.nn.functional as F, shoal
from torch import nn

net, x = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)]), torch.ones(8, 2)
with shoal.join() as crew:
    pipe = crew.pipeline(net, cuts=["1", "2"], loss=F.mse_loss, optimizer=torch.optim.SGD)
    for step in range(4 if crew.rank == int(sys.argv[1]) else 3):
        pipe.step(x, x)
"""


@pytest.mark.parametrize("who", [0, 2])
def test_those_at_the_end_of_the_script_hear_why_another_is_not(
    nursery: Nursery, tmp_path: Path, who: int
) -> None:
    """They were told that it had been killed or was frozen."""
    path = tmp_path / "script.py"
    path.write_text(ONE_MORE)
    ranks = Ranks(nursery, tmp_path, 3, str(path), str(who))
    ranks.end(limit_s=SOON_S)
    assert "no sign of life" not in ranks.said
    told = (
        rf"lost rank {who} .* during a barrier: it ended with OutOfStepError: rank \d .* has left"
    )
    assert len(re.findall(told, ranks.said)) >= 2, ranks.said


STANDS_STILL = """
import signal, time, torch, torch.nn.functional as F, shoal
from torch import nn

net, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(8, 2)
with shoal.join(timeout_s=3) as crew:
    pipe = crew.pipeline(net, stages=1, loss=F.mse_loss, optimizer=torch.optim.SGD)
    pipe.backward(x, x)
    if crew.rank == 1:
        signal.pause()
    pipe.update()
"""


def test_replicas_wait_for_each_other_as_long_as_the_crew_does(start, tmp_path: Path) -> None:
    """Their groups had the timeout of torch: half an hour."""
    path = tmp_path / "script.py"
    path.write_text(STANDS_STILL)
    run = start(*SHOAL, "run", "--workers", "2", "--threads", "1", str(path))
    assert run.end(SOON_S) == 1, run.said
    assert re.search(r"lost rank 1 .* during the averaging of gradients", run.said), run.said
