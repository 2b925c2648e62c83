"""The launcher's side: an agent on every host, at the other end of a pipe that ssh carries.

    Agents(hosts)  ──ssh──>  agent on laptop    ──>  rank 0
                   ──ssh──>  agent on desktop   ──>  rank 1, rank 2

Whoever closes these pipes, or dies, ends all ranks everywhere: the agents see to that.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from shoal.closing import Closing
from shoal.errors import MeetingError, RunFailed
from shoal.launch.hosts import Host
from shoal.launch.local import CAUSE_GRACE_S, die_with_parent, uncut
from shoal.launch.loss import Loss, loss_of, losses_together, version_faults
from shoal.launch.messages import (
    AGENT,
    Alive,
    Done,
    Ended,
    Here,
    Line,
    Order,
    Ping,
    Refused,
    Report,
    Said,
    Start,
    Stop,
    encode,
    read_report,
)
from shoal.launch.outcome import RankEnd, cause_of
from shoal.launch.output import Lines, shown
from shoal.launch.ssh import find_python, ssh_argv, ssh_needed

START_S = 60.0
"""How long a host may take to answer."""
SILENCE_S = 15.0
PING_S = 2.0
ENDING_S = 3.0
"""How long agents have to end their ranks, once they have passed on what those had said."""

Answer = TypeVar("Answer", bound=Report)


@dataclass(eq=False)
class _Agent:
    host: Host
    process: subprocess.Popen[bytes]
    is_here: bool
    """Whether it is on this very host, without ssh."""
    lines: dict[str, Lines] = field(
        default_factory=lambda: {"stdout": Lines(None), "stderr": Lines()}
    )
    heard_at: float = field(default_factory=time.monotonic)
    hello: Here | None = None
    greeting: str = ""
    """What its shell said before, of its own."""
    reports: list[Report] = field(default_factory=list)
    """Answers that nobody has taken yet."""
    is_done: bool = False
    passed_on_at: float = 0.0
    """When the last thing that its ranks said was."""
    writing: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, order: Order) -> bool:
        """Whether it can be told."""
        assert self.process.stdin is not None
        try:
            with self.writing:
                self.process.stdin.write(encode(order))
                self.process.stdin.flush()
        except (OSError, ValueError):  # it is gone, or we have hung up
            return False
        return True

    def is_ending(self, since: float) -> bool:
        """Whether it may still tell that its ranks have ended. What they said before comes first,
        and however much that is, it is no sign of one that hangs."""
        return not self.is_done and time.monotonic() < max(since, self.passed_on_at) + ENDING_S

    def loss(self, what: str) -> Loss:
        return Loss(self.host.name, what, self._said)

    def loss_by_silence(self, *, why: str = "") -> Loss:
        what = f"nothing was heard from it for {time.monotonic() - self.heard_at:.0f} s{why}."
        return Loss(self.host.name, what, self._said, way="silent", agent=self._pid)

    def loss_by_delay(self) -> Loss:
        what = f"its ranks did not end within {ENDING_S:g} s."
        return Loss(self.host.name, what, self._said, way="late", agent=self._pid)

    def loss_of_process(self) -> Loss:
        return loss_of(
            self.host,
            self.process.returncode,
            self._said,
            was_up=self.hello is not None,
            by_ssh=not self.is_here,
        )

    @property
    def _pid(self) -> int | None:
        return self.hello.pid if self.hello else None

    @property
    def _said(self) -> str:
        return "".join(f"\n  {line}" for line in self.lines["stderr"].tail if line.strip())


class Agents(Closing):
    """One for each host, started together.

    A host that is lost is an error; with `keep_going`, it is noted in `lost` and the others go on.
    """

    def __init__(self, hosts: Sequence[Host], *, keep_going: bool = False) -> None:
        self._keep_going = keep_going
        self._is_gathering = False
        self.lost: dict[str, Loss] = {}
        self.with_results: list[Host] = []
        """Hosts, not this one, on which ranks left something to be fetched."""
        self._selector = selectors.DefaultSelector()
        self._agents: list[_Agent] = []
        self._keep: Callable[[Line], None] = lambda line: None
        self._on_report: Callable[[Host, Line | Said | Ended], None] = lambda host, report: None
        self._is_closed = threading.Event()
        # A thread: what the main one does may take long, a terminal that is held up for example.
        self._pinging = threading.Thread(target=self._ping, name="shoal-pings", daemon=True)
        try:
            for host in hosts:
                self._begin(host)
            self._pinging.start()
        except BaseException:
            self.close()
            raise

    def _begin(self, host: Host) -> None:
        is_here = is_this_host(host)
        if is_here:
            argv = [sys.executable, "-m", AGENT]
        else:
            argv = ssh_argv(host, find_python(host, AGENT))
        with ssh_needed():
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,  # Ctrl-C is for us, and we tell them
                preexec_fn=die_with_parent(signal.SIGTERM),  # so that it can end its ranks
            )
        agent = _Agent(host, process, is_here)
        self._agents.append(agent)
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (agent, name))

    # -- asking ------------------------------------------------------------------------------------

    def hellos(self) -> dict[str, Here]:
        """By host, when all are up; with the same shoal and the same torch."""
        found = self.arrivals()
        if faults := version_faults([agent.host for agent in self._here()], found):
            raise MeetingError("\n".join(faults))
        return found

    def arrivals(self, limit_s: float = START_S) -> dict[str, Here]:
        """By host, when all are up or lost."""
        deadline = time.monotonic() + limit_s
        with self._losses_together():
            while missing := [a for a in self._here() if a.hello is None]:
                if time.monotonic() > deadline:
                    what = f"nothing was heard from its agent for {limit_s:g} s."
                    for agent in missing:
                        self._lose(agent, agent.loss(what))
                self._turn()
        return {agent.host.name: agent.hello for agent in self._agents if agent.hello}

    def look(self) -> None:
        """At what they have said by now, while something else is waited for; is one lost?"""
        with self._losses_together():
            self._turn(wait_s=0)

    def greeting(self, host: Host) -> str:
        """A line that its shell prints at every login, into all that is copied; empty: none."""
        return next(agent.greeting for agent in self._agents if agent.host is host)

    def is_here(self, host: Host) -> bool:
        return any(agent.is_here for agent in self._agents if agent.host is host)

    def ask(self, host: Host, order: Order, kind: type[Answer], limit_s: float = 30.0) -> Answer:
        answer = self.ask_each({host.name: order}, kind, limit_s).get(host.name)
        if answer is None:
            raise RunFailed(self.lost[host.name].text)
        return answer

    def ask_each(
        self, orders: Mapping[str, Order], kind: type[Answer], limit_s: float = 30.0
    ) -> dict[str, Answer]:
        """All at the same time; by host. Without those that are lost."""
        with self._losses_together():
            return self._ask_each(orders, kind, limit_s)

    def _ask_each(
        self, orders: Mapping[str, Order], kind: type[Answer], limit_s: float
    ) -> dict[str, Answer]:
        asked = [agent for agent in self._here() if agent.host.name in orders]
        for agent in asked:
            self._tell(agent, orders[agent.host.name])
        deadline = time.monotonic() + limit_s
        answers: dict[str, Answer] = {}
        while True:
            for agent in asked:
                for report in [r for r in agent.reports if isinstance(r, kind)]:
                    agent.reports.remove(report)
                    answers[agent.host.name] = report
            waiting = [a for a in asked if a.host.name not in (answers.keys() | self.lost.keys())]
            if not waiting:
                return answers
            if time.monotonic() > deadline:
                what = f"no answer within {limit_s:g} s."
                for agent in waiting:
                    self._lose(agent, agent.loss(what))
            else:
                self._turn()

    def tell(self, hosts: Sequence[Host], order: Order) -> None:
        """Those that are still there."""
        for agent in self._here():
            if agent.host in hosts:
                agent.tell(order)

    def run(
        self,
        starts: Sequence[Start],
        on_report: Callable[[Host, Line | Said | Ended], None],
        keep: Callable[[Line], None] = lambda line: None,
    ) -> RankEnd | None:
        """Run all ranks to their end. Returns the one to blame, or None if all went well.

        on_report: may take long, and be cut short by a signal.
        keep: gets every line before that, and none is missing, whatever comes when.
        """
        self._on_report, self._keep = on_report, keep
        self._is_gathering = True  # while all are being stopped for one, others may be lost too
        for agent, start in zip(self._agents, starts, strict=True):
            self._tell(agent, start)
        ends: list[RankEnd] = []
        deadline = float("inf")
        while not self.lost and not all(agent.is_done for agent in self._agents):
            self._turn()
            ends += self._new_ends()
            if ends:
                deadline = min(deadline, time.monotonic() + CAUSE_GRACE_S)
                cause = cause_of(ends)
                if cause is None or not cause.is_consequence or time.monotonic() > deadline:
                    self.stop()
                    return cause
        if self.lost:
            self.stop()
            raise RunFailed(self._losses)
        return cause_of(ends)

    def _new_ends(self) -> list[RankEnd]:
        """Of ranks to blame, on hosts where all have ended by now."""
        ends = []
        for agent in self._agents:
            for report in [r for r in agent.reports if isinstance(r, Done)]:
                agent.reports.remove(report)
                agent.is_done = True
                if report.has_results:
                    self.with_results.append(agent.host)
                if report.cause is not None:
                    ends.append(report.cause)
        return ends

    def stop(self) -> None:
        """End all ranks that are left; what they have left so far can be fetched. A host that is
        lost meanwhile is noted, and so is one that does not do it in time."""
        self._keep_going = True
        for agent in self._agents:
            if not agent.is_done:
                self._tell(agent, Stop())
        begun = time.monotonic()
        for agent in self._agents:
            self._take_all(agent)  # an interrupted turn may have left something
        self._new_ends()
        while any(a.is_ending(begun) for a in self._agents):
            self._turn()
            self._new_ends()
        for agent in self._agents:
            if not agent.is_done:
                is_silent = time.monotonic() > agent.heard_at + 2 * PING_S
                loss = agent.loss_by_silence() if is_silent else agent.loss_by_delay()
                self.lost[agent.host.name] = loss
                agent.is_done = True

    @property
    def _losses(self) -> str:
        others = [agent.host for agent in self._agents if not agent.is_here]
        return losses_together(others, self.lost)

    def _here(self) -> list[_Agent]:
        return [agent for agent in self._agents if agent.host.name not in self.lost]

    @contextmanager
    def _losses_together(self) -> Iterator[None]:
        """Whoever is lost meanwhile is told of at the end, with all others that are."""
        self._is_gathering = True
        try:
            yield
        finally:
            self._is_gathering = False
        if self.lost and not self._keep_going:
            raise RunFailed(self._losses)

    def _lose(self, agent: _Agent, loss: Loss) -> None:
        self.lost.setdefault(agent.host.name, loss)
        agent.is_done = True
        if agent.process.poll() is None:
            agent.process.kill()
        if not self._keep_going and not self._is_gathering:
            raise RunFailed(loss.text)

    def _ping(self) -> None:
        """In a thread."""
        while not self._is_closed.wait(PING_S):
            for agent in list(self._agents):
                if not agent.writing.locked():  # else it is being told something anyway
                    agent.tell(Ping())

    # -- one turn ----------------------------------------------------------------------------------

    def _turn(self, wait_s: float = 0.1) -> None:
        ready = self._selector.select(timeout=wait_s)
        looked_at = time.monotonic()
        for key, _ in ready:
            self._read(*key.data)
        for key, _ in ready:  # now, since to show what one has said may take long
            key.data[0].heard_at = time.monotonic()
        for agent in self._agents:
            if agent.is_done:
                continue
            if agent.process.poll() is not None:
                self._drain(agent)
                if not any(isinstance(report, Done) for report in agent.reports):
                    self._lose(agent, agent.loss_of_process())
            elif looked_at > agent.heard_at + SILENCE_S and agent.hello is not None:
                why = ": the connection is dead, or the host hangs"
                self._lose(agent, agent.loss_by_silence(why=why))

    def _tell(self, agent: _Agent, order: Order) -> None:
        if not agent.tell(order):
            with suppress(subprocess.TimeoutExpired):
                agent.process.wait(ENDING_S)
            self._drain(agent)
            self._lose(agent, agent.loss_of_process())

    def _read(self, agent: _Agent, name: str) -> bool:
        """What there is; whether there may be more."""
        stream = agent.process.stdout if name == "stdout" else agent.process.stderr
        assert stream is not None
        lines = agent.lines[name]
        try:
            with uncut:
                if data := os.read(stream.fileno(), 256 * 1024):
                    lines.add(data)
                else:
                    lines.end()
        except BlockingIOError:
            return False
        self._take_all(agent)
        if not data:
            self._selector.unregister(stream)
            stream.close()
        return bool(data)

    def _drain(self, agent: _Agent) -> None:
        for name, stream in (("stdout", agent.process.stdout), ("stderr", agent.process.stderr)):
            while stream is not None and not stream.closed and self._read(agent, name):
                continue

    def _take_all(self, agent: _Agent) -> None:
        """What has come from it, in order; what is left by an interruption, the next time."""
        while agent.lines["stderr"].take() is not None:
            continue  # it is remembered there
        is_more = True
        while is_more:
            with uncut:
                line = agent.lines["stdout"].take()
                is_more = line is not None
                report = self._take(agent, line) if line is not None else None
            if report is not None:
                self._on_report(agent.host, report)
                agent.passed_on_at = time.monotonic()

    def _take(self, agent: _Agent, line: bytes) -> Line | Said | Ended | None:
        """Returns what is not only for us."""
        try:
            report = read_report(line)
        except (msgspec.ValidationError, msgspec.DecodeError):
            agent.lines["stderr"].keep(line)  # a shell's greeting, or an error of its own
            if agent.hello is None:
                agent.greeting = agent.greeting or shown(line)
            return None
        match report:
            case Here():
                agent.hello = report
            case Line():
                self._keep(report)
                return report
            case Said() | Ended():
                return report
            case Refused(reason=reason):
                self._lose(agent, agent.loss(reason))
            case Alive():
                pass
            case _:
                agent.reports.append(report)
        return None

    def close(self) -> None:
        """End of the pipes, and so of all ranks; then of whoever has not heard it."""
        self._is_closed.set()
        for agent in self._agents:
            assert agent.process.stdin is not None
            with suppress(BrokenPipeError):  # it is gone already
                agent.process.stdin.close()
        deadline = time.monotonic() + ENDING_S
        for agent in self._agents:
            if agent.host.name in self.lost and not agent.is_here:
                agent.process.kill()  # ssh; whoever had its time already gets no more
            while agent.process.poll() is None and time.monotonic() < deadline:
                for key, _ in self._selector.select(timeout=0.05):
                    self._read(*key.data)
            if agent.process.poll() is None:
                agent.process.kill()
            agent.process.wait()
            self._drain(agent)
        self._selector.close()


def is_this_host(host: Host) -> bool:
    """No ssh is needed to come here: by our own name, or a loopback's."""
    if host.ssh and host.ssh != host.name:
        return False
    return host.name in ("localhost", "127.0.0.1", "::1", socket.gethostname())
