"""Memory that is read from another process, and all that can be wrong with that. Real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import numpy
import pytest

from shoal.wire import lending
from shoal.wire.lending import Lender, Seals, TakenBack, is_readable, read
from shoal.wire.loans import is_worth_lending

LENDER = """
import json, sys
import numpy
from shoal.wire.lending import Seals

seals = Seals(2)
lent = numpy.arange(100_000, dtype=numpy.uint8)
lender = seals.lender
print(json.dumps([lender.pid, lender.address, lender.seals, lent.ctypes.data]), flush=True)
for line in sys.stdin:
    seals.break_for(int(line))
    print("broken", flush=True)
"""
BORROWER = """
import os, sys
import msgspec
from shoal.wire.lending import Lender, is_readable
os.setuid(65534)
print(is_readable(msgspec.json.decode(sys.argv[1], type=Lender), 0))
"""
EXPECTED = numpy.arange(100_000, dtype=numpy.uint8)


class Other:
    """A process that lends 100,000 bytes."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        pid, address, seals, self.at = json.loads(self._line())
        self.lender = Lender(pid, address, seals)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def break_seal(self, rank: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{rank}\n")
        self.process.stdin.flush()
        assert self._line() == "broken\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def other() -> Iterator[Other]:
    made = Other()
    yield made
    made.kill()


def test_what_lies_there_is_read_into_place(other: Other) -> None:
    assert is_readable(other.lender, 1)
    whole, half = bytearray(100_000), bytearray(50)
    read(other.lender, 1, [other.at, other.at + 7], [memoryview(whole), memoryview(half)])
    assert whole == EXPECTED.tobytes()
    assert half == EXPECTED.tobytes()[7:57]


def test_what_was_taken_back_is_not_read(other: Other) -> None:
    other.break_seal(1)
    assert not is_readable(other.lender, 1)
    assert is_readable(other.lender, 0)  # whose seal is whole
    with pytest.raises(TakenBack):
        read(other.lender, 1, [other.at], [memoryview(bytearray(10))])


def test_a_process_that_has_ended(other: Other) -> None:
    other.kill()
    assert not is_readable(other.lender, 1)
    with pytest.raises(TakenBack):
        read(other.lender, 1, [other.at], [memoryview(bytearray(10))])


def test_a_process_that_has_the_id_of_another(other: Other) -> None:
    """As after an end whose id was given to the next; or in a container with ids of its own."""
    stranger = msgspec.structs.replace(other.lender, pid=os.getpid())
    assert not is_readable(stranger, 1)


@pytest.mark.parametrize("address", [0, 8, 2**47, 2**64 - 4096])
def test_an_address_where_nothing_is(other: Other, address: int) -> None:
    with pytest.raises(TakenBack):
        read(other.lender, 1, [address], [memoryview(bytearray(4096))])
    assert is_readable(other.lender, 1)


def test_a_part_that_ends_beyond_what_is_there(other: Other) -> None:
    with pytest.raises(TakenBack):
        read(other.lender, 1, [other.at], [memoryview(bytearray(2**30))])


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_cannot_read_it() -> None:
    seals = Seals(1)
    lender = msgspec.json.encode(seals.lender).decode()
    argv = [sys.executable, "-c", BORROWER, lender]
    assert subprocess.run(argv, capture_output=True, text=True).stdout == "False\n"
    assert is_readable(seals.lender, 0)


def test_memory_that_no_other_process_gets_at_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pinned memory; here it is an address where nothing is."""
    array = numpy.zeros(2**20, dtype=numpy.uint8)
    pinned = SimpleNamespace(nbytes=2**20, ctypes=SimpleNamespace(data=8))
    assert is_worth_lending([array])
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert is_worth_lending([array])
    assert not is_worth_lending([array, pinned])


def test_where_the_system_has_no_such_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seals = Seals(1)
    monkeypatch.setattr(lending, "_readv", None)
    assert not is_readable(seals.lender, 0)


@pytest.mark.parametrize("seals", ["", "ab", "no number"])
def test_seals_that_are_none(seals: str) -> None:
    assert not is_readable(msgspec.structs.replace(Seals(2).lender, seals=seals), 1)
