"""Processes that start at once: forks of one that has imported torch. Most tests waited for that.

This file is also the script of that one, the nursery. It reads orders, a line each, and tells of
each process when it was born and how it ended. A fork is a process like any other, with folder,
environment, output and signals of its own; only what Python does before the first line of a
program is not repeated. Whatever is about that is started with `Running` without a nursery.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import itertools
import json
import os
import pkgutil
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

# -- in the test -----------------------------------------------------------------------------------


class Host(Protocol):
    """One of lab/hosts.py."""

    @property
    def namespace(self) -> str: ...

    @property
    def name(self) -> str: ...


class Nursery:
    """Where processes are started."""

    def __init__(self) -> None:
        self._codes: dict[int, int] = {}
        """Of those that have ended, by number: pids come again."""
        known = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OPENBLAS_NUM_THREADS": "1"}  # when they load
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **known},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._told = self._process.stdin, self._process.stdout
        os.set_blocking(self._told.fileno(), False)
        self._rest = b""
        self._born: list[tuple[int, int]] = []

    def start(
        self,
        argv: Sequence[str],
        env: dict[str, str],
        cwd: Path,
        out: Path,
        err: Path,
        host: Host | None = None,
    ) -> Fork:
        """argv: the interpreter, then a script, or -m and a module, or -c and a program."""
        assert argv[0] == sys.executable, f"not a program of Python: {argv}"
        order = {
            "argv": list(argv[1:]),
            "env": env,
            "cwd": str(cwd),
            "out": str(out),
            "err": str(err),
            "host": None if host is None else [host.namespace, host.name],
        }
        self._orders.write(json.dumps(order).encode() + b"\n")
        self._orders.flush()
        while not self._born:
            self._read(None)
        return Fork(self, *self._born.pop())

    def ended(self, number: int, limit_s: float | None) -> int | None:
        """Its exit code, as soon as there is one or until the time is over."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while number not in self._codes:
            left_s = None if deadline is None else deadline - time.monotonic()
            self._read(left_s)
            if left_s is not None and left_s <= 0:
                break
        return self._codes.get(number)

    def _read(self, limit_s: float | None) -> None:
        """What has been told, or is told within the time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._told, selectors.EVENT_READ)
            if not selector.select(None if limit_s is None else max(0.0, limit_s)):
                return
        data = os.read(self._told.fileno(), 2**16)
        assert data, f"the nursery has ended with {self._process.wait()}"
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            number, pid, code = json.loads(line)
            if code is None:
                self._born.append((number, pid))
            else:
                self._codes[number] = code

    def close(self) -> None:
        self._orders.close()
        self._process.wait()
        self._told.close()


class Fork:
    """What tests need of a `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, number: int, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._number = number

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ended(self._number, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._nursery.ended(self._number, timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends at this moment
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# -- in the nursery --------------------------------------------------------------------------------


def prepare() -> None:
    """Import what every rank does. The first optimizer brings torch._dynamo: as long as torch."""
    import shoal

    importlib.import_module("torch._dynamo")
    for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, "threads do not survive a fork"
    gc.freeze()  # so that memory stays shared with the forks, and they end soon


def serve() -> dict[str, Any] | None:
    """Take orders until there are no more. Comes back in each fork, with its order."""
    orders, told = os.dup(0), os.dup(1)
    rest = b""
    numbers = itertools.count()
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ, None)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    number, pid = key.data
                    _, status = os.waitpid(pid, 0)
                    tell(told, number, pid, os.waitstatus_to_exitcode(status))
                    continue
                if not (data := os.read(orders, 2**16)):
                    return None
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if not (pid := os.fork()):
                        os.close(orders)
                        os.close(told)
                        order: dict[str, Any] = json.loads(line)
                        return order
                    number = next(numbers)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (number, pid))
                    tell(told, number, pid, None)


def tell(told: int, number: int, pid: int, code: int | None) -> None:
    """code: None at birth."""
    os.write(told, json.dumps([number, pid, code]).encode() + b"\n")


def move_to(namespace: str, name: str) -> None:
    """To another host, as its `command` does it."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_uts, new_net = 0x04000000, 0x40000000  # CLONE_NEWUTS, CLONE_NEWNET
    with Path("/run/netns", namespace).open() as net:
        if libc.setns(net.fileno(), new_net) or libc.unshare(new_uts):
            raise OSError(ctypes.get_errno(), f"cannot be on {name}")
    socket.sethostname(name)


def become(order: dict[str, Any]) -> None:
    """As the interpreter does it for a process of its own."""
    import torch

    if order["host"] is not None:
        move_to(*order["host"])
    files = [os.open(os.devnull, os.O_RDONLY)]
    files += [os.open(order[name], os.O_WRONLY) for name in ("out", "err")]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    random.seed()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = ["", *paths]


def run(argv: list[str]) -> None:
    match argv:
        case ["-m", module, *arguments]:
            sys.argv = [module, *arguments]
            sys.path[0] = str(Path.cwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", program, *arguments]:
            sys.argv = ["-c", *arguments]
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        case [script, *arguments]:
            sys.argv = [script, *arguments]
            sys.path[0] = str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    prepare()
    if (order := serve()) is not None:
        become(order)
        run(order["argv"])
