"""How runs end: errors, kills, Ctrl-C. One message, the right exit code, nobody left behind."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest
from processes import PROMPT_S, SHOAL, Running, all_gone, until

from shoal.network import reserve_port

HERE = str(Path(__file__).parent)
SMALL = ("--model", "residual-mlp", "--data", "sine", "--threads", "1")
LONG = ("--epochs", "1000", "--batch-size", "64")


def train(*options: str) -> tuple[str, ...]:
    return (*SHOAL, "train", *SMALL, *options)


# -- ranks that we started -------------------------------------------------------------------------


def test_a_rank_that_raises_is_named_and_shown_once(start) -> None:
    run = start(*train("--workers", "3", "--model", "broken_models:Breaking"), PYTHONPATH=HERE)
    assert run.end() == 1
    assert run.err.count("Traceback (most recent call last)") == 1
    assert run.err.count("ValueError: the fifth pass is too much") == 1
    assert f"rank 1 ({socket.gethostname()}, pid " in run.err
    assert "exit code 1" in run.err
    assert "rank 0" not in run.err  # the others only followed
    assert "rank 2" not in run.err


def test_a_rank_that_is_killed_is_named_with_its_signal(start) -> None:
    run = start(*train("--workers", "2", "--model", "broken_models:Dying"), PYTHONPATH=HERE)
    assert run.end() == 1
    assert "rank 1" in run.err
    assert "killed by SIGKILL" in run.err
    assert "Traceback" not in run.err


def test_a_rank_that_freezes_is_named_after_the_timeout(start) -> None:
    run = start(
        *train("--workers", "2", "--model", "broken_models:Freezing", "--timeout", "3"),
        PYTHONPATH=HERE,
    )
    run.until(lambda: run.family())
    family = run.family()
    assert run.end() == 1
    assert "lost rank 1" in run.err
    assert "no sign of life" in run.err
    until(lambda: all_gone(family), "no process left")


def test_stopping_the_launcher_ends_all_ranks_at_once(start) -> None:
    """As Ctrl-C does, see test_stages.py: ranks do not know by what their launcher was stopped."""
    run = start(*train("--workers", "2", *LONG))
    run.until_says("1/1000")
    family = run.family()
    assert len(family) == 2
    assert run.interrupt(signal.SIGTERM) < PROMPT_S
    assert run.process.returncode == 128 + signal.SIGTERM
    assert all_gone(family)
    assert run.err.startswith("shoal: interrupted.\nshoal: what there is of this run is in ")


def test_ctrl_c_while_ranks_are_still_starting(start) -> None:
    run = start(*train("--workers", "2", *LONG))
    run.until(lambda: len(run.family()) == 2)
    family = run.family()
    assert run.interrupt() < PROMPT_S
    assert run.process.returncode == 130
    assert all_gone(family)
    assert run.err == "shoal: interrupted.\n"


def test_ranks_die_with_a_launcher_that_is_killed(start) -> None:
    run = start(*train("--workers", "2", *LONG))
    run.until_says("1/1000")
    family = run.family()
    run.process.kill()
    until(lambda: all_gone(family), "the ranks are gone too", limit_s=10)


def test_a_loss_that_is_not_a_number_does_not_break_the_records(start_warm, tmp_path: Path) -> None:
    run = start_warm(
        *train("--model", "broken_models:Diverging", "--epochs", "1", "--out", str(tmp_path)),
        PYTHONPATH=HERE,
    )
    assert run.end() == 0, run.said
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert summary["epochs"][0]["train_loss"] is None
    assert "smaller --lr" in run.out


# -- ranks started by hand: no launcher to look after them -----------------------------------------


def by_hand(start_warm, *options: str) -> tuple[Running, Running]:
    place = f"tcp://127.0.0.1:{reserve_port()}"
    ranks = [
        start_warm(
            *train(*LONG, "--init", place, "--world-size", "2", "--rank", str(rank), *options)
        )
        for rank in range(2)
    ]
    ranks[0].until_says("1/1000")
    return ranks[0], ranks[1]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_peer_is_named_by_the_survivor(start_warm, victim: int) -> None:
    ranks = by_hand(start_warm, "--sync", "ring")
    ranks[victim].process.kill()
    survivor = ranks[1 - victim]
    assert survivor.end(limit_s=20) == 1
    assert f"lost rank {victim} ({socket.gethostname()}, pid {ranks[victim].process.pid})" in (
        survivor.err
    )
    assert "Traceback" not in survivor.err


@pytest.mark.parametrize("sync", ["all-reduce", "ddp"])
def test_ctrl_c_on_one_machine_tells_the_other(start_warm, sync: str) -> None:
    ranks = by_hand(start_warm, "--sync", sync)
    assert ranks[1].interrupt() < PROMPT_S
    assert ranks[1].process.returncode == 130
    assert ranks[1].err == "shoal: interrupted.\n"
    assert ranks[0].end(limit_s=20) == 1
    assert "lost rank 1" in ranks[0].err
    assert "KeyboardInterrupt" in ranks[0].err


# -- scripts ---------------------------------------------------------------------------------------

BLOCKED = """
import sys, time, shoal
with shoal.join() as crew:
    print("joined", flush=True)
    if crew.rank == 0:
        crew.barrier()          # inside torch, where Python hears no signal
    else:
        time.sleep(600)
"""

INTERRUPTED = """
import time, torch.distributed as dist, shoal
wait = dist.Work.wait
def interrupted(work):              # between the beginning of an operation and the wait for it
    dist.Work.wait = wait
    raise KeyboardInterrupt
with shoal.join() as crew:
    print("joined", flush=True)
    if crew.rank == RANK:
        dist.Work.wait = interrupted
        crew.barrier()
    time.sleep(600)
"""

INTERRUPTED_IN_A_GROUP = """
import time, torch, torch.distributed as dist, shoal
with shoal.join() as crew:
    group = dist.new_group([0, 1])
    print("joined", flush=True)
    if crew.rank == RANK:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        raise KeyboardInterrupt
    time.sleep(600)
"""

FAILING = """
import shoal
with shoal.join() as crew:
    if crew.rank == 1:
        raise RuntimeError("rank 1 has had enough")
    crew.barrier()
"""


def scripts_by_hand(start_warm, script: Path) -> list[Running]:
    port = str(reserve_port())
    return [
        start_warm(
            SHOAL[0], str(script),
            RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for rank in range(2)
    ]  # fmt: skip


def test_ctrl_c_reaches_a_script_that_is_blocked_inside_torch(start_warm, tmp_path: Path) -> None:
    script = tmp_path / "blocked.py"
    script.write_text(BLOCKED)
    ranks = scripts_by_hand(start_warm, script)
    for rank in ranks:
        rank.until_says("joined")
    assert ranks[0].interrupt() < PROMPT_S
    # The latter if it came before the block began. A shell calls both 130.
    assert ranks[0].process.returncode in (130, -signal.SIGINT)
    ranks[1].kill()


@pytest.mark.parametrize(
    ("text", "rank"),
    [(INTERRUPTED, 0), (INTERRUPTED, 1), (INTERRUPTED_IN_A_GROUP, 1)],
    ids=["leader", "other", "in a group of the script's own"],
)
def test_a_script_ends_at_once_whatever_is_under_way(
    start_warm, tmp_path: Path, text: str, rank: int
) -> None:
    """Python would wait for gloo, and gloo for the other rank."""
    script = tmp_path / "interrupted.py"
    script.write_text(text.replace("RANK", str(rank)))
    ranks = scripts_by_hand(start_warm, script)
    ranks[1 - rank].until_says("joined")
    assert ranks[rank].end(limit_s=20) == -signal.SIGINT
    ranks[1 - rank].kill()


def test_a_failing_script_shows_one_traceback_and_its_code(start, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    run = start(*SHOAL, "run", "--workers", "2", str(script))
    assert run.end() == 1
    assert run.err.count("Traceback (most recent call last)") == 1
    assert "[1]" in run.err
    assert "rank 1 has had enough" in run.err
    assert "shoal: rank 1 (" in run.err


def test_ctrl_c_ends_a_blocked_script_under_run(start, tmp_path: Path) -> None:
    """With what it has started in a session of its own."""
    script = tmp_path / "blocked.py"
    away = "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    script.write_text(away + BLOCKED)
    run = start(*SHOAL, "run", "--workers", "2", str(script))
    run.until(lambda: run.out.count("joined") == 2)
    family = run.family()
    assert len(family) == 4
    assert run.interrupt() < PROMPT_S
    assert run.process.returncode == 130
    assert all_gone(family)
    assert "Traceback" not in run.err


def test_exit_codes_and_output_without_end_come_through(start, tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "sys.stdout.write('x' * 300_000)\n"
        "sys.stdout.flush()\n"
        "sys.stderr.write('no end of line')\n"
        "said = Path(__file__).with_name('said')\n"
        "if os.environ['RANK'] == '0':\n"
        "    sys.exit(said.touch())\n"
        "while not said.exists():\n"
        "    time.sleep(0.01)\n"
        "sys.exit(7)\n"
    )
    run = start(*SHOAL, "run", "--workers", "2", str(script))
    assert run.end() == 7
    assert run.out.count("x") == 600_000
    assert run.err.count("no end of line") == 2
    assert "rank 1" in run.err


def test_no_thread_of_gloo_outlives_its_crew(start, tmp_path: Path) -> None:
    """The first optimizer imports a module of torch's that kept the group of the moment for good:
    its threads ran on, and now and then a rank that was done died of SIGABRT ("terminate called
    without an active exception")."""
    script = tmp_path / "leaving.py"
    script.write_text(
        "import pathlib, torch, shoal\n"
        "def threads():\n"
        "    tasks = pathlib.Path('/proc/self/task').iterdir()\n"
        "    return [name for t in tasks if 'gloo' in (name := (t / 'comm').read_text())]\n"
        "with shoal.join() as crew:\n"
        "    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)\n"
        "    print('within:', len(threads()) > 0)\n"
        "print('after:', threads())\n"
    )
    run = start(*SHOAL, "run", "--workers", "2", str(script))
    assert run.end() == 0, run.said
    assert run.out.count("within: True") == 2
    assert run.out.count("after: []") == 2
