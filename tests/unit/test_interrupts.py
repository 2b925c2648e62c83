"""Ctrl-C inside Python, inside C, twice, and where someone else already handles it.

Each program runs in a process of its own, says `ready`, and is sent a real SIGINT.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.interrupts import GRACE_S, prompt_interrupts

PROMPT_S = 3.0
"""The promise is a second; a machine that runs other tests meanwhile may be slower."""

BLOCKED_IN_C = """
import ctypes, threading
# pthread_cond_wait goes back to waiting after a signal, as torch's collectives do: the signal
# never brings this thread back to Python.
c = ctypes.CDLL(None)
mutex, condition = ctypes.create_string_buffer(128), ctypes.create_string_buffer(128)
c.pthread_mutex_lock(mutex)

def announce():
    c.pthread_mutex_lock(mutex)  # succeeds once the main thread waits, and not before
    c.pthread_mutex_unlock(mutex)
    print("ready", flush=True)

def block():
    threading.Thread(target=announce, daemon=True).start()
    while True:
        c.pthread_cond_wait(condition, mutex)
"""


@contextmanager
def program(text: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `text` and has said `ready`."""
    source = "from shoal.interrupts import prompt_interrupts\n" + textwrap.dedent(text)
    with subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it still said after Ctrl-C; it must end promptly."""
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - begun < PROMPT_S
    return out, err


def test_the_program_in_c_does_not_hear_ctrl_c_by_itself() -> None:
    """Else the next test proves nothing."""
    with program(BLOCKED_IN_C + "block()") as process:
        process.send_signal(signal.SIGINT)
        # It sleeps again once the signal was taken; until then the signal is pending.
        status = f"/proc/{process.pid}/status"
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with open(status) as lines:  # noqa: PTH123
                fields = dict(line.split(":", 1) for line in lines)
            if int(fields["ShdPnd"], 16) == 0 and fields["State"].strip().startswith("S"):
                break
        assert process.poll() is None


def test_ctrl_c_while_the_main_thread_is_in_c() -> None:
    with program(BLOCKED_IN_C + "with prompt_interrupts(): block()") as process:
        assert interrupt(process) == ("", "")
        assert process.returncode == 130


def test_ctrl_c_in_python_is_an_ordinary_keyboard_interrupt() -> None:
    text = """
    import time
    try:
        with prompt_interrupts():
            print("ready", flush=True)
            while True:
                time.sleep(0.01)
    except KeyboardInterrupt:
        print("caught")
    """
    with program(text) as process:
        assert interrupt(process) == ("caught\n", "")
        assert process.returncode == 0


def test_work_after_a_caught_ctrl_c_is_not_cut_short() -> None:
    """A script that saves its model when it is interrupted has the time it needs."""
    text = f"""
    import time
    with prompt_interrupts():
        try:
            print("ready", flush=True)
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            end = time.monotonic() + 2 * {GRACE_S}
            while time.monotonic() < end:
                pass
            print("saved")
    """
    with program(text) as process:
        assert interrupt(process) == ("saved\n", "")
        assert process.returncode == 0


def test_two_that_are_read_at_once_are_two() -> None:
    """The second came, and found the main thread in C, before the watcher had read of the first."""
    text = (
        BLOCKED_IN_C
        + """
import time, shoal.interrupts
class Late(threading.Thread):
    def run(self):
        if self.name == "shoal-interrupts":
            go.wait()
        super().run()
go = threading.Event()
shoal.interrupts.threading.Thread = Late
with prompt_interrupts():
    try:
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
    finally:
        threading.Timer(0.5, go.set).start()
        block()
"""
    )
    with program(text) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert interrupt(process) == ("", "")
        assert process.returncode == 130


def test_a_second_ctrl_c_ends_a_cleanup_that_is_stuck_in_c() -> None:
    """The watcher used to be satisfied for ever by the first one."""
    text = (
        BLOCKED_IN_C
        + """
import time
with prompt_interrupts():
    try:
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
    finally:
        block()
"""
    )
    with program(text) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert interrupt(process) == ("", "")
        assert process.returncode == 130


def test_everything_is_as_before_afterwards() -> None:
    threads = threading.active_count()
    for _ in range(3):
        with prompt_interrupts():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert threading.active_count() == threads
    descriptor = signal.set_wakeup_fd(-1)
    assert descriptor == -1


def test_one_inside_the_other_does_nothing() -> None:
    with prompt_interrupts():
        outer = signal.getsignal(signal.SIGINT)
        with prompt_interrupts():
            assert signal.getsignal(signal.SIGINT) is outer
        assert signal.getsignal(signal.SIGINT) is outer
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_programs_own_stays() -> None:
    def own(signum: int, frame: object) -> None:
        pass

    signal.signal(signal.SIGINT, own)
    try:
        with prompt_interrupts():
            assert signal.getsignal(signal.SIGINT) is own
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_that_was_set_inside_stays() -> None:
    with prompt_interrupts():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_asyncio_keeps_its_wakeup_descriptor() -> None:
    async def inside() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: None)  # takes the wakeup descriptor
        before = signal.set_wakeup_fd(-1)
        assert before != -1
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio.run's own put aside
        with prompt_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        after = signal.set_wakeup_fd(before)
        assert after == before
        loop.remove_signal_handler(signal.SIGUSR1)

    asyncio.run(inside())
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_in_another_thread_it_does_nothing() -> None:
    seen: list[object] = []

    def run() -> None:
        with prompt_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert seen == [signal.default_int_handler]
