"""Ranks as processes of this host: start them, pass on what they say, and leave none behind.

Each rank is in a process group of its own, so that Ctrl-C reaches this launcher alone and the
launcher ends the ranks; and each is bound to die with the launcher, should that be killed. What
ranks start is ended with them, wherever it went (see descendants.py).
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Literal

from shoal.launch.descendants import Descendants
from shoal.launch.outcome import RankEnd, cause_of, is_consequence
from shoal.launch.output import Lines
from shoal.report.events import pipe_name
from shoal.settings import PIPE_VARIABLE

TERM_GRACE_S = 0.4
"""Between the polite signal and the last one; Ctrl-C is to be over within a second."""
CAUSE_GRACE_S = 2.0
"""How long to look for the cause when the first rank to end only lost a peer."""
TRACEBACK_HOLD_S = 3.0
"""How long a traceback is held back, to see whether its rank was the one to blame. On a busy host
a process takes its time to end."""
CONSEQUENCE_HOLD_S = 10.0
"""The same, of a rank that has lost a peer: it is about to end, and another is the cause."""

HELD_LINES = 5000
"""No traceback is longer. Unlike what is passed on at once, what is held slows nobody down: a rank
that goes on speaking would fill the memory, and nobody could end it before all was passed on."""

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True, kw_only=True)
class RankCommand:
    """What to run as one rank."""

    rank: int
    argv: Sequence[str]
    environment: Mapping[str, str]


@dataclass
class Listener:
    """Whoever shows what the ranks do."""

    on_line: Callable[[int, Stream, bytes], None]
    """A line with its end, or a piece of a long one."""
    on_event: Callable[[int, bytes], RankEnd | None] = lambda rank, line: None
    """A line of the rank's event pipe. May return what the rank says of its own failure."""
    on_hidden: Callable[[int, bytes], None] = lambda rank, line: None
    """A line of a traceback, on standard error, that another rank's may be the cause of."""
    on_end: Callable[[RankEnd], None] = lambda end: None
    sees_all: bool = True
    """Whether there are no other ranks elsewhere, so that the cause is known here."""
    is_stopped: Callable[[], bool] = lambda: False
    """Whether the ranks are to be ended. Asked between two things that they say: unlike a signal,
    it cuts none of them in its middle."""


class Interrupted(Exception):
    """The launcher was asked to stop."""

    def __init__(self, signum: int) -> None:
        self.exit_code = 128 + signum


@dataclass
class _Rank:
    command: RankCommand
    process: subprocess.Popen[bytes]
    events: IO[bytes]
    lines: dict[str, Lines] = field(
        # An event is whole or useless: that of a long run's end has a record for every epoch.
        default_factory=lambda: {"stdout": Lines(), "stderr": Lines(), "events": Lines(None)}
    )
    said: RankEnd | None = None
    is_cut: bool = False
    """Whether something that it said is being passed on, or was when a signal came: then the rest
    of it is lost, and so is what came after it, which would hide that."""
    held: list[bytes] = field(default_factory=list)
    held_since: float | None = None

    @property
    def rank(self) -> int:
        return self.command.rank

    def streams(self) -> Iterator[tuple[str, IO[bytes]]]:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        yield "stdout", self.process.stdout
        yield "stderr", self.process.stderr
        yield "events", self.events


def run_ranks(commands: Sequence[RankCommand], listener: Listener) -> RankEnd | None:
    """Run all to their end. Returns the rank to blame, or None if all went well.

    Raises Interrupted, with no rank left, when this process or its listener is told to stop.
    """
    with stop_signals():
        supervisor = _Supervisor(listener)
        try:
            for command in commands:
                supervisor.check()
                supervisor.start(command)
            return supervisor.watch()
        finally:
            try:
                ignore_stop_signals()  # after an error too: what they cut short, nobody would end
            finally:  # one that comes this very moment has done it itself
                supervisor.end_all()


class _Supervisor:
    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._ranks: list[_Rank] = []
        self._running: list[_Rank] = []
        self._ends: list[RankEnd] = []
        self._selector = selectors.DefaultSelector()
        self._host = socket.gethostname()
        self._descendants = Descendants()

    def start(self, command: RankCommand) -> None:
        read_fd, write_fd = os.pipe()
        try:
            process = subprocess.Popen(
                command.argv,
                env={**command.environment, PIPE_VARIABLE: pipe_name(write_fd)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(write_fd,),
                process_group=0,
                preexec_fn=die_with_parent(),
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        rank = _Rank(command, process, os.fdopen(read_fd, "rb", buffering=0))
        self._ranks.append(rank)
        self._running.append(rank)
        for name, stream in rank.streams():
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (rank, name))

    def watch(self) -> RankEnd | None:
        deadline: float | None = None
        while self._running:
            self.check()
            for key, _ in self._selector.select(timeout=0.1):
                self._read(*key.data)
            self._release_held()
            self._descendants.reap(self._pids())
            for rank in [r for r in self._running if r.process.poll() is not None]:
                self._running.remove(rank)
                self._note_end(rank)
            failed = [end for end in self._ends if end.return_code != 0]
            if failed and deadline is None:
                deadline = time.monotonic() + CAUSE_GRACE_S
            cause = cause_of(self._ends)
            if cause and (not cause.is_consequence or time.monotonic() > (deadline or 0)):
                break
        cause = cause_of(self._ends)
        for rank in self._ranks:
            # Of several tracebacks only the cause's is shown; the others follow from it.
            is_cause = cause is not None and rank.rank == cause.rank
            if cause is None or (is_cause and self._listener.sees_all) or self._went_on(rank):
                self._show_held(rank)
        return cause

    def _went_on(self, rank: _Rank) -> bool:
        """After a traceback to its end, which it has only logged then."""
        rest = [line for line in rank.held[1:] if line.strip() and not line.startswith(b" ")]
        is_alive_or_well = not rank.process.poll()
        return bool(rest) and is_alive_or_well and not self._only_lost_a_peer(rank)

    def check(self) -> None:
        """Whether to go on."""
        if self._listener.is_stopped():
            raise Interrupted(signal.SIGTERM)

    def _read(self, rank: _Rank, name: str) -> None:
        stream = dict(rank.streams())[name]
        rank.is_cut = True
        try:
            data = os.read(stream.fileno(), 256 * 1024)
        except BlockingIOError:
            rank.is_cut = False
            return
        lines = rank.lines[name]
        for line in lines.feed(data) if data else lines.finish():
            self._pass_on(rank, name, line)
        rank.is_cut = False
        if not data:
            self._selector.unregister(stream)
            stream.close()

    def _pass_on(self, rank: _Rank, name: str, line: bytes) -> None:
        if name == "events":
            rank.said = self._listener.on_event(rank.rank, line) or rank.said
        elif name == "stdout":
            self._listener.on_line(rank.rank, "stdout", line)
        else:
            if rank.held_since is None and b"Traceback (most recent call last):" in line:
                rank.held_since = time.monotonic()
            if rank.held_since is None:
                self._listener.on_line(rank.rank, "stderr", line)
            else:
                rank.held.append(line)
                if len(rank.held) >= HELD_LINES:
                    self._show_held(rank)

    def _release_held(self) -> None:
        """A traceback whose rank lives on was only logged: show it."""
        for rank in self._running:
            if rank.held_since is None:
                continue
            is_echo = self._only_lost_a_peer(rank)
            limit_s = CONSEQUENCE_HOLD_S if is_echo else TRACEBACK_HOLD_S
            if time.monotonic() - rank.held_since > limit_s:
                self._show_held(rank)

    def _show_held(self, rank: _Rank) -> None:
        for line in rank.held:
            self._listener.on_line(rank.rank, "stderr", line)
        rank.held.clear()
        rank.held_since = None

    def _note_end(self, rank: _Rank) -> None:
        self._drain(rank)
        code = rank.process.returncode
        said = rank.said
        end = RankEnd(
            rank=rank.rank,
            host=self._host,
            pid=rank.process.pid,
            return_code=code,
            message=said.message if said else "",
            traceback=said.traceback if said else "",
            is_consequence=self._only_lost_a_peer(rank),
        )
        self._ends.append(end)
        self._listener.on_end(end)

    def _only_lost_a_peer(self, rank: _Rank) -> bool:
        if rank.said is not None:
            return rank.said.is_consequence
        return is_consequence(rank.lines["stderr"].tail)

    def _drain(self, rank: _Rank) -> None:
        """Read what is left, but do not wait for grandchildren that keep a pipe open."""
        rank.is_cut = True
        for name, stream in rank.streams():
            while not stream.closed:
                before = stream.fileno()
                with suppress(BlockingIOError):
                    data = os.read(before, 256 * 1024)
                    lines = rank.lines[name]
                    for line in lines.feed(data) if data else lines.finish():
                        self._pass_on(rank, name, line)
                    if data:
                        continue
                for line in rank.lines[name].finish():
                    self._pass_on(rank, name, line)
                self._selector.unregister(stream)
                stream.close()
        rank.is_cut = False

    def _pids(self) -> set[int]:
        return {rank.process.pid for rank in self._ranks}

    def end_all(self) -> None:
        """No process survives this, nor does what it started."""
        alive = [r for r in self._ranks if r.process.poll() is None]
        for rank in alive:
            signal_group(rank.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + TERM_GRACE_S
        while time.monotonic() < deadline and any(r.process.poll() is None for r in alive):
            time.sleep(0.01)
        self._descendants.kill()
        for rank in self._ranks:
            signal_group(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
        self._descendants.reap(set())
        for rank in self._ranks:  # what they said until then is not lost
            if not rank.is_cut:
                self._drain(rank)
                for line in rank.held:
                    self._listener.on_hidden(rank.rank, line)
            for _, stream in rank.streams():
                stream.close()
        self._selector.close()


def signal_group(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def die_with_parent(signum: int = signal.SIGKILL) -> Callable[[], None] | None:
    """For the child, before it runs: get this signal when the launcher is gone (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def bind() -> None:
        set_death_signal = 1  # PR_SET_PDEATHSIG
        libc.prctl(set_death_signal, signum)
        if os.getppid() != parent:  # it went while we were being made
            os._exit(1)

    return bind


class _Uncut:
    """What is begun in here is not cut by a stop signal, which is heard at the end of it: nothing
    is lost between where it was taken from and where it is put. For what does not wait."""

    def __init__(self) -> None:
        self._is_inside = False
        self._came: int | None = None

    def __enter__(self) -> None:
        self._is_inside = True

    def __exit__(self, *exception: object) -> None:
        self._is_inside = False
        if self._came is not None:
            signum, self._came = self._came, None
            raise Interrupted(signum)

    def interrupt(self, signum: int) -> None:
        if not self._is_inside:
            raise Interrupted(signum)
        self._came = signum


uncut = _Uncut()
"""Of the main thread, which is the one that hears signals."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_signals(signals: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """These raise Interrupted, the first time; ending is not interrupted."""

    def stop(signum: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        uncut.interrupt(signum)

    before = {each: signal.signal(each, stop) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def ignore_stop_signals() -> None:
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
