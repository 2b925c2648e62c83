"""What runs on every host of `--hosts`, at the other end of ssh: `python -m shoal.launch.agent`.

It starts the ranks of its host and passes on what they say. Whatever happens to the launcher or to
the connection, nothing stays behind here: without a word from the launcher for a while, or when its
end of the pipe is closed, the ranks are ended.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import queue
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.launch.local import Interrupted, Listener, RankCommand, Stream, run_ranks
from shoal.launch.messages import (
    Alive,
    Clean,
    Done,
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
    Probe,
    Refused,
    Report,
    Said,
    Start,
    Stop,
    TellTime,
    encode,
    read_order,
)
from shoal.launch.outcome import RankEnd, end_in
from shoal.launch.output import Lines
from shoal.launch.probing import answer
from shoal.rendezvous.ways import ends_of_ssh, inherited_environment
from shoal.settings import CONFIG_VARIABLE, cache_dir, threads_each
from shoal.version import VERSION

SILENCE_S = 15.0
"""Without a word from the launcher for so long, it or the connection is gone."""
ALIVE_S = 2.0


class Agent:
    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._writing = threading.Lock()
        self._is_running = threading.Event()
        """Whether there is something to end when the launcher leaves: ranks, or a measurement."""
        self._is_stopped = threading.Event()
        """Whether the launcher wants the ranks ended."""
        self._folder: Path | None = None

    def serve(self) -> int:
        """Until the launcher leaves."""
        self._say(_here())
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True).start()
        try:
            while (order := self._orders.get()) is not None:
                match order:
                    case Prepare():
                        self._say(self._prepare(order))
                    case FindPort():
                        self._say(Port(port=_free_port()))
                    case Start():
                        self._start(order)
                    case TellTime() | FindAddress() | Listen() | Measure() | Examine():
                        self._say(self._probe(order))
                    case Clean() if self._folder is not None:
                        shutil.rmtree(self._folder, ignore_errors=True)
                    case _:
                        pass
        except OSError as error:
            self._say(Refused(reason=str(error)))
            return 1
        return 0

    def _say(self, report: Report) -> None:
        data = encode(report)
        with self._writing:
            while data:
                data = data[os.write(1, data) :]

    def _probe(self, order: Probe) -> Report:
        self._is_running.set()
        try:
            return answer(order)
        finally:
            self._is_running.clear()

    def _prepare(self, order: Prepare) -> Prepared | Refused:
        base = Path(order.folder).expanduser() if order.folder else cache_dir() / "runs"
        self._folder = (base / order.run).absolute()
        code, results = self._folder / "code", self._folder / "results"
        try:
            base.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(base).free
            if free < order.needed_bytes:
                return Refused(
                    reason=f"{free // 2**20} MiB are free on the disk of {base}, and a run needs "
                    f"{order.needed_bytes // 2**20}. Free some, or give one on another disk: "
                    'folder = "PATH" in hosts.toml.'
                )
            self._folder.mkdir(mode=0o700)
            for each in (code, results):
                each.mkdir()
        except OSError as error:
            return Refused(
                reason=f"no folder for this run can be made in {base} ({error.strerror}). Give one "
                'that this user may write: folder = "PATH" in hosts.toml.'
            )
        return Prepared(code=str(code), results=str(results))

    def _start(self, order: Start) -> None:
        with _secret_files(order.secrets) as own:
            self._run(order, own)

    def _run(self, order: Start, own: dict[str, str]) -> None:
        """own: variables that all ranks get."""
        threads = str(order.threads or threads_each(len(order.ranks)))
        own = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads, **own}
        commands = [
            RankCommand(
                rank=task.rank,
                argv=[sys.executable, *task.arguments],
                environment=inherited_environment(**own, **task.environment),
            )
            for task in order.ranks
        ]
        os.chdir(order.folder)
        self._is_running.set()
        try:
            cause = run_ranks(commands, Listener(on_line=self._on_line, on_event=self._on_event))
        except Interrupted:
            if not self._is_stopped.is_set():  # the launcher is gone: there is nobody to tell
                raise SystemExit(1) from None
            cause = None
        finally:
            self._is_running.clear()
        has_results = self._folder is not None and any((self._folder / "results").iterdir())
        self._say(Done(cause=cause, has_results=has_results))

    def _on_line(self, rank: int, stream: Stream, text: str) -> None:
        self._say(Line(rank=rank, stream=stream, text=text))

    def _on_event(self, rank: int, line: bytes) -> RankEnd | None:
        self._say(Said(rank=rank, event=line.decode()))
        return end_in(rank, line)

    # -- in threads --------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Orders, to the end of standard input, or until nothing has come for too long."""
        lines = Lines(None)
        selector = selectors.DefaultSelector()
        selector.register(0, selectors.EVENT_READ)
        while selector.select(SILENCE_S) and (data := os.read(0, 256 * 1024)):
            for line in lines.feed(data):
                order = read_order(line)
                if isinstance(order, Stop):
                    self._is_stopped.set()
                    self._end_ranks()
                elif not isinstance(order, Ping):
                    self._orders.put(order)
        self._orders.put(None)
        self._end_ranks()

    def _end_ranks(self) -> None:
        if self._is_running.is_set():
            os.kill(os.getpid(), signal.SIGTERM)  # as any launcher of local ranks is told

    def _beat(self) -> None:
        """Signs of life, so that the launcher notices where a connection is dead."""
        pause = threading.Event()
        while not pause.wait(ALIVE_S):
            try:
                self._say(Alive())
            except OSError:
                return  # whoever listens notices too


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


@contextmanager
def _secret_files(contents: dict[str, str]) -> Iterator[dict[str, str]]:
    """In a folder that nobody else may enter, for as long as they are needed; its variable."""
    if not contents:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        for name, content in contents.items():
            path = Path(folder) / name
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                file.write(content)
        yield {CONFIG_VARIABLE: folder}


if __name__ == "__main__":
    sys.exit(Agent().serve())
