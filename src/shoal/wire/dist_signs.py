"""Signs over gloo: what tells of a rank, or of memory that it lends, and is no message itself."""

from __future__ import annotations

import struct

from shoal.errors import WireError

BEAT, ASK, GOODBYE, DROPPED = b"b", b"a", b"g", b"d"
"""What a sign begins with. A reason may follow. ASK: for a sign of life, at once."""
LENT, TAKEN = b"l", b"t"
"""A front and an offer follow; a message's number (loans.py)."""
MAX_REASON_LETTERS = 500

_LENGTH = struct.Struct("<I")


def lent(front: bytes, offer: bytes) -> bytes:
    return b"".join([LENT, _LENGTH.pack(len(front)), front, offer])


def read_lent(sign: bytes) -> tuple[bytes, bytes]:
    """The front, and the offer."""
    begin = len(LENT) + _LENGTH.size
    if len(sign) < begin:
        raise WireError("a part of the message is missing")
    (length,) = _LENGTH.unpack_from(sign, len(LENT))
    return sign[begin : begin + length], sign[begin + length :]
