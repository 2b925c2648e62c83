"""Bytes for tests, changed as an accident or an attacker might change them."""

from __future__ import annotations

import random


def mutate(data: bytes, chance: random.Random) -> bytes:
    """One to four times: a byte or a bit changed, the end cut off, bytes put in or swapped."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) or 1)
        match chance.randrange(5):
            case 0 if changed:
                changed[at] = chance.randrange(256)
            case 1 if changed:
                changed[at] ^= 1 << chance.randrange(8)
            case 2:
                del changed[at:]
            case 3:
                changed[at:at] = chance.randbytes(chance.randint(1, 8))
            case 4:
                other = chance.randrange(len(changed) or 1)
                changed[at : at + 4], changed[other : other + 4] = (
                    changed[other : other + 4],
                    changed[at : at + 4],
                )
    return bytes(changed)
