"""IDX: what is read is what was written, and no damage passes."""

from __future__ import annotations

import contextlib
import gzip
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.errors import DataError
from shoal.train.data import idx

ARRAY = np.random.default_rng(0).integers(0, 256, size=(5, 28, 28), dtype=np.uint8)
PLAIN = idx.encode(ARRAY)
PACKED = gzip.compress(PLAIN, mtime=0)

# tmp_path is shared by a property's examples; each overwrites the file, so that is as it should be.
with_tmp = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)


def refused(path: Path, item_shape: tuple[int, ...] = (28, 28)) -> str:
    """The message, which `read` and `check` must share and which must name the file."""
    with pytest.raises(DataError) as by_read:
        idx.read(path, item_shape)
    with pytest.raises(DataError) as by_check:
        idx.check(path, item_shape)
    assert str(by_read.value) == str(by_check.value)
    assert str(path) in str(by_read.value)
    return str(by_read.value)


@with_tmp
@given(
    array=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=9)),
    packed=st.booleans(),
)
def test_round_trip(tmp_path: Path, array: idx.Bytes, packed: bool) -> None:
    path = tmp_path / ("some.gz" if packed else "some")
    data = idx.encode(array)
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    assert idx.check(path, array.shape[1:]) == array.shape
    back = idx.read(path, array.shape[1:])
    assert back.shape == array.shape
    assert back.dtype == np.uint8
    assert back.flags.writeable  # torch.from_numpy warns otherwise
    np.testing.assert_array_equal(back, array)


def test_larger_than_one_chunk(tmp_path: Path) -> None:
    array = np.random.default_rng(1).integers(0, 256, size=(3_000, 28, 28), dtype=np.uint8)
    path = tmp_path / "big.gz"
    path.write_bytes(gzip.compress(idx.encode(array), 1))
    np.testing.assert_array_equal(idx.read(path, (28, 28)), array)
    assert idx.check(path, (28, 28)) == array.shape


def test_gzip_is_known_by_its_bytes_not_its_name(tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(PACKED)
    np.testing.assert_array_equal(idx.read(path, (28, 28)), ARRAY)


@with_tmp
@given(keep=st.integers(0, len(PLAIN) - 1))
def test_plain_cut_anywhere(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "images"
    path.write_bytes(PLAIN[:keep])
    message = refused(path)
    assert "expected" in message
    assert "Fetch the file again" in message


@with_tmp
@given(
    # Header, first and last bytes of the gzip (its checksum and size) as often as the middle.
    keep=st.one_of(
        st.integers(0, 20),
        st.integers(len(PACKED) - 12, len(PACKED) - 1),
        st.integers(0, len(PACKED) - 1),
    )
)
def test_gzip_cut_anywhere(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(PACKED[:keep])
    message = refused(path)
    assert "cut short" in message or "expected a gzip" in message


@with_tmp
@given(keep=st.integers(0, len(PLAIN) - 1))
def test_payload_cut_inside_a_sound_gzip(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(PLAIN[:keep]))
    assert "expected" in refused(path)


@with_tmp
@given(at=st.integers(10, len(PACKED) - 1), flip=st.integers(1, 255))
def test_a_flipped_byte_of_a_gzip_never_passes(tmp_path: Path, at: int, flip: int) -> None:
    damaged = bytearray(PACKED)
    damaged[at] ^= flip
    path = tmp_path / "images.gz"
    path.write_bytes(bytes(damaged))
    # A few bits of deflate mean nothing: then nothing is lost, and reading may succeed.
    with contextlib.suppress(DataError):
        np.testing.assert_array_equal(idx.read(path, (28, 28)), ARRAY)


@pytest.mark.parametrize("packed", [False, True])
def test_trailing_bytes(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("images.gz" if packed else "images")
    data = PLAIN + b"\0"
    path.write_bytes(gzip.compress(data) if packed else data)
    assert "more follow" in refused(path)


def test_garbage_after_the_gzip(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(PACKED + b"garbage")
    assert "damaged" in refused(path)


def test_wrong_magic_shows_both(tmp_path: Path) -> None:
    labels = tmp_path / "labels"
    labels.write_bytes(idx.encode(np.zeros(100, dtype=np.uint8)))
    message = refused(labels)
    assert "00 00 08 03" in message
    assert "00 00 08 01" in message


def test_not_a_gzip(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(b"<html>no such file</html>")
    assert "expected a gzip (1f 8b ...), got 3c 68 74 6d" in refused(path)


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(b"")
    assert "the file is empty" in refused(path)


def test_images_of_another_size(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(idx.encode(np.zeros((4, 32, 32), dtype=np.uint8)))
    assert "expected items of 28 x 28, got 32 x 32" in refused(path)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("claim", [2**32 - 1, 1_000_000])
def test_a_lying_header_takes_no_memory(tmp_path: Path, packed: bool, claim: int) -> None:
    path = tmp_path / ("images.gz" if packed else "images")
    data = struct.pack(">HBBIII", 0, 8, 3, claim, 28, 28) + b"x" * 784
    path.write_bytes(gzip.compress(data) if packed else data)
    tracemalloc.start()
    try:
        refused(path)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_a_claim_beyond_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx, "MAX_PAYLOAD_BYTES", ARRAY.size - 1)
    path = tmp_path / "images"
    path.write_bytes(PLAIN)
    assert f"claims {ARRAY.size:,} bytes" in refused(path)


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(idx.encode(np.zeros(10, np.uint8)) + bytes(50_000_000), 1))
    tracemalloc.start()
    try:
        assert "more follow" in refused(path, ())
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_what_is_no_file(tmp_path: Path) -> None:
    assert "no regular file" in refused(tmp_path)
    assert "no regular file" in refused(tmp_path / "nowhere")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it would block for ever
    assert "no regular file" in refused(pipe)
