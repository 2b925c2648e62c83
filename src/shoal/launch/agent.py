"""What runs on every host of `--hosts`, at the other end of ssh: `python -m shoal.launch.agent`.

It starts the ranks of its host and passes on what they say. Whatever happens to the launcher or to
the connection, nothing runs on here: without a word from the launcher for a while, or when its end
of the pipe is closed, the ranks are ended. Of the run's folder, only results that nobody has
fetched stay.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import queue
import select
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.launch.descendants import RUN_VARIABLE, kill_marked, kill_program
from shoal.launch.local import (
    Interrupted,
    Listener,
    RankCommand,
    Stream,
    ignore_stop_signals,
    run_ranks,
    stop_signals,
)
from shoal.launch.messages import (
    AGENT,
    Alive,
    Clean,
    Done,
    Ended,
    Examine,
    FindAddress,
    FindPort,
    Here,
    Line,
    Listen,
    Measure,
    Order,
    Ping,
    Port,
    Prepare,
    Prepared,
    Refused,
    Report,
    Said,
    Start,
    Stop,
    Sweep,
    Swept,
    TellTime,
    encode,
    read_order,
)
from shoal.launch.outcome import RankEnd, end_in
from shoal.launch.output import Lines
from shoal.launch.probing import answer
from shoal.launch.room import base_of
from shoal.rendezvous.ways import ends_of_ssh, inherited_environment
from shoal.settings import (
    CONFIG_VARIABLE,
    THREADS_VARIABLE,
    threads_each,
    threads_in_environment,
)
from shoal.version import VERSION

SILENCE_S = 15.0
"""Without a word from the launcher for so long, it or the connection is gone."""
ALIVE_S = 2.0
SILENT = (
    f"it heard nothing from this command for {SILENCE_S:g} s and ended its ranks. Was the command "
    "suspended (Ctrl-Z), or this machine asleep?"
)
WRITE_S = 0.1
"""How soon it is noticed, while the launcher takes nothing, that there is something else to do."""
REMOVE_S = 5.0
"""How long a copy that was cut short may go on writing into a folder that is to be removed."""


class Agent:
    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._writing = threading.Lock()
        self._unsaid = bytearray()
        """Reports that the launcher has not taken yet."""
        self._is_running = threading.Event()
        """Whether there are ranks."""
        self._is_stopped = threading.Event()
        """Whether the launcher wants the ranks ended."""
        self._folder: Path | None = None
        self._secrets: Path | None = None
        self._is_fetched = threading.Event()
        """Whether the launcher has what ranks left here."""
        self._is_left = threading.Event()
        """Whether nobody listens to us any more."""

    def serve(self) -> int:
        """Until the launcher leaves."""
        os.set_blocking(1, False)
        with stop_signals():
            try:
                self._say(_here())
                for work in (self._listen, self._beat):
                    threading.Thread(target=work, daemon=True).start()
                while (order := self._orders.get()) is not None:
                    self._obey(order)
            except Interrupted:
                return 0 if self._is_left.is_set() else 1
            except OSError as error:
                self._say(Refused(reason=str(error)))
                return 1
            finally:
                try:
                    ignore_stop_signals()
                finally:
                    self._remove()
        return 0

    def _obey(self, order: Order) -> None:
        match order:
            case Prepare():
                self._say(self._prepare(order))
            case FindPort():
                self._say(Port(port=_free_port()))
            case Start():
                self._start(order)
            case Sweep():
                self._say(self._sweep(order))
            case TellTime() | FindAddress() | Listen() | Measure() | Examine():
                self._say(answer(order))
            case _:
                pass

    def _say(self, report: Report) -> None:
        if self._is_left.is_set():
            return
        with self._writing:
            self._unsaid += encode(report)
            self._write()

    def _write(self) -> None:
        """All that is unsaid; but a launcher that is slow to take it is not waited for while ranks
        are to be ended. Then it is said with the next report: nothing is left out."""
        while self._unsaid and not self._is_left.is_set():
            try:
                del self._unsaid[: os.write(1, self._unsaid)]
            except BlockingIOError:
                if self._is_stopped.is_set() and self._is_running.is_set():
                    return
                select.select([], [1], [], WRITE_S)

    def _remove(self) -> None:
        """The keys and the folder of the run; but not what ranks left and nobody has."""
        if self._secrets is not None:
            remove(self._secrets)
        if self._folder is None:
            return
        if not self._is_fetched.is_set():  # it ended before its time: a copy may be under way
            kill_marked(self._folder.name)
        remove(self._folder / "code")
        if self._is_fetched.is_set() or not self._has_results():
            remove(self._folder)

    def _has_results(self) -> bool:
        if self._folder is None:  # ranks of the launcher's own host leave them where they belong
            return False
        results = self._folder / "results"
        return results.is_dir() and any(results.iterdir())

    def _prepare(self, order: Prepare) -> Prepared | Refused:
        base = base_of(order.folder)
        self._folder = base / order.run
        code, results = self._folder / "code", self._folder / "results"
        if order.project is not None and not Path(order.project).is_dir():
            return Refused(
                reason=f"there is no folder {order.project}, which --no-sync takes for granted. "
                "Leave --no-sync out (the code is copied then), or bring the folder there."
            )
        try:
            base.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(base).free
            if free < order.needed_bytes:
                return Refused(
                    reason=f"{free // 2**20} MiB are free on the disk of {base}, and a run needs "
                    f"{order.needed_bytes // 2**20}. Free some, or give one on another disk: "
                    f"{order.advice}"
                )
            self._folder.mkdir(mode=0o700)
            for each in (code, results):
                each.mkdir()
        except OSError as error:
            return Refused(
                reason=f"no folder for this run can be made in {base} ({error.strerror}). Give one "
                f"that this user may write: {order.advice}"
            )
        return Prepared(code=str(code), results=str(results))

    def _sweep(self, order: Sweep) -> Swept:
        self._folder = base_of(order.folder) / order.run  # and so ours to remove
        self._secrets = secrets_folder(order.run)
        ended = kill_marked(order.run)
        if order.agent is not None:  # last: its ranks would go with it, and not be counted
            kill_program(order.agent, AGENT)
        return Swept(ended=ended)

    def _start(self, order: Start) -> None:
        own = {"PYTHONUNBUFFERED": "1", RUN_VARIABLE: order.run}
        threads = order.threads or threads_in_environment() or threads_each(len(order.ranks))
        own[THREADS_VARIABLE] = str(threads)
        if order.secrets:
            self._secrets = secrets_folder(order.run)
            _write_secrets(self._secrets, order.secrets)
            own[CONFIG_VARIABLE] = str(self._secrets)
        commands = [
            RankCommand(
                rank=task.rank,
                argv=[sys.executable, *task.arguments],
                environment=inherited_environment(**own, **task.environment),
            )
            for task in order.ranks
        ]
        os.chdir(order.folder)
        try:
            self._is_running.set()
            listener = Listener(
                self._on_line, self._on_event, self._on_hidden, self._on_end,
                sees_all=False, is_stopped=self._is_stopped.is_set,
            )  # fmt: skip
            cause = run_ranks(commands, listener)
        except Interrupted:
            if not self._is_stopped.is_set():  # the launcher is gone: there is nobody to tell
                raise
            cause = None
        finally:
            self._is_running.clear()
            os.chdir("/")  # so that the folder can be removed
        self._say(Done(cause=cause, has_results=self._has_results()))

    def _on_line(self, rank: int, stream: Stream, line: bytes) -> None:
        self._say(Line(rank=rank, stream=stream, data=line))

    def _on_hidden(self, rank: int, line: bytes) -> None:
        self._say(Line(rank=rank, stream="stderr", data=line, is_shown=False))

    def _on_event(self, rank: int, line: bytes) -> RankEnd | None:
        self._say(Said(rank=rank, event=line.decode()))
        return end_in(rank, line)

    def _on_end(self, end: RankEnd) -> None:
        if end.return_code == 0:  # else the run is over
            self._say(Ended(rank=end.rank))

    # -- in threads --------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Orders, to the end of standard input, or until nothing has come for too long."""
        lines = Lines(None)
        selector = selectors.DefaultSelector()
        selector.register(0, selectors.EVENT_READ)
        while ready := selector.select(SILENCE_S):
            if not (data := os.read(0, 256 * 1024)):
                break
            for line in lines.feed(data):
                with suppress(msgspec.MsgspecError):  # cut short: the launcher was interrupted
                    self._hear(read_order(line))
        self._leave(is_silent=not ready)

    def _hear(self, order: Order) -> None:
        match order:
            case Stop():
                self._is_stopped.set()
            case Clean():
                self._is_fetched.set()
            case Ping():
                pass
            case _:
                self._orders.put(order)

    def _leave(self, *, is_silent: bool) -> None:
        """Whatever the main thread does, be it that it waits to be listened to."""
        if is_silent and self._writing.acquire(blocking=False):
            # Whoever wakes up later may want to know; but we wait for nobody now.
            with suppress(OSError):
                if not self._unsaid:
                    os.write(1, encode(Refused(reason=SILENT)))
            self._writing.release()
        self._is_left.set()
        _interrupt()
        self._orders.put(None)

    def _beat(self) -> None:
        """Signs of life, so that the launcher notices where a connection is dead."""
        pause = threading.Event()
        while not pause.wait(ALIVE_S):
            try:
                self._say(Alive())
            except OSError:
                return  # whoever listens notices too


def _interrupt() -> None:
    """The main thread: as any launcher of local ranks is told to stop."""
    os.kill(os.getpid(), signal.SIGTERM)


def _here() -> Here:
    seen_from, seen_as = ends_of_ssh()
    return Here(
        host=socket.gethostname(),
        pid=os.getpid(),
        python=sys.executable,
        python_version=platform.python_version(),
        shoal=VERSION,
        torch=_version_of("torch"),
        seen_as=seen_as,
        seen_from=seen_from,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        has_rsync=shutil.which("rsync") is not None,
    )


def _version_of(package: str) -> str:
    """Without importing it, which takes long."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def secrets_folder(run: str) -> Path:
    """Where the keys of this run are: known to whoever tidies up after a killed agent, too."""
    name = hashlib.sha256(run.encode()).hexdigest()[:16]  # of no length that a user chose
    return Path(tempfile.gettempdir()) / f"shoal-{name}"


def _write_secrets(folder: Path, contents: dict[str, str]) -> None:
    """In a folder of our own making, that nobody else may enter."""
    folder.mkdir(mode=0o700)
    for name, content in contents.items():
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(content)


def remove(folder: Path) -> None:
    """All of it, even if a copy is still under way there, whose end is near; and even if a folder
    of the user's code, or of the results, may not be written to."""
    deadline = time.monotonic() + REMOVE_S
    while folder.exists() and time.monotonic() < deadline:
        for path, names, _ in os.walk(folder):
            for inside in (Path(path, name) for name in names):  # which it looks into only then
                with suppress(OSError):  # it is gone, or another user's
                    if not inside.is_symlink():
                        inside.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(Agent().serve())
