"""MNIST's IDX format, plain or gzipped: read it whole, or say exactly what is wrong with it.

    00 00 | 08 (unsigned bytes) | how many dimensions | each in 4 bytes, big-endian | payload

Nothing is believed before it is checked: a header may claim anything, so its claim is held against
the bytes at hand before memory is taken, and a gzip is never unpacked further than its claim.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shoal.errors import DataError

Bytes = npt.NDArray[np.uint8]

MAX_PAYLOAD_BYTES = 1 << 30
"""Twenty times MNIST's training images. A larger claim is a broken header, not a data set."""

_GZIP_MAGIC = b"\x1f\x8b"
# Deflate packs 1032 to 1 at best: a claim beyond that is seen to be a lie before unpacking.
_DEFLATE_MAX_RATIO = 1032
_UNSIGNED_BYTE = 0x08
_CHUNK_BYTES = 1 << 20
_REMEDY = "Fetch the file again, from where you had it or from a mirror."


def check(path: Path, item_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The array's shape (n, *item_shape), after every byte was counted; DataError if one is amiss.

    A plain file costs a header; a gzip is unpacked once into one small buffer.
    """
    with _opened(path, item_shape) as (shape, fill):
        scratch = memoryview(bytearray(min(_CHUNK_BYTES, math.prod(shape) + 1)))
        fill(lambda position: scratch)
    return shape


def read(path: Path, item_shape: tuple[int, ...]) -> Bytes:
    """The whole array (n, *item_shape), writable; DataError on everything that `check` finds."""
    with _opened(path, item_shape) as (shape, fill):
        array = np.empty(shape, dtype=np.uint8)
        flat = array.reshape(-1).data
        fill(lambda position: flat[position : position + _CHUNK_BYTES])
    return array


def encode(array: Bytes) -> bytes:
    """The inverse of `read`: the bytes of a plain IDX file."""
    head = struct.pack(f">HBB{array.ndim}I", 0, _UNSIGNED_BYTE, array.ndim, *array.shape)
    return head + array.tobytes()


_Fill = Callable[[Callable[[int], memoryview]], None]


@contextmanager
def _opened(path: Path, item_shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], _Fill]]:
    """The shape that the header claims, and a function that reads the payload and counts it."""
    zipped = False
    try:
        # Not merely `exists`: opening a named pipe would wait for ever.
        if not path.is_file():
            raise DataError(f"{path}: expected an IDX file, found no regular file there. {_REMEDY}")
        with path.open("rb") as raw:
            zipped = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            if path.suffix == ".gz" and not zipped:
                got = _hex(raw.read(4))
                raise DataError(f"{path}: expected a gzip (1f 8b ...), got {got}. {_REMEDY}")
            size_bytes = path.stat().st_size
            if zipped:
                with gzip.GzipFile(fileobj=raw, mode="rb") as stream:
                    shape = _header(path, stream, item_shape, size_bytes * _DEFLATE_MAX_RATIO)
                    yield shape, lambda room: _count(path, stream, shape, room)
            else:
                shape = _header(path, raw, item_shape, size_bytes)
                yield shape, lambda room: _count(path, raw, shape, room)
    except EOFError as err:  # how the gzip module says that its end is missing
        raise DataError(
            f"{path}: expected a whole gzip, got one that is cut short. {_REMEDY}"
        ) from err
    except (gzip.BadGzipFile, zlib.error) as err:
        raise DataError(
            f"{path}: expected a sound gzip, got a damaged one ({err}). {_REMEDY}"
        ) from err
    except OSError as err:
        reason = err.strerror or str(err)
        raise DataError(
            f"{path}: cannot be read ({reason}). Check the path and its rights."
        ) from err


def _header(
    path: Path, stream: BufferedIOBase, item_shape: tuple[int, ...], room_bytes: int
) -> tuple[int, ...]:
    """The shape, if the header is one of unsigned bytes of this item shape and can be true."""
    num_dims = 1 + len(item_shape)
    want = struct.pack(">HBB", 0, _UNSIGNED_BYTE, num_dims)
    magic = stream.read(4)
    if len(magic) == 4 and magic != want:
        raise DataError(
            f"{path}: expected magic {_hex(want)} (unsigned bytes in {_dims(num_dims)}), "
            f"got {_hex(magic)}. Is it the right file? {_REMEDY}"
        )
    sizes = stream.read(4 * num_dims)
    header_bytes = 4 + 4 * num_dims
    if len(magic) + len(sizes) < header_bytes:
        raise DataError(
            f"{path}: expected a header of {header_bytes} bytes, the file ends after "
            f"{len(magic) + len(sizes)}. {_REMEDY}"
        )
    shape: tuple[int, ...] = struct.unpack(f">{num_dims}I", sizes)
    if shape[1:] != item_shape:
        raise DataError(
            f"{path}: expected items of {_times(item_shape)}, got {_times(shape[1:])}. "
            "Is it the right file?"
        )
    claim = math.prod(shape)
    if claim > MAX_PAYLOAD_BYTES:
        raise DataError(
            f"{path}: the header claims {claim:,} bytes ({_times(shape)}), expected at most "
            f"{MAX_PAYLOAD_BYTES:,}. {_REMEDY}"
        )
    if header_bytes + claim > room_bytes:
        raise DataError(
            f"{path}: expected {header_bytes + claim:,} bytes by its header ({_times(shape)}), "
            f"there can be at most {room_bytes:,}: it is cut short. {_REMEDY}"
        )
    return shape


def _count(
    path: Path, stream: BufferedIOBase, shape: tuple[int, ...], room: Callable[[int], memoryview]
) -> None:
    """Read the payload into the buffers that `room` gives for each position; not a byte more."""
    claim, position = math.prod(shape), 0
    while position < claim:
        buffer = room(position)[: claim - position]
        got = stream.readinto(buffer)
        if got == 0:
            raise DataError(
                f"{path}: expected {claim:,} bytes after the header ({_times(shape)}), "
                f"got {position:,}: it is cut short. {_REMEDY}"
            )
        position += got
    # This last read must find the end, which is also what makes gzip compare its checksum.
    if stream.read(1):
        raise DataError(
            f"{path}: expected to end after {claim:,} bytes of payload ({_times(shape)}), "
            f"but more follow. {_REMEDY}"
        )


def _hex(some: bytes) -> str:
    return some.hex(" ") or "nothing (the file is empty)"


def _dims(num_dims: int) -> str:
    return "1 dimension" if num_dims == 1 else f"{num_dims} dimensions"


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "single bytes"
