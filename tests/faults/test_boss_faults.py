"""Boss and workers when something goes wrong: named, survived, and usable afterwards.

Workers are shared by the tests; those that do not survive one are replaced.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zmq
from boss_workers import Office, quiet, row_of_layers, rows, works
from processes import ENOUGH_S, PROMPT_S, SHOAL, Running, until
from torch import nn
from typer.testing import CliRunner
from warm import Nursery
from wire_log import Log

import shoal
from shoal.boss.boss import Boss
from shoal.boss.calls import Application, Hired, Ready, Roster, encode, read_call
from shoal.cli.main import app
from shoal.version import VERSION
from shoal.wire.zmq_link import ZmqLink
from shoal.wire.zmq_sockets import Card

HUNG_S = 3.0
NAMED_S = 10.0
"""The promise, for a worker that dies or hangs."""

LAYERS = '''
import os

import torch
from torch import nn


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("no way back")


class Picky(nn.Module):
    """Branches, so that it cannot be read by torch.fx, and is kept whole."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        if x.sum() > 1000:
            raise ValueError("this is too much")
        out = self.linear(x)
        return _Backward.apply(out) if x.sum() < -1000 else out


class Held(nn.Module):
    """Busy with what is large, until there is a file of this name."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def forward(self, x):
        while x.sum() > 1000 and not os.path.exists(self.path):
            continue
        return x
'''
HEIR = """
from boss_layers_differing import Picky as Base

class Picky(Base):
    pass
"""
MODULES = {
    "boss_layers_allowed": (LAYERS, LAYERS),
    "boss_layers_differing": (LAYERS, LAYERS + "# of another version\n"),
    "boss_layers_strange": (LAYERS, LAYERS),
    "boss_layers_heir": (HEIR, HEIR),
}
"""The user's own files: on the boss's host, and on the workers'."""
ALLOWED = tuple(
    word for name in ("allowed", "differing", "heir") for word in ("--allow", f"boss_layers_{name}")
)


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Office]:
    folder = tmp_path_factory.mktemp("office")
    homes = folder / "here", folder / "there"
    for number, home in enumerate(homes):
        home.mkdir()
        for name, sources in MODULES.items():
            (home / f"{name}.py").write_text(sources[number])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Office(folder, *ALLOWED, nursery=nursery, PYTHONPATH=str(homes[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(homes[0])
        try:
            made.start(2)  # before there is a boss
            yield made
        finally:
            made.close()
            torch.set_num_threads(threads)


@pytest.fixture
def boss(office: Office) -> Boss:
    """With two workers, shared by tests that leave it as it was."""
    return office.boss(2)


@pytest.fixture
def own_boss(office: Office) -> Iterator[Callable[..., Boss]]:
    """Makes a boss of one's own; the workers are those that there are."""
    made: list[Boss] = []

    def make(workers: int, **options: Any) -> Boss:
        office.need(workers)
        made.append(office.make_boss(workers, **options))
        return made[-1]

    office.close_boss()
    yield make
    for each in made:
        each.close()


def picky(module: str = "boss_layers_allowed") -> nn.Sequential:
    torch.manual_seed(0)
    layer = import_module(module).Picky()
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), layer)


def name_of(boss: Boss, rank: int) -> str:
    worker = boss.status().workers[rank - 1]
    return f"worker {rank} ({worker.host}, pid {worker.pid})"


# -- an exception on a worker ----------------------------------------------------------------------

LARGE = torch.full((4, 6), 1e6)


def raise_in_forward(boss: Boss) -> None:
    boss.place(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), cuts=["1"])(torch.ones(4, 7))


def raise_in_own_code(boss: Boss) -> None:
    model = boss.place(picky(), cuts=["2"])
    model.load_state_dict({n: torch.ones_like(t) for n, t in model.state_dict().items()})
    boss.place(nn.Sequential(nn.ReLU(), picky()[2]), cuts=["1"])(LARGE)


def raise_in_backward(boss: Boss) -> None:
    """Which nobody waits for, where no gradients come back: it is told of by what comes next."""
    model = boss.place(nn.Sequential(nn.Identity(), picky()[2]), cuts=["1"])
    model(-LARGE).sum().backward()
    model(rows())


def raise_in_loss(boss: Boss) -> None:
    boss.place(row_of_layers(2), cuts=["1"])
    boss.optimizer(torch.optim.SGD, lr=0.1)
    boss.train_step(rows(), torch.full((4,), 99), loss=F.cross_entropy)


def raise_in_optimizer(boss: Boss) -> None:
    """Whose orders nobody waits for: it is told of by the next that somebody does."""
    model = boss.place(row_of_layers(2), cuts=["1"])
    optimizer = boss.optimizer(torch.optim.SGD, lr=0.1)
    model(rows()).sum().backward()
    optimizer.param_groups[0]["lr"] = "much"
    optimizer.step()
    model(rows())


TROUBLES: dict[str, tuple[Callable[[Boss], None], int | None, str, str]] = {
    "forward": (raise_in_forward, 1, "RuntimeError", "(4x7 and 6x6)"),
    "own code": (raise_in_own_code, 2, "ValueError", "this is too much"),
    "backward": (raise_in_backward, 2, "ArithmeticError", "no way back"),
    "loss": (raise_in_loss, 2, "IndexError", "Target 99 is out of bounds"),
    "optimizer": (raise_in_optimizer, None, "TypeError", ""),
}
"""What goes wrong, on which worker, with what."""


@pytest.mark.parametrize("name", TROUBLES)
def test_an_exception_on_a_worker_reaches_the_script(boss: Boss, name: str) -> None:
    """With the worker's name and its traceback. Then everything works as before."""
    do, rank, kind, text = TROUBLES[name]
    for _ in range(2):
        with pytest.raises(shoal.WorkerError) as caught:
            do(boss)
        error = caught.value
        assert error.worker in (
            [name_of(boss, rank)] if rank else [name_of(boss, r) for r in (1, 2)]
        )
        assert error.kind == kind
        assert text in error.text
        assert str(error).startswith(f"{error.worker}: {kind}: ")
        assert "Traceback (most recent call last)" in error.remote_traceback
        assert kind in error.remote_traceback
        if name == "own code":
            assert "boss_layers_allowed.py" in error.remote_traceback
            assert 'raise ValueError("this is too much")' in error.remote_traceback
        works(boss)


@contextmanager
def frozen_for(boss: Boss, seconds: float) -> Iterator[None]:
    """All workers, so that orders are waiting for them when they go on."""
    pids = [worker.pid for worker in boss.status().workers]

    def go_on() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    later = threading.Timer(seconds, go_on)
    later.start()
    try:
        yield
    finally:
        later.join()


def test_a_step_that_failed_has_moved_nothing(boss: Boss) -> None:
    """The worker that failed went on with the update that was ordered behind, with what gradients
    it had; the others did not."""
    model = boss.place(row_of_layers(2), cuts=["1"], microbatches=4)
    boss.optimizer(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    before = model.state_dict()
    with frozen_for(boss, 0.3), pytest.raises(shoal.WorkerError, match="out of bounds"):
        boss.train_step(rows(), torch.tensor([0, 1, 2, 99]), loss=F.cross_entropy)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    boss.train_step(rows(), torch.tensor([0, 1, 2, 3]), loss=F.cross_entropy)
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


def test_a_loss_that_did_not_arrive_is_not_taken_for_known(boss: Boss) -> None:
    """The order that brought it was dropped, because of one before it that had failed; after that
    the last worker took the loss from before."""
    model = boss.place(row_of_layers(2), cuts=["1"])
    optimizer = boss.optimizer(torch.optim.SGD, lr=0.0)
    boss.train_step(rows(), rows() + 5, loss=F.mse_loss)
    with frozen_for(boss, 0.3):
        optimizer.param_groups[0]["lr"] = "much"
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.0
        with pytest.raises(shoal.WorkerError, match="TypeError"):
            boss.train_step(rows(), rows() + 5, loss=F.l1_loss)
    expected = F.l1_loss(model(rows()), rows() + 5)
    assert boss.train_step(rows(), rows() + 5, loss=F.l1_loss).item() == expected.item()


def test_what_is_told_behind_an_order_that_fails_is_not_lost(boss: Boss) -> None:
    """Workers drop it, so it is told again, or the script hears of it: a learning rate was the old
    one from then on, and a model or an optimizer the one before."""
    plain = row_of_layers(2)
    model = boss.place(copy.deepcopy(plain), cuts=["1"])
    optimizer = boss.optimizer(torch.optim.SGD, lr=0.5)

    def fail() -> None:
        """Which is heard of later, since all are frozen."""
        optimizer.param_groups[0]["lr"] = "much"
        model(rows()).sum().backward()
        frozen.enter_context(frozen_for(boss, 0.3))
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1

    with ExitStack() as frozen:
        fail()
        optimizer.step()
        with pytest.raises(shoal.WorkerError, match="TypeError"):
            model.state_dict()
    optimizer.step()
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(rows()).sum().backward()
    alone.step()
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())
    with ExitStack() as frozen:
        fail()
        with pytest.raises(shoal.WorkerError, match="TypeError"):
            boss.optimizer(torch.optim.SGD, lr=0.5)
    with pytest.raises(shoal.ModelError, match="this optimizer is gone from the workers"):
        optimizer.step()
    optimizer = boss.optimizer(torch.optim.SGD, lr=0.5)
    with ExitStack() as frozen:
        fail()
        with pytest.raises(shoal.WorkerError, match="TypeError"):
            boss.place(row_of_layers(2), cuts=["1"])
    with pytest.raises(shoal.WorkerError, match="--allow boss_layers_strange"):
        boss.place(picky("boss_layers_strange"), cuts=["2"])
    with pytest.raises(shoal.ModelError, match="another model has been placed since"):
        model(rows())
    works(boss)


def test_backward_from_before_an_error(boss: Boss) -> None:
    """Workers have dropped what it needs; they say so, and not KeyError."""
    model = boss.place(row_of_layers(2), cuts=["1"])
    out = model(rows())
    with pytest.raises(shoal.WorkerError):
        model(torch.ones(4, 7))
    with pytest.raises(RuntimeError, match=r"from before an error .* Call the model again"):
        out.sum().backward()
    works(boss)


# -- the user's own classes ------------------------------------------------------------------------


def test_a_class_that_is_allowed_and_the_same(boss: Boss) -> None:
    plain = picky()
    model = boss.place(picky(), cuts=["2"])
    assert torch.equal(model(rows()), plain(rows()))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("boss_layers_strange", ["--allow boss_layers_strange", "boss_layers_strange:Picky"]),
        ("boss_layers_differing", ["boss_layers_differing.py is not the same as the boss's"]),
        ("boss_layers_heir", ["boss_layers_differing.py is not the same as the boss's"]),
    ],
)
def test_a_class_that_is_not_allowed_or_not_the_same(
    boss: Boss, module: str, words: list[str]
) -> None:
    with pytest.raises(shoal.WorkerError) as caught:
        boss.place(picky(module), cuts=["2"])
    assert caught.value.worker == name_of(boss, 2)
    assert caught.value.kind == "ModelError"
    for each in words:
        assert each in caught.value.text
    works(boss)


def test_a_class_that_workers_cannot_find(boss: Boss) -> None:
    """Is refused here, before anything moves."""

    class Inner(type(picky()[2])):  # type: ignore[misc]
        pass

    with pytest.raises(shoal.ModelError, match="at the top level of a file"):
        boss.place(nn.Sequential(nn.Linear(6, 6), Inner()), cuts=["1"])
    works(boss)


# -- strangers at the port -------------------------------------------------------------------------

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
BYTES = [
    b"",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    random.Random(1).randbytes(5000),
    GREETING + random.Random(2).randbytes(1000),
]


def knock(port: int, data: bytes) -> None:
    address = ("127.0.0.1", port)
    # It may have hung up already.
    with suppress(OSError), socket.create_connection(address, timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            continue


def test_garbage_at_the_port_costs_one_line(own_boss, office: Office, log: Log) -> None:
    """Of each kind, however often it comes."""
    boss = own_boss(2)
    for data in BYTES * 3:
        knock(office.port, data)
    works(boss)
    until(lambda: log.lines, "a line in the log")
    reasons = {line.rpartition(": ")[2] for line in log.lines}
    assert len(reasons) == len(log.lines) <= 2, log.lines
    assert all("rank 0 refused a caller " in line for line in log.lines)
    boss.close()
    works(own_boss(2))


def test_a_stranger_that_speaks_zmq_costs_one_line(boss: Boss, office: Office, log: Log) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(office.listen)
        for content in (b"hello", b"\xff" * 1000, b"{}", b'{"type":"place"}', bytes(10**5)):
            stranger.send(content)
        stranger.send_multipart([b"a", b"b", b"c"])
        until(lambda: log.lines, "it is told of")
        works(boss)
        assert not stranger.poll(0)  # it is told nothing
        log.one("rank 0 ignores a stranger", "what it says is no call")


def test_strangers_that_pretend_to_be_workers(boss: Boss, office: Office, log: Log) -> None:
    """The boss has all it wants: they are told so, and it goes on."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(office.listen)
        stranger.send(encode(Ready(1, Card("tcp://127.0.0.1:1", "token"))))
        stranger.send(encode(Application("nowhere", 1, "cpu", 1, "0.0", "0.0")))
        until(lambda: stranger.poll(0), "an answer")
        assert b"install the same" in stranger.recv()
        works(boss)
    assert log.lines == []


# -- two bosses, too many workers ------------------------------------------------------------------


def test_a_second_boss_at_the_port_is_told_who_has_it(boss: Boss, office: Office) -> None:
    with pytest.raises(shoal.MeetingError) as caught:
        office.make_boss(1)
    told = str(caught.value)
    status = boss.status()
    assert f"{office.listen} is taken by another boss: {status.script} (pid {os.getpid()}" in told
    for worker in status.workers:
        assert f"{worker.host} (pid {worker.pid})" in told
    works(boss)


def test_a_port_that_some_other_program_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(shoal.MeetingError, match="taken by some other program"):
            shoal.Boss(where, 1, notify=quiet)


def test_addresses_that_are_none() -> None:
    for listen in ("1024", "tcp://:1024", "tcp://127.0.0.1", "tcp://127.0.0.1:123456", ""):
        with pytest.raises(shoal.SettingsError, match=r"no address of a boss: tcp://HOST:PORT is"):
            shoal.Boss(listen, 1, notify=quiet)
    with pytest.raises(shoal.SettingsError, match="at least one"):
        shoal.Boss("tcp://127.0.0.1:1", 0)
    asked = CliRunner().invoke(app, ["worker"], env={"MODEL_HOST": "", "MODEL_PORT": ""})
    assert isinstance(asked.exception, shoal.SettingsError)
    assert "--boss" in str(asked.exception)


def test_a_boss_that_waits_says_for_whom_and_how_long(office: Office) -> None:
    """Nobody comes; somebody calls who is no worker."""
    told: list[str] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    alone = Office(Path())
    with context, context.socket(zmq.DEALER) as other:
        other.linger = 0
        other.connect(alone.listen)
        other.send(encode(Application("old", 7, "cpu", 1, "0.0", "0.0")))
        with pytest.raises(shoal.MeetingError, match=r"2 of 2 workers .* That was long enough"):
            alone.make_boss(2, wait_s=1.5, notify=told.append)
    assert f"waiting for 2 of 2 workers at {alone.listen}" in told[-2]
    assert "turned away: old, pid 7 (it has shoal 0.0 and torch 0.0" in told[-2]
    assert told[-1] == ""


def test_a_boss_whose_workers_never_answer_ends_when_it_has_waited_enough() -> None:
    """One came by two connections, and was taken for two; what followed had no end, and the boss
    said nothing any more."""
    told: list[str] = []
    alone = Office(Path())
    anna, bert = (
        encode(Application(name, 7, "cpu", 1, VERSION, str(torch.__version__), f"id of {name}"))
        for name in ("anna", "bert")
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, ExitStack() as stack:
        old, new, other = (stack.enter_context(context.socket(zmq.DEALER)) for _ in range(3))
        for each in (old, new, other):
            each.linger = 0
            each.connect(alone.listen)
        calls = [(old, anna), (new, anna)]

        def apply_again(text: str) -> None:
            told.append(text)
            if len(told) == 3:
                calls.append((other, bert))
            for each, application in calls:
                each.send(application)

        apply_again("")
        with pytest.raises(shoal.MeetingError) as caught:
            alone.make_boss(2, wait_s=3.0, notify=apply_again)
    assert "waiting for 1 of 2 workers" in told[2]
    assert "here: anna, pid 7." in told[2]
    silent = "hired, and no word since from: anna, pid 7; bert, pid 7."
    assert str(caught.value).endswith(f"{silent} That was long enough.")
    assert "waiting for 2 of 2 workers" in str(caught.value)


def test_nobody_waits_for_workers_any_more_where_await_was_cancelled() -> None:
    """As Ctrl-C does it: the thread that waited for them waited for ever, and the program too."""
    alone = Office(Path())

    async def wait() -> None:
        waiting = shoal.AsyncBoss.setup_host(1, alone.listen, notify=quiet)
        await asyncio.wait_for(waiting, timeout=0.7)

    begun = time.monotonic()
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(wait())  # which ends when all threads have
    assert time.monotonic() < begun + 0.7 + PROMPT_S
    with pytest.raises(shoal.MeetingError, match="That was long enough"):
        alone.make_boss(1, wait_s=0.5)  # at the same port


def test_more_workers_than_are_wanted_wait_for_the_next_boss(office: Office, own_boss) -> None:
    boss = own_boss(2)
    (more,) = office.start()
    more.until_says("has all the workers it wants (2)")
    assert f"(pid {os.getpid()} of " in more.err
    works(boss)
    boss.close()
    works(own_boss(3))
    assert "as worker" in more.out


# -- a worker that goes ----------------------------------------------------------------------------


def until_lost(boss: Boss) -> tuple[str, float]:
    """A script goes on with its steps until it hears of it; what it hears, and how soon."""
    begun = time.monotonic()

    def go_on() -> None:
        model = boss.place(row_of_layers(2), cuts=["1"])
        while time.monotonic() < begun + ENOUGH_S:
            model(rows()).sum().backward()

    with pytest.raises(shoal.PeerLost) as caught:
        go_on()
    return str(caught.value), time.monotonic() - begun


def test_a_worker_that_hangs_is_named_and_may_come_back(office: Office, own_boss) -> None:
    assert inspect.signature(Boss).parameters["hung_s"].default <= NAMED_S
    boss = own_boss(2, hung_s=HUNG_S)
    works(boss)
    victim, name = boss.status().workers[0].pid, name_of(boss, 1)
    os.kill(victim, signal.SIGSTOP)
    try:
        told, seconds = until_lost(boss)
    finally:
        os.kill(victim, signal.SIGCONT)
    assert f"lost {name}" in told
    assert "it gave no sign of life" in told
    assert seconds < HUNG_S + 2
    boss.close()
    again = own_boss(office.num_alive)
    works(again)
    assert victim in [worker.pid for worker in again.status().workers]


def test_a_worker_that_is_killed_is_named(office: Office, own_boss) -> None:
    boss = own_boss(2)
    works(boss)
    other, victim = boss.status().workers
    name = name_of(boss, 2)
    os.kill(victim.pid, signal.SIGKILL)
    told, seconds = until_lost(boss)
    assert told.startswith(f"the boss ({socket.gethostname()}) lost {name}: ")
    assert seconds < NAMED_S
    until(lambda: boss.status().workers[1].is_lost, "the status tells of it")
    boss.close()
    office.worker(other.pid).until_says("has left")
    again = own_boss(office.num_alive)
    works(again)
    assert other.pid in [worker.pid for worker in again.status().workers]


def test_a_worker_that_is_busy_for_too_long(office: Office, own_boss, tmp_path: Path) -> None:
    """It is named, and not who waits for it. That one ended: the boss had called off, and it waited
    as long as the boss does for the busy one to hear of it."""
    seconds = 2.0
    boss = own_boss(2, timeout_s=seconds)
    busy, waiting = name_of(boss, 1), name_of(boss, 2)
    free = tmp_path / "free"
    held = import_module("boss_layers_allowed").Held(str(free))
    model = boss.place(nn.Sequential(held, nn.ReLU()), cuts=["1"])
    assert torch.equal(model(rows()), rows().relu())  # compared here: that must not be held up
    with pytest.raises(shoal.WireError, match=re.escape(f"waited {seconds:g} s for {waiting}; ")):
        model(LARGE)
    until(lambda: [w.is_busy for w in boss.status().workers] == [True, False], "both have told")
    with pytest.raises(shoal.WireError, match=re.escape(f"Busy, as last heard: {busy}. ")) as told:
        model(rows())
    assert f"waited {seconds:g} s for {busy}, {waiting}; " in str(told.value)
    free.touch()
    assert torch.equal(model(rows()), rows().relu())
    works(boss)
    pids = {worker.pid for worker in boss.status().workers}
    boss.close()
    again = own_boss(office.num_alive)
    works(again)
    assert pids <= {worker.pid for worker in again.status().workers}


# -- a boss that goes ------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, shoal
from torch import nn

with shoal.Boss(sys.argv[1], 2) as boss:
    model = boss.place(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), cuts=["1"])
    for number in range(10**9):
        model(torch.ones(4, 6)).sum().backward()
        if number == 5:
            print("works", flush=True)
"""


def test_a_boss_that_raises_tells_its_workers_why(office: Office, own_boss) -> None:
    def script() -> None:
        with own_boss(2) as boss:
            works(boss)
            raise ValueError("a mistake in the script")

    with pytest.raises(ValueError, match="a mistake in the script"):
        script()
    reason = "has left: it ended with ValueError: a mistake in the script"
    until_two_say(office.workers, dict.fromkeys(office.workers, 0), reason)
    works(own_boss(2))


def test_a_boss_that_ends_with_an_error_of_a_worker(office: Office, own_boss) -> None:
    """The others got the beginning of its traceback, cut off somewhere."""
    boss = own_boss(2)
    with pytest.raises(shoal.WorkerError, match="too much"), boss:
        raise_in_own_code(boss)
    reason = r"has left: it ended with WorkerError: worker 2 \(.*\): ValueError: this is too much\n"
    told = [worker for worker in office.workers if worker.process.poll() is None]
    until(
        lambda: sum(bool(re.search(reason, each.out)) for each in told) == 2, "both have been told"
    )
    assert not any("There:" in worker.out for worker in told)


def test_a_boss_that_is_killed_or_interrupted(office: Office, start_warm, tmp_path: Path) -> None:
    """Its workers wait for the next. Earlier tests may have left more of them than a boss wants."""
    office.close_boss()
    office.need(2)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    interrupted = start_warm(SHOAL[0], str(script), office.listen, OMP_NUM_THREADS="1")
    interrupted.until_says("works")
    assert interrupted.interrupt() < PROMPT_S
    assert interrupted.process.returncode in (-signal.SIGINT, 130)  # a shell shows both as 130
    assert interrupted.err.rstrip().endswith("KeyboardInterrupt")
    assert interrupted.err.count("Traceback") == 1

    workers = [worker for worker in office.workers if worker.process.poll() is None]
    until_two_say(workers, dict.fromkeys(workers, 0), "ended with KeyboardInterrupt")
    said = {worker: len(worker.out) for worker in workers}
    killed = start_warm(SHOAL[0], str(script), office.listen, OMP_NUM_THREADS="1")
    killed.until_says("works")
    killed.process.kill()
    killed.end()
    until_two_say(workers, said, "lost the boss")
    works(office.boss(2))
    assert all(worker.process.poll() is None for worker in workers)


def until_two_say(workers: list[Running], said: dict[Running, int], words: str) -> None:
    """said: how much each of them had said before."""
    until(
        lambda: sum(words in worker.out[said[worker] :] for worker in workers) == 2,
        f"two workers say {words!r}",
    )


def test_a_worker_that_is_told_where_by_the_environment_and_ends_with_its_first_boss(start) -> None:
    other = Office(Path())
    worker = start(
        *SHOAL, "worker", "--once", "--threads", "1",
        MODEL_HOST="127.0.0.1", MODEL_PORT=str(other.port),
    )  # fmt: skip
    with other.make_boss(1) as boss:
        works(boss)
    assert worker.end() == 0
    assert worker.out.splitlines()[-1].endswith("has left")


class FakeBoss:
    """One that hires, and dies at some point before there is a crew."""

    def __init__(self, office: Office, cards: list[Card]) -> None:
        """cards: of the roster; none: there will be no roster."""
        self.num_ready = 0
        self._cards = cards
        self.link = ZmqLink(0, 3, port=office.port, on_call=self._on_call)

    def _on_call(self, caller: bytes, content: bytes, key: str) -> bytes | None:
        call = read_call(content)
        if isinstance(call, Application):
            return encode(Hired(1, 1, 3, 1.0, 5.0))
        if not isinstance(call, Ready):  # it could not link up, and says so
            return None
        self.num_ready += 1
        if not self._cards:
            return None
        cards = [self.link.card, call.card, *self._cards]
        return encode(Roster(call.round, cards, ["the boss", "worker 1", "worker 2"]))


@pytest.mark.parametrize(
    "cards", [[], [Card("tcp://127.0.0.1:1", "gone")]], ids=["before the roster", "after it"]
)
def test_a_boss_that_dies_while_it_hires(office: Office, cards: list[Card]) -> None:
    """The worker waits for the next one; it ended, where another worker could not be reached."""
    office.close_boss()
    office.need(2)
    num_told = [worker.out.count("could not work for") for worker in office.workers]
    fake = FakeBoss(office, cards)
    with fake.link:
        fake.link.tend(lambda: fake.num_ready >= 2, ENOUGH_S)
        if cards:
            told = lambda: [worker.out.count("could not work for") for worker in office.workers]  # noqa: E731
            until(lambda: sum(told()) >= sum(num_told) + 2, "both have told of it")
    works(office.boss(2))


def test_ctrl_c_on_workers(office: Office, own_boss) -> None:
    """One that works, and one that waits."""
    boss = own_boss(2)
    works(boss)
    name = name_of(boss, 2)
    waiting, working = (office.worker(worker.pid) for worker in boss.status().workers)
    assert working.interrupt() < PROMPT_S
    told, seconds = until_lost(boss)
    assert told == f"{name} has left: it ended with KeyboardInterrupt"
    assert seconds < NAMED_S
    boss.close()
    waiting.until(lambda: "works for" not in waiting.out.splitlines()[-1])
    assert waiting.interrupt() < PROMPT_S
    for worker in (working, waiting):
        assert worker.process.returncode == 130
        assert "Traceback" not in worker.said


# -- all of it by one command ----------------------------------------------------------------------


def train(*options: str) -> tuple[str, ...]:
    small = ("--model", "residual-mlp", "--data", "sine", "--threads", "1", "--cut", "fc3")
    small += ("--batch-size", "512")
    return (*SHOAL, "train", "--boss", "--workers", "2", *small, *options)


def test_shoal_train_with_a_boss(start, tmp_path: Path) -> None:
    run = start(*train("--epochs", "1", "--out", str(tmp_path)))
    assert run.end() == 0, run.said
    rows_shown = [line.split()[0] for line in run.out.splitlines() if "fc" in line]
    assert rows_shown == ["0", "1"]
    assert "fc1, fc2 " in run.out


# -- many ------------------------------------------------------------------------------------------

MANY = 32
FORKS = """
import os, sys
import torch
from shoal.boss.applying import Employer
from shoal.boss.worker import serve
from shoal.pipeline.known import Allowed
from shoal.pipeline.portable import to_data
from shoal.pipeline.rebuild import from_data
from shoal.pipeline.staged import StageModule
from shoal.pipeline.trace import trace
from shoal.wire.open_link import LinkSettings

# What every process does once is done once: else 32 of them would spend a minute on it.
import torch._dynamo  # which the first optimizer brings
layers = torch.nn.Sequential(torch.nn.Linear(1, 1))
from_data(to_data(StageModule(layers, trace(layers)))[0], Allowed(frozenset()))
endpoint, count = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
children = []
for _ in range(count):
    if not (child := os.fork()):
        serve(
            Employer(endpoint, "127.0.0.1", LinkSettings()),
            allowed=Allowed(frozenset()),
            device=torch.device("cpu"),
            once=True,
            notify=lambda text: None,
            tell=lambda text: None,
        )
        os._exit(0)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print("ended", sum(codes), len(codes), flush=True)
"""


def test_32_workers_join_train_and_leave(start_warm, tmp_path: Path) -> None:
    """Each with one layer. All are seen while the boss does something else: it once read of one
    worker in a quarter of a second, and then nobody could ask for the status."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    other = Office(tmp_path)
    run = start_warm(SHOAL[0], str(script), other.listen, str(MANY))
    with other.make_boss(MANY) as boss:
        works(boss)
        torch.manual_seed(0)
        model = boss.place(
            row_of_layers(MANY), cuts=[str(n) for n in range(1, MANY)], microbatches=4
        )
        optimizer = boss.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(5):
            loss = model(rows(8)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            boss.train_step(rows(8), rows(8), loss=F.mse_loss)
        until(lambda: [w.step for w in boss.status().workers] == [10] * MANY, "all have told")
        time.sleep(0.5)  # the script does something else, and reports of all of them pile up
        asked = CliRunner().invoke(app, ["status", f"127.0.0.1:{other.port}"])
        assert asked.exit_code == 0, asked.exception
        assert f"{MANY} of {MANY} workers" in asked.output
        assert max(worker.last_seen_s for worker in boss.status().workers) < 6
    assert run.end() == 0
    assert run.out == f"ended 0 {MANY}\n", run.said
