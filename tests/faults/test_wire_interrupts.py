"""Ctrl-C in the midst of sending or receiving, caught by a script that goes on: nothing is lost
silently, messages stay whole, and others are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import SHOAL

NUM_MESSAGES = 400
EVERY = 5
"""So many messages: one of them is interrupted somewhere between its begin and its end."""

SCRIPT = f"""
import os, random, signal, sys, threading, time, torch, shoal

def pester(armed):
    dice = random.Random(1)
    while True:
        armed.wait()
        armed.clear()
        time.sleep(dice.random() * 0.0006)
        os.kill(os.getpid(), signal.SIGINT)

def send_all(link):
    armed = threading.Event()
    threading.Thread(target=pester, args=(armed,), daemon=True).start()
    for number in range({NUM_MESSAGES}):
        message = [torch.full((25_000,), number) for _ in range(10)]
        try:
            if number % {EVERY} == 0:
                armed.set()
                link.send(message, to=1)
                time.sleep(60)  # until it is interrupted
            link.send(message, to=1)
        except KeyboardInterrupt:
            pass

def receive_all(link):
    number = -1
    while number < {NUM_MESSAGES - 1}:
        message = link.recv(0)
        kinds = set(torch.stack(message).unique().tolist())
        assert len(kinds) == 1, f"mixed: {{kinds}}"
        assert max(kinds) >= number, "out of order"
        number = max(kinds)
    print("all came whole")

with shoal.join(timeout_s=60) as crew:
    link = crew.link(sys.argv[1], timeout_s=30)
    try:
        send_all(link) if crew.rank == 0 else receive_all(link)
    except shoal.PeerLost as lost:
        print("told:", lost)
        raise
"""


def script(tmp_path: Path, text: str = SCRIPT) -> str:
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


def test_over_dist_every_message_is_sent_or_not_as_a_whole(start_warm, tmp_path: Path) -> None:
    """Buffers of an interrupted message were taken for those of the next, and so on for ever."""
    run = start_warm(*SHOAL, "run", "--workers", "2", script(tmp_path), "dist")
    assert run.end() == 0, run.said
    assert run.out == "[1] all came whole\n"


def test_over_zmq_both_sides_are_told(start_warm, tmp_path: Path) -> None:
    """ZeroMQ cannot send several parts as one: where that was interrupted nothing more is sent."""
    run = start_warm(*SHOAL, "run", "--workers", "2", script(tmp_path), "zmq")
    assert run.end() != 0, "no interrupt came in the midst of a message"
    assert "mixed" not in run.said
    assert "out of order" not in run.said
    assert "[0] told: rank 0" in run.out
    assert "was interrupted in the midst of a message (KeyboardInterrupt)" in run.out
    assert "[1] told:" in run.out


ASKING = """
import os, signal, sys, torch, shoal
from shoal.wire.inbox import Inbox

wake = Inbox._wake

def interrupted(inbox):
    Inbox._wake = wake
    wake(inbox)
    os.kill(os.getpid(), signal.SIGINT)

with shoal.join(timeout_s=60) as crew:
    link = crew.link(sys.argv[1], timeout_s=30)
    if crew.rank == 0:
        for number in (1.0, 2.0):
            link.recv(1)  # until it has asked
            link.send(torch.full((4,), number), to=1)
    else:
        place = torch.zeros(4)
        Inbox._wake = interrupted  # as it has asked, and before it knows
        try:
            link.recv(0, into=place) if sys.argv[2] == "recv" else link.irecv(0, into=place)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        place.fill_(9)
        for number in (1.0, 2.0):
            link.send("asked", to=0)
            assert link.recv(0).tolist() == [number] * 4
        assert place.tolist() == [9] * 4
"""


@pytest.mark.parametrize("transport", ["zmq", "dist"])
@pytest.mark.parametrize("what", ["recv", "irecv"])
def test_whoever_is_interrupted_as_it_asks_takes_no_message_away(
    start_warm, tmp_path: Path, transport: str, what: str
) -> None:
    """Nobody knew of its job any more, which took the next message, into places given back."""
    text = script(tmp_path, ASKING)
    run = start_warm(*SHOAL, "run", "--workers", "2", text, transport, what)
    assert run.end() == 0, run.said
    assert run.out == "[1] interrupted\n"


DEAF = """
import os, signal, sys, torch, shoal
from shoal.wire import zmq_receiving

with shoal.join(timeout_s=60) as crew:
    link = crew.link("zmq", timeout_s=30)
    if crew.rank == 0:
        link.recv(1, tag="ready")
        try:
            for _ in range(100):
                link.send(torch.ones(int(sys.argv[1])), to=1)
            print("nobody told it")
        except shoal.PeerLost as error:
            print("told:", error, flush=True)
        print(link.recv(1), flush=True)
    else:
        real = zmq_receiving.send if sys.argv[2] == "taken" else zmq_receiving.Due.fill
        def interrupted(*given):
            zmq_receiving.send = real
            result = real(*given)
            os.kill(os.getpid(), signal.SIGINT)
            return result
        def interrupted_piece(due, size):
            zmq_receiving.Due.fill = real
            os.kill(os.getpid(), signal.SIGINT)
            return real(due, size)
        if sys.argv[2] == "taken":
            zmq_receiving.send = interrupted
        else:
            zmq_receiving.Due.fill = interrupted_piece
        link.send("ready", to=0, tag="ready")
        try:
            link.recv(0)
        except KeyboardInterrupt:
            link.send("it can still say something", to=0)
"""


@pytest.mark.parametrize(("size", "where"), [(4 * 2**20, "taken"), (2**19 * 3, "piece")])
def test_over_zmq_who_was_interrupted_in_the_midst_of_receiving_says_so(
    start_warm, tmp_path: Path, size: int, where: str
) -> None:
    """Others went on sending to it: to nobody, or until their deadline where they had lent."""
    text = script(tmp_path, DEAF)
    run = start_warm(*SHOAL, "run", "--workers", "2", text, str(size), where)
    assert run.end() == 0, run.said
    assert "was interrupted while it received (KeyboardInterrupt): it takes nothing more" in run.out
    assert run.out.endswith("[0] it can still say something\n")
