"""What goes before the buffers of a message, and what is believed of it.

A header is at most 64 KiB. A plan that is larger (a state dict of a thousand names) goes as the
first buffer instead, and the header says how long it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from shoal.errors import WireError
from shoal.wire.apart import Parcel
from shoal.wire.slots import Slot, check_slots

VERSION = 1
MAX_HEADER_BYTES = 64 * 1024
MAX_PLAN_BYTES = 4 * 2**20
MAX_TAG_LETTERS = 200
DEFAULT_LIMIT_BYTES = 64 * 2**30
"""Of one message's buffers together, before anything is allocated."""


class _Contents(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    plan: Any
    slots: list[Slot]


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A header as it travels."""

    version: int
    tag: str
    total_bytes: int
    plan_bytes: int
    contents: _Contents | None


_encode = msgspec.msgpack.Encoder().encode
_read_wire = msgspec.msgpack.Decoder(_Wire).decode
_read_contents = msgspec.msgpack.Decoder(_Contents).decode


class Header(NamedTuple):
    """A header that has been checked."""

    tag: str
    total_bytes: int
    plan_bytes: int
    """Length of the plan where it goes as a buffer; 0 where it is here."""
    plan: Any
    slots: list[Slot]


def encode(parcel: Parcel, tag: str, total_bytes: int) -> tuple[bytes, bytes]:
    """The header, and the plan that goes after it where it was too large to be inside."""
    contents = _Contents(parcel.plan, parcel.slots)
    inside = _encode(_Wire(VERSION, tag, total_bytes, 0, contents))
    if len(inside) <= MAX_HEADER_BYTES:
        return inside, b""
    plan = _encode(contents)
    if len(plan) > MAX_PLAN_BYTES:
        raise WireError(
            f"the message has {len(plan)} bytes of structure, without its tensors; "
            f"{MAX_PLAN_BYTES} is the most. Put numbers into tensors instead of lists."
        )
    return _encode(_Wire(VERSION, tag, total_bytes, len(plan), None)), plan


def decode(data: bytes | memoryview, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Header:
    """Believe nothing. Raises WireError for whatever `encode` would not have made."""
    if len(data) > MAX_HEADER_BYTES:
        raise WireError(f"a header of {len(data)} bytes; {MAX_HEADER_BYTES} is the most")
    wire = _decode(data, _read_wire)
    if wire.version != VERSION:
        raise WireError(f"wire version {wire.version}, this side speaks {VERSION}")
    if len(wire.tag) > MAX_TAG_LETTERS:
        raise WireError(f"a tag of {len(wire.tag)} letters; {MAX_TAG_LETTERS} is the most")
    if (wire.contents is None) != (wire.plan_bytes > 0) or wire.plan_bytes > MAX_PLAN_BYTES:
        raise WireError(f"a plan of {wire.plan_bytes} bytes, inside or not")
    if not 0 <= wire.total_bytes <= limit_bytes:
        raise WireError(f"buffers of {wire.total_bytes} bytes; the limit is {limit_bytes}")
    header = Header(wire.tag, wire.total_bytes, wire.plan_bytes, None, [])
    return header if wire.contents is None else _with_contents(header, wire.contents, limit_bytes)


def decode_plan(
    header: Header, data: bytes | memoryview, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> Header:
    """The header with the plan that came after it."""
    if len(data) != header.plan_bytes:
        raise WireError(f"a plan of {len(data)} bytes came, {header.plan_bytes} were announced")
    return _with_contents(header, _decode(data, _read_contents), limit_bytes)


def _with_contents(header: Header, contents: _Contents, limit_bytes: int) -> Header:
    total = check_slots(contents.slots, limit_bytes)
    if total != header.total_bytes:
        raise WireError(f"shapes make {total} bytes, the header says {header.total_bytes}")
    return Header(header.tag, total, header.plan_bytes, contents.plan, contents.slots)


def _decode(data: bytes | memoryview, read: Callable[[bytes | memoryview], Any]) -> Any:
    try:
        return read(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"not a header: {error}") from error
