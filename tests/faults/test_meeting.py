"""Ranks of `shoal train` that meet, and those that cannot: real processes, real sockets."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from processes import ENOUGH_S, PROMPT_S, SHOAL, Running

from shoal.network import interfaces, reserve_port
from shoal.rendezvous.roll import Fingerprint, call_roll, make_hello
from shoal.rendezvous.store import open_store
from shoal.rendezvous.ways import find_way
from shoal.settings import TrainSettings, shared_settings
from shoal.version import VERSION

TRAIN = ["train", "--model", "residual-mlp", "--data", "sine", "--epochs", "1"]
TRAIN += ["--batch-size", "1024", "--threads", "1"]

LEFT_S = 15.0
"""On top of --timeout: to start Python and torch, and to tell the others."""

Train = Callable[..., Running]


@pytest.fixture
def train(start_warm: Callable[..., Running], tmp_path: Path) -> Train:
    """Starts one process of `shoal train`."""
    return train_by(start_warm, tmp_path)


@pytest.fixture
def train_cold(start: Callable[..., Running], tmp_path: Path) -> Train:
    """As a shell does, with all that Python has to import."""
    return train_by(start, tmp_path)


def train_by(start: Callable[..., Running], folder: Path) -> Train:
    def begin(
        *options: str, timeout_s: float = 30, program: tuple[str, ...] = SHOAL, **environment: str
    ) -> Running:
        fixed = ["--out", str(folder / "runs"), "--timeout", f"{timeout_s:g}"]
        return start(*program, *TRAIN, *fixed, *options, **environment)

    return begin


@pytest.fixture
def place() -> str:
    return f"tcp://127.0.0.1:{reserve_port()}"


def at(place: str, rank: int, size: int = 2) -> list[str]:
    return ["--init", place, "--rank", str(rank), "--world-size", str(size)]


def listeners(rank: Running) -> list[str]:
    """The address of each listening socket."""
    return [
        c.laddr.ip
        for c in psutil.Process(rank.process.pid).net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    ]


def why(rank: Running, limit_s: float = ENOUGH_S) -> str:
    """The one paragraph of a rank that failed to meet."""
    assert rank.end(limit_s) == 1, rank.said
    assert "Traceback" not in rank.err
    assert rank.err.count("shoal: ") == 1
    return rank.err.partition("): ")[2].strip()


def press_ctrl_c(rank: Running) -> None:
    """It must end promptly, with the right code and nothing but that."""
    assert rank.interrupt() < PROMPT_S
    assert rank.process.returncode == 130
    assert rank.err in ("shoal: interrupted.\n", "")  # nobody can say so from inside torch


def assert_trained(*ranks: Running) -> None:
    for rank in ranks:
        assert rank.end() == 0, rank.said
        assert "Traceback" not in rank.said
        assert "warn" not in rank.said.lower()
        assert "2 replicas" in rank.said


# -- every way there -------------------------------------------------------------------------------


def test_by_tcp_with_what_is_each_hosts_own(train_cold: Train, place: str, tmp_path: Path) -> None:
    """The leader listens on the one address, says whom it waits for, and trains with them, though
    they have other threads, names, folders and devices."""
    leader = train_cold(*at(place, 0), "--json", "--threads", "2", "--name", "first")
    leader.until_says("waiting for")
    assert set(listeners(leader)) == {"127.0.0.1"}
    assert re.search(r"waiting for rank 1 of 2, \d+ s", leader.err)
    other = train_cold(*at(place, 1), "--out", str(tmp_path / "elsewhere"), "--device", "cpu")
    assert_trained(leader, other)
    summary = json.loads(leader.out)
    assert summary["layout"] == {"replicas": 2, "stages": 1}
    assert summary["hosts"] == [socket.gethostname()] * 2


def test_by_variables(train: Train) -> None:
    """At an IPv6 address, where there is one; its other spelling, in --init, is read in
    test_ways.py."""
    has_ipv6 = "::1" in [ip for ips in interfaces().values() for ip in ips]
    address = "::1" if has_ipv6 else "127.0.0.1"
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(reserve_port())}
    ranks = [train(RANK=str(rank), **variables) for rank in range(2)]
    ranks[0].until(lambda: address in listeners(ranks[0]))
    assert not set(listeners(ranks[0])) & {"::", "0.0.0.0"}
    assert_trained(*ranks)


def test_by_a_shared_file_that_others_have_left_by_ctrl_c(train: Train, tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    place = f"file://{path}"
    other_path = tmp_path / "other"
    follower, leader = train(*at(place, 1)), train(*at(f"file://{other_path}", 0))
    for rank in (follower, leader):
        rank.until_says("waiting for")
    assert other_path.exists()
    for rank in (follower, leader):
        press_ctrl_c(rank)
    assert not other_path.exists(), "a leader that has given up leaves no file"
    assert_trained(*[train(*at(place, rank)) for rank in range(2)])
    assert not path.exists(), "nor do ranks that have met"


def test_under_torchrun(train_cold: Train) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    program = (*torchrun, "--master-port", str(reserve_port()), "-m", "shoal")
    both = train_cold(program=program, OMP_NUM_THREADS="1")
    assert both.end() == 0, both.said
    assert both.out.count("2 replicas") == 1, "one rank speaks for both"


def test_under_slurm(train: Train) -> None:
    variables = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    ranks = [
        train(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **variables) for rank in range(2)
    ]
    assert_trained(ranks[0])
    assert ranks[1].end() == 0
    assert ranks[1].said == "", "srun shows every task's output: one rank speaks for all"


# -- who came --------------------------------------------------------------------------------------


def test_two_processes_with_one_rank(train: Train, place: str) -> None:
    ranks = [train(*at(place, rank, 3)) for rank in (0, 1, 1)]
    reasons = {why(rank) for rank in ranks}
    assert len(reasons) == 1, "the same sentence for everyone"
    (reason,) = reasons
    assert "Two processes want to be rank 1" in reason
    assert f"pid {ranks[1].process.pid})" in reason
    assert f"pid {ranks[2].process.pid})" in reason


def test_two_leaders(train: Train, place: str) -> None:
    first = train(*at(place, 0))
    first.until(lambda: listeners(first))
    second = train(*at(place, 0))
    assert why(first) == why(second)
    assert "Two processes want to be rank 0" in why(second)


def test_everything_that_differs_is_named_at_once(train: Train, place: str) -> None:
    ranks = [
        train(*at(place, 0, 2), "--lr", "0.1"),
        train(*at(place, 1, 3), "--lr", "0.2", "--seed", "7"),
    ]
    reasons = [why(rank) for rank in ranks]
    assert reasons[0] == reasons[1]
    for option in ("--world-size", "--lr", "--seed"):
        assert option in reasons[0]
    for rank in range(2):
        assert f"rank {rank} ({socket.gethostname()}, pid {ranks[rank].process.pid})" in reasons[0]


def test_a_rank_that_never_comes(train: Train, place: str) -> None:
    """Named while waiting and at the end, to everyone who came, and not long after --timeout."""
    ranks = [train(*at(place, rank, 4), timeout_s=4) for rank in (0, 2)]
    reasons = [why(rank, 4 + LEFT_S) for rank in ranks]
    assert reasons[0] == reasons[1]
    assert "still waits for ranks 1, 3 of 4" in reasons[0]
    assert f"Here: rank 0 ({socket.gethostname()}, pid {ranks[0].process.pid})" in reasons[0]
    assert "Check that" in reasons[0]
    assert place.removeprefix("tcp://") in reasons[0]
    for rank in ranks:
        assert re.search(r"waiting for ranks 1, 3 of 4, \d+ s", rank.out)


def test_a_leader_that_is_killed_while_others_wait(train: Train, place: str) -> None:
    leader, other = train(*at(place, 0, 3)), train(*at(place, 1, 3))
    other.until(lambda: "waiting for rank 2 of 3" in other.out)
    leader.process.kill()
    assert f"The leader at {place} left while rank 1" in why(other, LEFT_S)


# -- places where nobody can meet ------------------------------------------------------------------


def test_a_port_in_use_and_an_address_of_another_machine(train: Train) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(8)
        port = taken.getsockname()[1]
        in_use, elsewhere = (
            train(*at(place, 0)) for place in (f"tcp://127.0.0.1:{port}", "tcp://203.0.113.9:23456")
        )
        reason = why(in_use)
    assert f"Port {port} of 127.0.0.1 is in use by" in reason
    assert f"(pid {os.getpid()})" in reason
    assert "Choose another port" in reason
    reason = why(elsewhere)
    assert "does not have the address 203.0.113.9" in reason
    for name in interfaces():
        assert name in reason


def test_an_interface_that_does_not_exist(train: Train, place: str) -> None:
    ranks = [train(*at(place, rank), "--interface", "eth99") for rank in range(2)]
    for rank in ranks:
        assert rank.end() == 2
        assert "--interface eth99: there is none of this name" in rank.err
        for name in interfaces():
            assert name in rank.err


@contextmanager
def no_leader(answer: str) -> Iterator[int]:
    """The port of someone who listens, but answers otherwise than a leader does."""
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
                if answer == "words":
                    with suppress(OSError):  # the first guest only looks who is there, and leaves
                        guest.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)
                if answer == "goodbye":
                    guest.close()
                else:
                    guests.append(guest)
            for guest in guests:
                guest.close()

        server = threading.Thread(target=serve)
        server.start()
        try:
            yield listener.getsockname()[1]
        finally:
            done.set()
            server.join()


def test_nobody_listens_or_someone_who_is_no_leader(train: Train, place: str) -> None:
    """Four ranks on their own, each at another place; they wait at the same time."""
    with ExitStack() as stack:
        ports = {
            answer: stack.enter_context(no_leader(answer))
            for answer in ("silence", "words", "goodbye")
        }
        guests = {
            answer: train(*at(f"tcp://127.0.0.1:{port}", 1), timeout_s=3)
            for answer, port in ports.items()
        }
        alone = train(*at(place, 1), timeout_s=3)
        reasons = {answer: why(guest, 3 + LEFT_S) for answer, guest in guests.items()}
    for answer, port in ports.items():
        expected = f"Something listens at 127.0.0.1:{port}, but it is not the leader"
        assert expected in reasons[answer], answer
    reason = why(alone, 3 + LEFT_S)
    assert "did not reach rank 0 at " + place.removeprefix("tcp://") in reason
    assert "connection refused" in reason
    assert "Check that rank 0 is running" in reason
    assert "waiting for rank 0 at" in alone.out


def test_files_that_nobody_can_meet_at(train: Train, tmp_path: Path) -> None:
    foreign = tmp_path / "notes.txt"
    foreign.write_text("not of this program\n")
    folder = train(*at(f"file://{tmp_path}", 0))
    nowhere = train(*at(f"file://{tmp_path}/no/such/folder", 0))
    notes = train(*at(f"file://{foreign}", 0))
    assert folder.end() == 2
    assert f"file://{tmp_path}: is a folder" in folder.err
    assert f"the folder {tmp_path}/no/such does not exist" in why(nowhere)
    assert f"{foreign} is left over from an earlier run" in why(notes)
    assert foreign.read_text() == "not of this program\n", "what is not ours is not touched"


LATE = """
import sys, time
import shoal
with shoal.join(sys.argv[1], rank=int(sys.argv[2]), world_size=2) as crew:
    time.sleep(1.2 * crew.rank)  # is busy with something else
    print(crew.exchange("ranks", crew.rank), flush=True)
    time.sleep(600)  # until it is killed
"""


def test_at_a_shared_file_too_a_rank_may_be_late_and_a_killed_crew_leaves_the_file(
    start_warm, train: Train, tmp_path: Path
) -> None:
    """A wait is cut into turns; the file's store reports the end of one in a way of its own. And
    who comes to a file that was left there is told what to do."""
    path = tmp_path / "meeting"
    place = f"file://{path}"
    crew = [start_warm(sys.executable, "-c", LATE, place, str(rank)) for rank in range(2)]
    for rank in crew:
        rank.until(lambda rank=rank: rank.out.endswith("\n"))  # type: ignore[misc]
        assert rank.out == "[0, 1]\n"
    for rank in crew:
        rank.process.kill()
        rank.end()
    for rank in [train(*at(place, rank)) for rank in range(2)]:
        assert f"{path} is left over from an earlier run" in why(rank)
        assert f"rm {path}" in why(rank)


# -- before anything starts ------------------------------------------------------------------------


def test_faults_of_the_way_and_of_the_settings_come_together(train: Train) -> None:
    rank = train("--init", "tcp://0.0.0.0:23456", "--rank", "2", "--world-size", "2", "--lr", "-1")
    half = train(RANK="x")
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


def test_ctrl_c_while_waiting(train: Train, place: str) -> None:
    """A leader, a follower beside its leader, and one that has not found its leader yet."""
    leader = train(*at(place, 0, 3))
    follower = train(*at(place, 1, 3))
    lonely = train(*at(f"tcp://127.0.0.1:{reserve_port()}", 1))
    for rank in (leader, follower, lonely):
        rank.until_says("waiting for")
    for rank in (follower, lonely, leader):
        press_ctrl_c(rank)


@pytest.fixture
def ghost(place: str) -> Iterator[Callable[[], None]]:
    """A rank 1 that answers to the roll and then does nothing more: as if frozen."""
    way = find_way(place, 1, 2, {})
    settings = TrainSettings(model="residual-mlp", data="sine", epochs=1, batch_size=1024)
    mine = Fingerprint(shoal=VERSION, settings=shared_settings(settings))
    stores = []

    def appear() -> None:
        stores.append(open_store(way, None, ENOUGH_S, lambda text: None))
        hello = make_hello(way, "127.0.0.1", "cpu", mine)
        call_roll(stores[0], way, hello, ENOUGH_S, lambda text: None)

    yield appear
    stores.clear()


def test_ctrl_c_while_torch_connects(train: Train, place: str, ghost: Callable[[], None]) -> None:
    """Then the main thread is inside torch, which does not look up."""
    leader = train(*at(place, 0))
    ghost()
    leader.until(lambda: len(listeners(leader)) > 1)  # the store's, and now gloo's
    press_ctrl_c(leader)


def test_a_rank_that_freezes_after_the_roll(
    train: Train, place: str, ghost: Callable[[], None]
) -> None:
    leader = train(*at(place, 0), timeout_s=3)
    ghost()
    reason = why(leader, 3 + LEFT_S)
    assert "All ranks met, but torch could not connect each with each" in reason
    assert f"rank 1 ({socket.gethostname()}, pid {os.getpid()}) at 127.0.0.1" in reason
