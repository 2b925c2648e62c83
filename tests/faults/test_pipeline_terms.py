"""Scripts whose ranks do not say the same of a pipeline, or ask for what none can do."""

from __future__ import annotations

from pathlib import Path

from processes import SHOAL

SCRIPT = """
import sys, torch, torch.nn.functional as F, shoal
from torch import nn

class Own(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


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
            net.requires_grad_(False)
            words["clip_norm"] = 1.0
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
        except shoal.ShoalError as error:
            print(f"{what}: {error}", flush=True)
"""


SENTENCES = {
    "words": "- stages='2': must be a whole number.",
    "schedule": "do not agree on how the model is trained",
    "cuts": "do not agree on how the model is trained",
    "shapes": "module 2 (Linear) does not take what comes to it, of shapes (1, 2)",
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
