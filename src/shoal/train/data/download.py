"""One file from the first mirror that gives it whole and true.

    GET, Range from the end of .part -> append to .part -> unpack and compare sha256 -> rename

Only the rename makes the final name appear, so a half-written file is never taken for a whole one.
A cut leaves .part, and the next try, in this process or in the next, goes on from there.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from shoal.errors import DataError
from shoal.train.data.sources import Source, SourceFile

Progress = Callable[[str, int, int | None], None]
"""Told (file name, bytes so far, bytes in all if known) as a file comes in."""

TIMEOUT_S = 20.0
"""For each network call: to connect, and to receive the next bytes."""
MIRROR_DEADLINE_S = 1_800.0
"""For one file from one mirror: a server that sends a byte now and then meets every timeout."""
TRIES_PER_MIRROR = 6
"""A line that is cut may be cut again; beyond this, another mirror is the better bet."""

_CHUNK_BYTES = 1 << 16


class _CutShort(Exception):
    """The bytes so far may be good, more are needed: go on from there."""


class _NotHere(Exception):
    """This mirror will not do: try the next."""


def fetch(
    source: Source,
    file: SourceFile,
    folder: Path,
    progress: Progress,
    *,
    timeout_s: float = TIMEOUT_S,
) -> Path:
    """Download `file` into `folder` as `<name>.gz`; DataError, mirror by mirror, if none has it.

    The caller sees to it that only one process does this at a time.
    """
    final = folder / f"{file.name}.gz"
    part = folder / f"{file.name}.gz.part"
    reasons: list[str] = []
    try:
        for mirror in source.mirrors:
            url = f"{mirror}{final.name}"
            try:
                _from_mirror(url, file, part, progress, timeout_s)
            except _NotHere as err:
                reasons.append(f"  {url}: {err}")
            else:
                part.replace(final)
                return final
    except OSError as err:
        # What the network does is told apart below, so this is our own disk: no mirror would help.
        raise DataError(
            f"{part}: cannot be written ({_words(err)}). Make room or rights there, "
            "or have the data in a folder of your own and give it as --data-dir."
        ) from err
    raise DataError(
        f"{final.name} of {source.name} could not be downloaded:\n"
        + "\n".join(reasons)
        + "\nIs this machine on the network? Otherwise put the four files "
        + f"({', '.join(f'{one.name}.gz' for one in source.files)}) into a folder "
        + "and give it as --data-dir."
    )


def _from_mirror(
    url: str, file: SourceFile, part: Path, progress: Progress, timeout_s: float
) -> None:
    """Fill `part` with the whole, verified file, or raise _NotHere."""
    deadline = time.monotonic() + MIRROR_DEADLINE_S
    inherited = _size(part) > 0
    reason = ""
    for _ in range(TRIES_PER_MIRROR):
        had = _size(part)
        try:
            _receive(url, file, part, progress, timeout_s, deadline)
        except _CutShort as err:
            reason = str(err)
            if _size(part) <= had:
                break  # not one byte nearer: the mirror is stuck
            continue
        wrong = _unlike(part, file)
        if wrong is None:
            return
        part.unlink()
        reason = wrong
        if not inherited:
            break  # all of it came from this mirror, which would send the same again
        inherited = False  # what an earlier try left may be to blame: once more from the start
    raise _NotHere(reason)


def _receive(
    url: str, file: SourceFile, part: Path, progress: Progress, timeout_s: float, deadline: float
) -> None:
    """Append to `part` what it lacks. _CutShort: try again from there. _NotHere: do not."""
    # Packing adds a thousandth at most, even to noise, so nothing honest is larger than this.
    most = file.size_bytes + file.size_bytes // 1_000 + 1_024
    have = _size(part)
    response = _open(url, have, timeout_s)
    if response is None:
        return  # nothing follows what we have: the sha256 decides
    with response:
        have, total = _span(response, have)
        if total is not None and total > most:
            raise _NotHere(f"expected at most {most:,} bytes, it announces {total:,}")
        with part.open("r+b" if have else "wb") as sink:
            sink.seek(have)
            while total is None or have < total:
                if time.monotonic() > deadline:
                    raise _NotHere(f"not done after {MIRROR_DEADLINE_S:.0f} s ({have:,} bytes)")
                chunk = _next(response, have)
                if not chunk:
                    break
                have += len(chunk)
                if have > most:
                    raise _NotHere(f"expected at most {most:,} bytes, more came")
                sink.write(chunk)
                progress(f"{file.name}.gz", have, total)
            # Before the rename, or a power cut could leave the final name on an empty file.
            sink.flush()
            os.fsync(sink.fileno())
    if total is not None and have < total:
        raise _CutShort(f"cut after {have:,} of {total:,} bytes")


def _open(url: str, have: int, timeout_s: float) -> http.client.HTTPResponse | None:
    """Ask for the bytes from `have` on; None if the server says that there are none."""
    # identity: nobody on the way shall pack or unpack what is packed already.
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        return cast(http.client.HTTPResponse, urllib.request.urlopen(request, timeout=timeout_s))
    except urllib.error.HTTPError as err:
        err.close()
        if err.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            return None
        raise _NotHere(f"HTTP {err.code} {err.reason}") from err
    except urllib.error.URLError as err:
        raise _NotHere(str(err.reason)) from err
    except (OSError, http.client.HTTPException) as err:
        raise _NotHere(f"no answer ({_words(err)})") from err


def _span(response: http.client.HTTPResponse, have: int) -> tuple[int, int | None]:
    """(where the answer begins, the size of the whole file if it is told)."""
    if response.status != http.client.PARTIAL_CONTENT:
        # The server does not know Range, and sends the whole file again.
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if length.isdecimal() else None
    told = response.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", told)
    if match is None or int(match[1]) != have:
        raise _NotHere(f"asked for the bytes from {have:,} on, it answers {told!r}")
    return have, int(match[2])


def _next(response: http.client.HTTPResponse, have: int) -> bytes:
    try:
        # read1 is at most one recv, so that the deadline is looked at in time.
        return response.read1(_CHUNK_BYTES)
    except (OSError, http.client.HTTPException) as err:
        raise _CutShort(f"cut after {have:,} bytes ({_words(err)})") from err


def _unlike(part: Path, file: SourceFile) -> str | None:
    """What tells `part` from the file we want; None if it is that file."""
    digest, size = hashlib.sha256(), 0
    try:
        with gzip.open(part, "rb") as unpacked:
            # One byte beyond the known size is enough to refuse: never unpack without end.
            while size <= file.size_bytes and (chunk := unpacked.read(_CHUNK_BYTES)):
                digest.update(chunk)
                size += len(chunk)
    except (EOFError, gzip.BadGzipFile, zlib.error) as err:
        return f"expected a sound gzip, got {_size(part):,} other bytes ({_words(err)})"
    if size != file.size_bytes:
        more = "more" if size > file.size_bytes else f"{size:,}"
        return f"expected {file.size_bytes:,} bytes unpacked, got {more}"
    if digest.hexdigest() != file.sha256:
        return f"expected sha256 {file.sha256} unpacked, got {digest.hexdigest()}"
    return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _words(err: Exception) -> str:
    return str(err) or type(err).__name__
