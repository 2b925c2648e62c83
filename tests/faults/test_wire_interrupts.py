"""Ctrl-C in the midst of sending, caught by a script that goes on: messages stay whole."""

from __future__ import annotations

from pathlib import Path

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


def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
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
