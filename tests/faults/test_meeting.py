"""Ranks of `shoal train` that meet, and those that cannot: real processes, real sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shoal.network import interfaces, reserve_port

SHOAL = str(Path(sys.executable).with_name("shoal"))
TRAIN = ["train", "--model", "residual-mlp", "--data", "sine", "--epochs", "1"]
TRAIN += ["--batch-size", "1024", "--threads", "1"]

ENOUGH_S = 60.0
"""For what has to happen, however slow the machine."""
PROMPT_S = 3.0
"""Ctrl-C is promised in under a second; a machine that runs other tests may be slower."""
LEFT_S = 15.0
"""On top of --timeout: to start Python and torch, and to tell the others."""


class Rank:
    """One process of a crew. What it says goes to files, which can be read while it runs."""

    def __init__(self, folder: Path, argv: list[str], environment: dict[str, str]) -> None:
        self.out_path, self.err_path = folder / "out", folder / "err"
        self.begun = time.monotonic()
        with self.out_path.open("wb") as out, self.err_path.open("wb") as err:
            self.process = subprocess.Popen(
                argv, env=environment, cwd=folder, stdout=out, stderr=err
            )

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    @property
    def said(self) -> str:
        return self.out + self.err

    def end(self, timeout_s: float = ENOUGH_S) -> int:
        return self.process.wait(timeout_s)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + ENOUGH_S
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.said}"
            assert time.monotonic() < deadline, f"nothing happened; it said: {self.said}"
            time.sleep(0.02)

    def until_waiting(self) -> None:
        self.until(lambda: "waiting for" in self.said)

    def listens_on(self) -> set[str]:
        return {
            c.laddr.ip
            for c in psutil.Process(self.process.pid).net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        }

    def reason(self) -> str:
        """The one paragraph of a rank that failed to meet."""
        assert self.end() == 1, self.said
        assert "Traceback" not in self.err
        assert self.err.count("shoal: ") == 1
        return self.err.partition("): ")[2].strip()

    def interrupt(self) -> None:
        """Ctrl-C; it must end promptly, with the right code and without a word."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        assert self.end() == 130
        assert time.monotonic() - begun < PROMPT_S
        assert self.err.strip() == ""


Start = Callable[..., Rank]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a rank; whatever is still running afterwards is killed."""
    started: list[Rank] = []
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        and not key.startswith(("SLURM_", "LOCAL_", "TORCHELASTIC_"))
    }

    def begin(
        *options: str,
        environment: dict[str, str] | None = None,
        program: tuple[str, ...] = (SHOAL,),
        timeout_s: float = 30,
    ) -> Rank:
        folder = tmp_path / f"process{len(started)}"
        folder.mkdir()
        argv = [*program, *TRAIN, "--out", str(tmp_path / "runs"), "--timeout", f"{timeout_s:g}"]
        started.append(Rank(folder, [*argv, *options], {**clean, **(environment or {})}))
        return started[-1]

    yield begin
    for rank in started:
        if rank.process.poll() is None:
            rank.process.kill()
        rank.process.wait(10)


@pytest.fixture
def place() -> str:
    return f"tcp://127.0.0.1:{reserve_port()}"


def at(place: str, rank: int, size: int = 2) -> list[str]:
    return ["--init", place, "--rank", str(rank), "--world-size", str(size)]


def assert_trained(*ranks: Rank) -> None:
    for rank in ranks:
        assert rank.end() == 0, rank.said
        assert "Traceback" not in rank.said
        assert "warn" not in rank.said.lower()
        assert "2 replicas" in rank.said


# -- every way there -------------------------------------------------------------------------------


def test_by_tcp(start: Start, place: str) -> None:
    """The leader listens on the one address, says whom it waits for, and trains with them."""
    leader = start(*at(place, 0), "--json")
    leader.until_waiting()
    assert leader.listens_on() == {"127.0.0.1"}
    assert re.search(r"waiting for rank 1 of 2, \d+ s", leader.err)
    other = start(*at(place, 1))
    assert_trained(leader, other)
    summary = json.loads(leader.out)
    assert summary["layout"] == {"replicas": 2, "stages": 1}
    assert summary["hosts"] == [socket.gethostname()] * 2


def test_by_an_ipv6_address(start: Start) -> None:
    if "::1" not in [ip for ips in interfaces().values() for ip in ips]:
        pytest.skip("this host has no IPv6 loopback address")
    place = f"tcp://[::1]:{reserve_port()}"
    ranks = [start(*at(place, rank)) for rank in range(2)]
    ranks[0].until(ranks[0].listens_on)
    assert "::1" in ranks[0].listens_on()
    assert not ranks[0].listens_on() & {"::", "0.0.0.0"}
    assert_trained(*ranks)


def test_by_a_shared_file(start: Start, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/meeting"
    leader = start(*at(place, 0))
    leader.until_waiting()
    assert (tmp_path / "meeting").exists()
    assert_trained(leader, start(*at(place, 1)))
    assert not (tmp_path / "meeting").exists()


def test_by_variables(start: Start) -> None:
    port = reserve_port()
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    ranks = [start(environment={**variables, "RANK": str(rank)}) for rank in range(2)]
    assert_trained(*ranks)


def test_under_torchrun(start: Start) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    program = (*torchrun, "--master-port", str(reserve_port()), "-m", "shoal")
    both = start(program=program, environment={"OMP_NUM_THREADS": "1"})
    assert both.end() == 0, both.said
    assert both.out.count("2 replicas") == 2


def test_under_slurm(start: Start) -> None:
    variables = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    ranks = [
        start(environment={**variables, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
        for rank in range(2)
    ]
    assert_trained(*ranks)


# -- who came --------------------------------------------------------------------------------------


def test_two_processes_with_one_rank(start: Start, place: str) -> None:
    ranks = [start(*at(place, rank, 3)) for rank in (0, 1, 1)]
    reasons = {rank.reason() for rank in ranks}
    assert len(reasons) == 1, "the same sentence for everyone"
    (reason,) = reasons
    assert "Two processes want to be rank 1" in reason
    assert f"pid {ranks[1].process.pid})" in reason
    assert f"pid {ranks[2].process.pid})" in reason


def test_two_leaders(start: Start, place: str) -> None:
    first = start(*at(place, 0))
    first.until(first.listens_on)
    second = start(*at(place, 0))
    assert first.reason() == second.reason()
    assert "Two processes want to be rank 0" in second.reason()


def test_everything_that_differs_is_named_at_once(start: Start, place: str) -> None:
    ranks = [
        start(*at(place, 0, 2), "--lr", "0.1"),
        start(*at(place, 1, 3), "--lr", "0.2", "--seed", "7"),
    ]
    reasons = [rank.reason() for rank in ranks]
    assert reasons[0] == reasons[1]
    for option in ("--world-size", "--lr", "--seed"):
        assert option in reasons[0]
    for rank in range(2):
        assert f"rank {rank} ({socket.gethostname()}, pid {ranks[rank].process.pid})" in reasons[0]


def test_what_is_each_hosts_own_may_differ(start: Start, place: str, tmp_path: Path) -> None:
    first = start(*at(place, 0), "--threads", "2", "--name", "first")
    other = start(*at(place, 1), "--out", str(tmp_path / "elsewhere"), "--device", "cpu")
    assert_trained(first, other)


def test_a_rank_that_never_comes(start: Start, place: str) -> None:
    """Named while waiting and at the end, to everyone who came, and not long after --timeout."""
    ranks = [start(*at(place, rank, 4), timeout_s=4) for rank in (0, 2)]
    reasons = [rank.reason() for rank in ranks]
    assert time.monotonic() - ranks[0].begun < 4 + LEFT_S
    assert reasons[0] == reasons[1]
    assert "still waits for ranks 1, 3 of 4" in reasons[0]
    assert f"Here: rank 0 ({socket.gethostname()}, pid {ranks[0].process.pid})" in reasons[0]
    assert "Check that" in reasons[0]
    assert place.removeprefix("tcp://") in reasons[0]
    for rank in ranks:
        assert re.search(r"waiting for ranks 1, 3 of 4, \d+ s", rank.out)


def test_a_leader_that_is_killed_while_others_wait(start: Start, place: str) -> None:
    leader, other = start(*at(place, 0, 3)), start(*at(place, 1, 3))
    other.until(lambda: "waiting for rank 2 of 3" in other.out)
    leader.process.kill()
    begun = time.monotonic()
    assert f"The leader at {place} left while rank 1" in other.reason()
    assert time.monotonic() - begun < LEFT_S


# -- places where nobody can meet ------------------------------------------------------------------


def test_a_port_in_use(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(8)
        port = taken.getsockname()[1]
        reason = start(*at(f"tcp://127.0.0.1:{port}", 0)).reason()
    assert f"Port {port} of 127.0.0.1 is in use by" in reason
    assert f"(pid {os.getpid()})" in reason
    assert "Choose another port" in reason


def test_an_interface_that_does_not_exist(start: Start, place: str) -> None:
    ranks = [start(*at(place, rank), "--interface", "eth99") for rank in range(2)]
    for rank in ranks:
        reason = rank.reason()
        assert "no interface 'eth99'" in reason
        for name in interfaces():
            assert name in reason


def test_a_leader_on_another_machine_than_it_says(start: Start) -> None:
    reason = start(*at("tcp://203.0.113.9:23456", 0)).reason()
    assert "does not have the address 203.0.113.9" in reason
    for name in interfaces():
        assert name in reason


def test_nobody_listens(start: Start, place: str) -> None:
    rank = start(*at(place, 1), timeout_s=4)
    reason = rank.reason()
    assert time.monotonic() - rank.begun < 4 + LEFT_S
    assert "did not reach rank 0 at " + place.removeprefix("tcp://") in reason
    assert "connection refused" in reason
    assert "Check that rank 0 is running" in reason
    assert "waiting for rank 0 at" in rank.out


@pytest.mark.parametrize("answer", ["silence", "words", "goodbye"])
def test_a_listener_that_is_no_leader(start: Start, answer: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        listener.settimeout(0.1)
        done = threading.Event()

        def serve() -> None:
            guests: list[socket.socket] = []
            while not done.is_set():
                try:
                    guest, _ = listener.accept()
                except TimeoutError:
                    continue
                try:
                    if answer == "words":
                        guest.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)
                except OSError:
                    answer_lost = True  # the guest had gone: the first only looks who is there
                    assert answer_lost
                if answer == "goodbye":
                    guest.close()
                else:
                    guests.append(guest)
            for guest in guests:
                guest.close()

        server = threading.Thread(target=serve)
        server.start()
        try:
            port = listener.getsockname()[1]
            rank = start(*at(f"tcp://127.0.0.1:{port}", 1), timeout_s=3)
            reason = rank.reason()
            assert time.monotonic() - rank.begun < 3 + LEFT_S
        finally:
            done.set()
            server.join()
    assert f"Something listens at 127.0.0.1:{port}, but it is not the leader" in reason


def test_files_that_nobody_can_meet_at(start: Start, tmp_path: Path) -> None:
    foreign = tmp_path / "notes.txt"
    foreign.write_text("not of this program\n")
    folder = start(*at(f"file://{tmp_path}", 0))
    nowhere = start(*at(f"file://{tmp_path}/no/such/folder", 0))
    notes = start(*at(f"file://{foreign}", 0))
    assert f"file://{tmp_path} is a folder" in folder.reason()
    assert f"the folder {tmp_path}/no/such does not exist" in nowhere.reason()
    assert f"{foreign} is left over from an earlier run" in notes.reason()
    assert foreign.read_text() == "not of this program\n", "what is not ours is not touched"


def test_a_file_left_by_a_crew_that_was_killed(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    ranks = [start(*at(f"file://{path}", rank), "--epochs", "1000") for rank in range(2)]
    for rank in ranks:
        rank.until(lambda rank=rank: "1/1000" in rank.out)  # type: ignore[misc]
    for rank in ranks:
        rank.process.kill()
        rank.end()
    late = [start(*at(f"file://{path}", rank)) for rank in range(2)]
    for rank in late:
        assert f"{path} is left over from an earlier run" in rank.reason()
        assert f"rm {path}" in rank.reason()


# -- before anything starts ------------------------------------------------------------------------


def test_faults_of_the_way_and_of_the_settings_come_together(start: Start) -> None:
    rank = start("--init", "tcp://0.0.0.0:23456", "--rank", "2", "--world-size", "2", "--lr", "-1")
    half = start(environment={"RANK": "x"})
    assert rank.end() == 2
    for fault in ("0.0.0.0", "--rank 2", "--lr -1.0"):
        assert fault in rank.err
    assert half.end() == 2
    assert "missing: WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in half.err
    assert "RANK=x" in half.err
    for each in (rank, half):
        assert "Traceback" not in each.err
        assert each.out == ""


# -- Ctrl-C while waiting --------------------------------------------------------------------------


def test_ctrl_c_while_waiting(start: Start, place: str) -> None:
    """A leader, a follower beside its leader, and one that has not found its leader yet."""
    leader = start(*at(place, 0, 3))
    follower = start(*at(place, 1, 3))
    lonely = start(*at(f"tcp://127.0.0.1:{reserve_port()}", 1))
    for rank in (leader, follower, lonely):
        rank.until_waiting()
    for rank in (follower, lonely, leader):
        rank.interrupt()


def test_ctrl_c_at_a_shared_file_leaves_it_usable(start: Start, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/meeting"
    alone = start(*at(place, 1))
    alone.until_waiting()
    alone.interrupt()
    assert_trained(*[start(*at(place, rank)) for rank in range(2)])
    leader = start(*at(place, 0))
    leader.until_waiting()
    leader.interrupt()
    assert not (tmp_path / "meeting").exists()
