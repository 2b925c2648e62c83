"""Ranks that die, freeze, leave or are merely busy, as those see it who have a link with them."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from chat import Chat
from processes import PROMPT_S, SHOAL, Ranks, Running, all_gone, until
from six_ranks import FATES, HUNG_S, TRANSPORTS
from warm import Nursery

from shoal.wire.zmq_link import LAST_WORDS_S, ZmqLink

HERE = Path(__file__).parent
SOON_S = 30.0
BUSY_S = 10.0
"""More than it takes to notice, on a machine that does other things too."""

# -- fates -----------------------------------------------------------------------------------------


class Story:
    """What the two witnesses of a run said, and how they ended."""

    def __init__(self, witnesses: list[Running]) -> None:
        self.codes = [witness.end() for witness in witnesses]
        self.said = "".join(witness.said for witness in witnesses)
        lines = [line for witness in witnesses for line in witness.out.splitlines()]
        self.seen: list[dict[str, Any]] = [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Story]:
    """One run of six ranks, with links over each transport: see six_ranks.py."""
    folder = tmp_path_factory.mktemp("story")
    crew = Ranks(nursery, folder, 6, str(HERE / "six_ranks.py"), str(folder / "note"))
    try:
        yield Story(crew.ranks[:2])
    finally:
        crew.kill()


@pytest.mark.parametrize("doing", ["while receiving", "while sending"])
@pytest.mark.parametrize("victim", FATES, ids=FATES.values())
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_gone_is_named_by_all_others(
    story: Story, transport: str, victim: int, doing: str
) -> None:
    wanted = (transport, FATES[victim])
    seen = [each for each in story.seen if (each.get("transport"), each.get("fate")) == wanted]
    assert [each["rank"] for each in seen] == [0, 1], story.said
    for each in seen:
        assert f"rank {victim} " in each[doing], each
        assert each["seconds"] < HUNG_S + BUSY_S


def test_the_others_go_on_with_each_other(story: Story) -> None:
    """Each witness has talked with the other again, by every link, after each fate."""
    after = [each["goes on after"] for each in story.seen if "goes on after" in each]
    assert after == 2 * list(FATES.values()), story.said
    assert story.codes == [0, 0], story.said  # nobody waits for the lost at the end


def test_no_thread_is_left_behind_a_link_that_was_closed(story: Story) -> None:
    """One that comes back from gloo while the interpreter ends would abort the process."""
    left = [each["threads left"] for each in story.seen if "threads left" in each]
    assert left == [[], []], story.said


GOES_ON = f"""
import os, pathlib, signal, sys, time, shoal

note = pathlib.Path(sys.argv[-1])
with shoal.join(timeout_s={SOON_S}) as crew:
    link = crew.link("dist", hung_s=1 + crew.rank)  # rank 1 misses others later
    if crew.rank == 2:
        link.send("I am here", to=0)
        link.recv(0)  # gloo sends only once the other side receives: frozen before, it says nothing
        os.kill(os.getpid(), signal.SIGSTOP)
    elif crew.rank == 0:
        link.recv(2)
        link.send("I see you", to=2)
        try:
            link.recv(2)
        except shoal.PeerLost:
            note.touch()
    else:
        deadline = time.monotonic() + {SOON_S}
        while not note.exists() and time.monotonic() < deadline:
            time.sleep(0.01)  # computes, and looks at no link
"""


def test_nobody_waits_at_the_end_for_a_rank_that_another_has_missed(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Rank 0 leaves without rank 2, which has frozen. Rank 1 has not noticed, and does so too."""
    script = tmp_path / "goes_on.py"
    script.write_text(GOES_ON)
    crew = Ranks(nursery, tmp_path, 3, str(script), str(tmp_path / "note"))
    try:
        assert [rank.end() for rank in crew.ranks[:2]] == [0, 0], crew.said
        assert "lost rank 2" in crew.ranks[1].said
    finally:
        crew.kill()


# -- ranks that are busy ---------------------------------------------------------------------------

BUSY = f"""
import threading, time, torch, shoal

MESSAGE = torch.arange(2 * 2**20, dtype=torch.float32)  # 8 MiB, 25 of them
ERRORS = []

def exchange(link):
    try:
        if link.rank == 0:
            for number in range(25):
                link.send([MESSAGE, number], to=1)
            assert link.recv(1) == "all is well"
        else:
            time.sleep(3)  # computes
            for number in range(25):
                tensor, count = link.recv(0)
                assert count == number and torch.equal(tensor, MESSAGE)
            link.send("all is well", to=0)
    except BaseException as error:
        ERRORS.append(error)

with shoal.join(timeout_s={SOON_S}) as crew:
    links = [crew.link(way, hung_s=1, timeout_s={SOON_S}) for way in ("zmq", "dist")]
    threads = [threading.Thread(target=exchange, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in ERRORS:
        print("rank", crew.rank, type(error).__name__, error)
    crew.barrier()
    print("rank", crew.rank, "is not dead", flush=True)
    for link in links:
        if crew.rank == 1:
            for number in range(100):
                link.send([number, torch.full((1000,), number)], to=0)
            link.close()
    if crew.rank == 0:
        time.sleep(3)  # computes
        for link in links:
            for number in range(100):
                count, tensor = link.recv(1)
                assert count == number and tensor.eq(number).all()
            try:
                link.recv(1)
            except shoal.PeerLost as lost:
                assert "rank 1" in str(lost)
    crew.barrier()
    print("rank", crew.rank, "is done")
"""


def test_ranks_that_compute_are_not_taken_for_dead_and_read_what_was_left_for_them(
    nursery: Nursery, tmp_path: Path
) -> None:
    """For three times as long as a sign of life may take, with 200 MiB waiting at its door.

    Then a rank that leaves much unread must not take its reader along. ZeroMQ ended the reader's
    process: its own sign of life to one who had gone, behind a queue that was full. (Assertion
    failed: !_io_error; zeromq/libzmq issues 4364 and 3937)
    """
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    crew = Ranks(nursery, tmp_path, 2, str(script))
    codes, ranks = crew.end(), crew.ranks
    for number, rank in enumerate(ranks):
        lines = rank.out.splitlines()
        assert lines[:1] == [f"rank {number} is not dead"], ranks[0].said + ranks[1].said
        assert lines[1:] == [f"rank {number} is done"], "the reader ended: " + rank.said
    assert codes == [0, 0], ranks[0].said + ranks[1].said


def test_last_words_are_heard_while_others_talk(stack: ExitStack) -> None:
    """Rank 2 sends much and leaves; rank 0 comes to hear of it long after, amid other talk."""
    links = joined(3, stack)
    words = [torch.full((number * 1000,), number) for number in range(0, 900, 30)]
    for each in words:
        links[2].isend(each, to=0)
    leaving = threading.Thread(target=links[2].close)
    leaving.start()
    chat = stack.enter_context(Chat(links[0], links[1]))
    leaving.join(SOON_S)
    assert not leaving.is_alive()
    chat.goes_on()
    for each in words:
        assert torch.equal(links[0].recv(2), each)


def joined(size: int, stack: ExitStack) -> list[ZmqLink]:
    """Links of one process with each other."""
    links = [ZmqLink(rank, size, timeout_s=SOON_S) for rank in range(size)]
    for link in links:
        stack.enter_context(link)
        link.connect([each.card for each in links])
    for link in links:
        link.settle()
    return links


def test_last_words_are_heard_by_a_rank_that_only_looks_now_and_then(stack: ExitStack) -> None:
    """There are more of them than ZeroMQ hands over at once: for a moment none seem to be left."""
    links = joined(2, stack)
    for number in range(300):
        links[1].send([number, torch.zeros(100)], to=0)
    links[1].close()
    until(lambda: links[0]._peers[1].guest.broken_at, "rank 0's gate knows that rank 1 has left")
    time.sleep(LAST_WORDS_S + 0.1)  # computes
    for number in range(300):
        job = links[0].irecv(1)
        deadline = time.monotonic() + SOON_S
        while not job.done():  # at once again: this is what it is about
            assert time.monotonic() < deadline
        assert job.wait()[0] == number


def test_last_words_are_heard_by_a_rank_that_computes_between_messages(stack: ExitStack) -> None:
    """Each time it comes back there is more from those who are here, and from the one who left."""
    links = joined(4, stack)
    for number in range(8):
        for link in links[1:]:
            link.send(number, to=0)
    links[2].close()
    until(lambda: links[0]._peers[2].guest.broken_at, "rank 0's gate knows that rank 2 has left")
    for number in range(4):
        time.sleep(LAST_WORDS_S + 0.1)  # computes
        assert links[0].recv(1 + 2 * (number % 2)) == number // 2
    assert [links[0].recv(2) for _ in range(8)] == list(range(8))


def test_last_words_are_heard_behind_many_messages_of_others(stack: ExitStack) -> None:
    """ZeroMQ looks only now and then for those who have something to say again."""
    links = joined(3, stack)
    for number in range(60):
        links[1].send(number, to=0)
    assert links[0].recv(1) == 0
    for number in range(3):
        links[2].send(number, to=0)
    links[2].close()
    until(lambda: links[0]._peers[2].guest.broken_at, "rank 0's gate knows that rank 2 has left")
    assert links[0].recv(1) == 1
    time.sleep(LAST_WORDS_S + 0.1)  # computes
    assert [links[0].recv(1) for _ in range(58)] == list(range(2, 60))
    assert [links[0].recv(2) for _ in range(3)] == list(range(3))


# -- Ctrl-C ----------------------------------------------------------------------------------------

WAITING = """
import shoal
with shoal.join(timeout_s=60) as crew:
    links = [crew.link(way) for way in ("zmq", "dist")]
    crew.barrier()
    print("waiting", flush=True)
    links[crew.rank].recv(1 - crew.rank)
"""


@pytest.fixture
def waiting(tmp_path: Path) -> Path:
    """Rank 0 waits over zmq, rank 1 over dist, both in vain."""
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    return script


def test_ctrl_c_while_ranks_wait_for_messages(start, waiting: Path) -> None:
    run = start(*SHOAL, "run", "--workers", "2", "--threads", "1", str(waiting))
    run.until(lambda: run.out.count("waiting") == 2)
    family = run.family()
    assert len(family) == 2
    assert run.interrupt() < PROMPT_S
    assert run.process.returncode == 130
    assert all_gone(family)
    assert "Traceback" not in run.err  # on a busy machine it may say whom it waited for


def test_ctrl_c_in_the_ranks_themselves(nursery: Nursery, waiting: Path) -> None:
    crew = Ranks(nursery, waiting.parent, 2, str(waiting))
    try:
        for rank in crew.ranks:
            rank.until_says("waiting")
        begun = time.monotonic()
        for rank in crew.ranks:
            rank.process.send_signal(signal.SIGINT)
    finally:
        codes = crew.end()
    assert time.monotonic() - begun < PROMPT_S
    assert set(codes) <= {130, -signal.SIGINT}, crew.said


INTERRUPTED = """
import os, signal, sys, threading, torch, shoal
with shoal.join() as crew:
    link = crew.link("zmq")
    if crew.rank == 0:
        job = link.isend(torch.ones(2**27), to=1)
        crew.barrier()
    if crew.rank == 2:
        for number in range(1000):
            link.isend(number, to=1)
        crew.barrier()
    if crew.rank == 1:
        job = link.irecv(0)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            job.wait()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        for get in (job.wait, lambda: [link.recv(2) for _ in range(1000)]):
            try:
                got = get()
                assert len(got) == 2**27 or got == list(range(1000))
                print("all is here", flush=True)
            except shoal.WireError as error:
                print(error, flush=True)
        crew.barrier()
"""


def test_what_an_interrupt_has_cost_is_told_and_nobody_else_blamed(
    nursery: Nursery, tmp_path: Path
) -> None:
    """The next message was taken for a part of the one before: other ranks were dropped for it."""
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    crew = Ranks(nursery, tmp_path, 3, str(script))
    assert crew.end() == [0, 0, 0], crew.said
    told = crew.ranks[1].out.splitlines()
    assert told[0] == "interrupted"
    lost = "was interrupted in the midst of a message (KeyboardInterrupt), which is lost"
    assert all(lost in each or each == "all is here" for each in told[1:]), crew.said
    assert "dropped" not in crew.said
