"""A boss that is used as scripts do use models: what would be lost without a word is done or told.

Two workers are shared by the tests, and one boss by most.
"""

from __future__ import annotations

import copy
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from boss_workers import Office, row_of_layers, rows, works
from processes import SHOAL, until
from torch import nn
from typer.testing import CliRunner
from warm import Nursery

import shoal
from shoal.boss.boss import Boss
from shoal.boss.calls import LINK_S
from shoal.cli.main import app


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Office]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Office(tmp_path_factory.mktemp("office"), nursery=nursery)
    try:
        made.start(2)
        yield made
    finally:
        made.close()
        torch.set_num_threads(threads)


@pytest.fixture
def boss(office: Office) -> Boss:
    return office.boss(2)


def seeded() -> nn.Sequential:
    torch.manual_seed(0)
    return row_of_layers(2)


def assert_same(state: dict[str, torch.Tensor], plain: nn.Module) -> None:
    expected = plain.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


# -- the loop that everybody knows, in other words -------------------------------------------------


@pytest.mark.parametrize("cuts", [["1"], None], ids=["cuts", "cuts by the first batch"])
def test_gradients_are_zeroed_by_the_model_too(boss: Boss, cuts: list[str] | None) -> None:
    """They added up from step to step: `model.zero_grad()` found no parameters here."""
    alone = seeded()
    model = boss.place(seeded(), cuts=cuts)
    optimizers = boss.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(alone.parameters(), 0.1)
    for each, optimizer in zip((model, alone), optimizers, strict=True):
        for _ in range(3):
            each.zero_grad()
            each(rows()).pow(2).mean().backward()
            optimizer.step()
    assert_same(model.state_dict(), alone)


def test_what_would_do_nothing_is_told_of(boss: Boss) -> None:
    model = boss.place(seeded(), cuts=["1"])
    uses: list[Callable[[], Any]] = [
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: torch.optim.Adam(model.parameters()),
        lambda: model.requires_grad_(False),
        lambda: dict(model.named_parameters()),
    ]
    for use in uses:
        with pytest.raises(shoal.ModelError, match=r"are on its workers.*boss.clip_grad_norm_"):
            use()
    with pytest.raises(shoal.ModelError, match=r"save model.state_dict\(\)"):
        copy.deepcopy(model)
    moves: dict[str, Callable[[], Any]] = {
        "half": model.half, "double": model.double, "bfloat16": model.bfloat16, "cpu": model.cpu,
        "float": model.float, "cuda": model.cuda, "to": lambda: model.to("cuda"),
        "type": lambda: model.type(torch.half), "to_empty": lambda: model.to_empty(device="cpu"),
    }  # fmt: skip
    for name, move in moves.items():
        words = rf"model.{name}\(\): .* boss.place\(model\..* shoal worker --device"
        with pytest.raises(shoal.ModelError, match=words):
            move()
    assert Outer(model).double().head.weight.dtype == torch.double  # what is here
    works(boss)


class Outer(nn.Module):
    """Has a placed model among its own layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(self.head(x))
        return out


def test_a_placed_model_inside_another_module(boss: Boss) -> None:
    """Its parameters were missing in the state of the whole, and nothing was loaded into it."""
    alone = Outer(seeded())
    whole = Outer(boss.place(seeded(), cuts=["1"]))
    whole.load_state_dict(alone.state_dict())
    assert_same(whole.state_dict(), alone)
    assert torch.equal(whole(rows()), alone(rows()))
    fresh = Outer(row_of_layers(2))
    fresh.load_state_dict(whole.state_dict())
    assert torch.equal(fresh(rows()), alone(rows()))
    assert whole.eval().inner.mode is False
    state = alone.state_dict()
    del state["inner.1.bias"]
    state["inner.0.bias"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"(?s)inner.1.bias.*0.bias is \(6,\) in this model"):
        whole.load_state_dict(state)
    assert_same(whole.state_dict(), alone)


def test_optimizers_that_cannot_be_used_are_refused_at_once(boss: Boss) -> None:
    boss.place(seeded(), cuts=["1"])
    with pytest.raises(shoal.ModelError, match=r"LBFGS: .* closure"):
        boss.optimizer(torch.optim.LBFGS, lr=0.1)
    for kind in ("Adam", torch.optim.SGD([torch.zeros(1)], lr=0.1)):
        with pytest.raises(shoal.ModelError, match=r"is no class of torch.optim"):
            boss.optimizer(kind, lr=0.1)  # type: ignore[arg-type]
    optimizer = boss.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(shoal.ModelError, match="has one group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_a_train_step_that_makes_no_sense(boss: Boss) -> None:
    boss.place(seeded(), cuts=["1"])
    boss.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(shoal.SettingsError, match=r"(?s)schedule='2f2b'.*reduction='none'"):
        boss.train_step(rows(), rows(), loss=F.mse_loss, schedule="2f2b", reduction="none")
    with pytest.raises(shoal.SettingsError, match="then the target"):
        boss.train_step(rows(), loss=F.mse_loss)
    with pytest.raises(shoal.ModelError, match="loss: returns nothing: is there a return"):
        boss.train_step(rows(), rows(), loss=print)  # type: ignore[arg-type]
    with pytest.raises(shoal.WorkerError, match="loss=: gave a Size; it must give one number"):
        boss.train_step(rows(), rows(), loss=lambda out, y: out.shape)


@pytest.mark.parametrize(
    "options",
    [{"workers": "2"}, {"workers": 2.0}, {"workers": -1}]
    + [{name: value} for name in ("timeout_s", "hung_s") for value in (0, -1, math.nan, math.inf)]
    + [{"wait_s": value} for value in (0, -1, math.nan, "5")],
    ids=str,
)
def test_a_boss_that_makes_no_sense(options: dict[str, Any]) -> None:
    """It came as an error of ZeroMQ's, or not at all."""
    ((name, value),) = options.items()
    with pytest.raises(shoal.SettingsError, match=rf"^- {name}={value!r}: "):
        shoal.Boss("tcp://127.0.0.1:1", **{"workers": 1, **options})


# -- what was only half said -----------------------------------------------------------------------


def send_numpy(boss: Boss) -> None:
    boss.model([rows(), rows().numpy()])


def send_numpy_target(boss: Boss) -> None:
    boss.train_step(rows(), rows().numpy(), loss=F.mse_loss)


def load_numpy(boss: Boss) -> None:
    model = boss.model
    model.load_state_dict({name: t.numpy() for name, t in model.state_dict().items()})


@pytest.mark.parametrize("do", [send_numpy, send_numpy_target, load_numpy])
def test_what_cannot_be_sent_is_not_waited_for(boss: Boss, do: Callable[[Boss], None]) -> None:
    """Workers had been told to expect it: the next call hung. And nothing of it is left over."""
    alone = seeded()
    model = boss.place(seeded(), cuts=["1"], microbatches=2)
    boss.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        with pytest.raises(shoal.WireError, match="ndarray cannot be sent"):
            do(boss)
    for scale in (1.0, 2.0, 3.0):
        assert_both_ways(model, alone, scale * rows())
    works(boss)


def assert_both_ways(model: nn.Module, alone: nn.Module, x: torch.Tensor) -> None:
    """The first backward pass was taken for one from before what had been cut off."""
    given = [x.clone().requires_grad_() for _ in range(2)]
    made = [each(own) for each, own in zip((model, alone), given, strict=True)]
    torch.testing.assert_close(*made)
    for output in made:
        output.pow(2).sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad)


def test_a_call_that_is_interrupted(boss: Boss, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, where one goes on: later calls got what was meant for this one."""
    alone = seeded()
    model = boss.place(seeded(), cuts=["1"], microbatches=2)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(boss.desk, "recv", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(-rows())
        for scale in (1.0, 2.0, 3.0):
            assert_both_ways(model, alone, scale * rows())
    works(boss)


def test_a_boss_that_was_closed(office: Office) -> None:
    office.close_boss()
    with office.make_boss(1) as boss:
        model = boss.place(seeded())
        out = model(rows())
    with pytest.raises(shoal.WireError, match=r"this boss was closed.*open another"):
        boss.place(seeded(), cuts=[])
    for call in (lambda: model(rows()), model.state_dict, out.sum().backward):
        with pytest.raises(shoal.ModelError, match=r"this boss was closed.*open another"):
            call()


UNCLOSED = """
import sys, torch, shoal
from torch import nn

boss = shoal.Boss(sys.argv[1], 2)
model = boss.place(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), cuts=["1"])
model(torch.ones(10_000, 6)).sum().backward()
"""


def test_a_script_that_does_not_close_its_boss(
    office: Office, start: Callable[..., Any], tmp_path: Path
) -> None:
    """It ended with a traceback of pyzmq's, and the workers took it for killed."""
    office.close_boss()
    before = {worker: len(worker.out) for worker in office.workers}
    script = tmp_path / "script.py"
    script.write_text(UNCLOSED)
    run = start(SHOAL[0], str(script), office.listen)
    assert run.end() == 0
    assert "Traceback" not in run.err
    for worker, said in before.items():
        until(lambda: worker.out[said:].rstrip().endswith("has left"), "it was told")  # noqa: B023


# -- a worker that goes while all link up ----------------------------------------------------------

GOING = """
import os, sys
from shoal.cli.main import main
from shoal.wire.zmq_link import ZmqLink

how = int(sys.argv.pop())

def go(self, *args):
    self._gate.open()  # it can be reached
    os.kill(os.getpid(), how)

ZmqLink.connect = go
main()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_goes_when_all_link_up(
    start_warm: Callable[..., Any],
    tmp_path: Path,
    nursery: Nursery,
    monkeypatch: pytest.MonkeyPatch,
    how: signal.Signals,
) -> None:
    """It was waited for as long as for a result: five minutes, without a word."""
    assert LINK_S <= 10
    monkeypatch.setattr("shoal.boss.hiring.LINK_S", 3.0)
    script = tmp_path / "going.py"
    script.write_text(GOING)
    other = Office(tmp_path, nursery=nursery)
    where = ("worker", "--boss", f"127.0.0.1:{other.port}")
    try:
        (stays,) = other.start()
        going = start_warm(SHOAL[0], str(script), *where, str(int(how)))
        with pytest.raises(shoal.MeetingError, match="not all could be linked up") as caught:
            other.make_boss(2, timeout_s=300.0)
        assert f"pid {going.process.pid})" in str(caught.value)
        if how == signal.SIGKILL:
            stays.until_says("could not work for the boss")
            with other.make_boss(1) as boss:
                works(boss)
    finally:
        other.close()


# -- at the terminal -------------------------------------------------------------------------------


def test_ctrl_c_while_a_boss_waits_shows_the_script_and_not_how_we_wait(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    other = Office(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(f"import shoal\nshoal.Boss({other.listen!r}, 2)\n")
    run = start(SHOAL[0], str(script))
    run.until_says("waiting for 2 of 2 workers")
    run.interrupt()
    assert run.err.rstrip().endswith("KeyboardInterrupt")
    assert "hiring.py" not in run.err
    assert "zmq" not in run.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("worker", "--boss", "127.0.0.1:1", "--threads", "0"), "--threads 0: must be at least 1"),
        (("worker", "--boss", "127.0.0.1:1", "--device", "tpu"), "--device tpu: unknown"),
        (("train", "--boss", "--workers", "0"), "--workers 0: must be at least 1"),
        (("train", "--boss", "--sync", "ring"), "--sync: is about replicas"),
        (("train", "--boss", "--workers", "99"), "--workers 99: --model mnist-cnn has 13 steps"),
        (("worker", "--boss", "foo"), "--boss: 'foo' is no address of a boss"),
        (("worker", "--boss", ":1024"), "--boss: ':1024' is no address of a boss"),
        (("worker", "--boss", "127.0.0.1:abc"), "is no address of a boss"),
        (("worker", "--boss", "127.0.0.1:99999"), "a port is between 1 and 65535"),
        (("worker", "--boss", "127.0.0.1:1", "--allow", "my-net/../x"), "--allow my-net/../x: "),
    ],
)
def test_options_that_make_no_sense(options: tuple[str, ...], words: str) -> None:
    asked = CliRunner().invoke(app, list(options))
    assert isinstance(asked.exception, shoal.SettingsError)
    assert words in str(asked.exception)


def test_shoal_train_with_a_boss_and_one_worker(
    start_warm: Callable[..., Any], tmp_path: Path
) -> None:
    """Which was refused because of a sync that there is none of. The first lines say who works."""
    small = ("--model", "residual-mlp", "--data", "sine", "--threads", "1", "--batch-size", "2048")
    run = start_warm(
        *SHOAL, "train", "--boss", "--workers", "1", *small, "--epochs", "1", "--out", str(tmp_path)
    )
    assert run.end() == 0, run.said
    assert "a boss and 1 worker, one stage each over zmq" in run.out


STRANGE = """
import sys
from shoal.boss.hand import Hand

send = Hand._send

def strangely(self, tree, tag):
    what = tag.split()[0]
    if what == "report":
        tree = "all is well"
    if what in ("output", "loss", "norms"):
        tree = [1]
    send(self, tree, tag)

Hand._send = strangely
from shoal.cli.main import app
app(sys.argv[1:])
"""


def test_workers_that_answer_strangely_are_named(
    start_warm: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A report that was none ended the thread that tends the link; other answers were errors of
    Python's, and nobody knew whose."""
    script = tmp_path / "strange.py"
    script.write_text(STRANGE)
    other = Office(tmp_path)
    for _ in range(2):
        start_warm(SHOAL[0], str(script), "worker", "--boss", f"127.0.0.1:{other.port}")
    with other.make_boss(2) as boss:
        model = boss.place(seeded(), cuts=["1"])
        boss.optimizer(torch.optim.SGD, lr=0.1)
        for call in (
            lambda: model(rows()),
            lambda: boss.train_step(rows(), rows(), loss=F.mse_loss),
            lambda: boss.clip_grad_norm_(1.0),
        ):
            with pytest.raises(shoal.WireError, match=r"worker \d \(.*\) sent something else than"):
                call()
        until(lambda: len(caplog.records) == 2, "a line for each of them")
        assert all("'report'" in record.getMessage() for record in caplog.records)
        assert model.state_dict()
