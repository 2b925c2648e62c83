"""Tiny data sets on disk, and a real HTTP server on loopback that can misbehave."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from shoal.train.data import idx
from shoal.train.data.sources import Source, SourceFile

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@dataclass
class Tiny:
    """Four IDX files of noise: 6 images to train on, 3 to test with."""

    arrays: dict[str, idx.Bytes]

    @property
    def plain(self) -> dict[str, bytes]:
        return {name: idx.encode(array) for name, array in self.arrays.items()}

    @property
    def packed(self) -> dict[str, bytes]:
        return {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in self.plain.items()}

    def source(self, *mirrors: str, system_dir: Path | None = None) -> Source:
        first, second, third, fourth = (
            SourceFile(
                name=name,
                shape=array.shape,
                sha256=hashlib.sha256(self.plain[name]).hexdigest(),
            )
            for name, array in self.arrays.items()
        )
        return Source(
            name="mnist",
            files=(first, second, third, fourth),
            subfolders=("mnist", "MNIST/raw"),
            system_dir=system_dir,
            mirrors=mirrors,
        )

    def write(self, folder: Path, spell: Callable[[str], str] = lambda name: name) -> Path:
        """The four files in `folder`, packed if the spelling ends in .gz."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.plain.items():
            path = folder / spell(name)
            path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return folder


def make_tiny(seed: int = 0) -> Tiny:
    rng = np.random.default_rng(seed)
    shapes = ((6, 28, 28), (6,), (3, 28, 28), (3,))
    return Tiny(
        {
            name: rng.integers(0, 10 if len(shape) == 1 else 256, size=shape, dtype=np.uint8)
            for name, shape in zip(NAMES, shapes, strict=True)
        }
    )


@pytest.fixture
def tiny() -> Tiny:
    return make_tiny()


@pytest.fixture
def other() -> Tiny:
    """The same shapes, other bytes."""
    return make_tiny(1)


@dataclass
class Mirror:
    """What a server has, how it behaves, and what it was asked."""

    files: dict[str, bytes]
    knows_range: bool = True
    tells_length: bool = True
    content_range: str | None = None
    """Answer every Range with this header, true or not."""
    cuts: list[int] = field(default_factory=list)
    """Hang up after so many bytes, one entry an answer; whole answers when the list is empty."""
    gate: threading.Event = field(default_factory=threading.Event)
    """No body is sent before this is set."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self.gate.set()


class _Handler(BaseHTTPRequestHandler):
    mirror: Mirror

    def do_GET(self) -> None:
        mirror, name, asked = self.mirror, self.path.lstrip("/"), self.headers.get("Range")
        mirror.asked.append((name, asked))
        data = mirror.files.get(name)
        if data is None:
            self.send_error(404)
            return
        start = 0
        if asked and mirror.knows_range:
            match = re.fullmatch(r"bytes=(\d+)-", asked)
            assert match is not None
            start = int(match[1])
            if start >= len(data):
                self.send_error(416)
                return
            self.send_response(206)
            honest = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.send_header("Content-Range", mirror.content_range or honest)
        else:
            self.send_response(200)
        body = data[start:]
        if mirror.tells_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.flush()
        mirror.gate.wait(20)
        with contextlib.suppress(OSError):  # the client may have seen enough
            self.wfile.write(body[: mirror.cuts.pop(0)] if mirror.cuts else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mirror], str]]:
    """Start a server for a mirror; gives its address. All are stopped at the end."""
    # Loopback is reached directly, whatever proxy the machine is set to.
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running: list[tuple[Mirror, ThreadingHTTPServer, threading.Thread]] = []

    def start(mirror: Mirror) -> str:
        handler = type("Handler", (_Handler,), {"mirror": mirror})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = False  # so that server_close waits for them
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        running.append((mirror, server, thread))
        mirror.url = f"http://127.0.0.1:{server.server_port}/"
        return mirror.url

    yield start
    for mirror, server, thread in running:
        mirror.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def mirror_of(serve: Callable[[Mirror], str]) -> Callable[..., Mirror]:
    """A running mirror: mirror_of(files, knows_range=False, ...)."""

    def start(files: dict[str, bytes], **how: object) -> Mirror:
        mirror = Mirror(files, **how)  # type: ignore[arg-type]
        serve(mirror)
        return mirror

    return start


@pytest.fixture
def dead_url() -> str:
    """An address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return f"http://127.0.0.1:{port}/"
