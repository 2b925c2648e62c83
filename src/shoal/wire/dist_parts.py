"""What a message over gloo is sent as: tensors of bytes, each under a tag.

tag 1         what a message begins with (first_piece.py), into room that is always waiting
tag 2         the rest of a front that is too long for one piece
tag 3         pieces of a buffer that is longer than one
tag 16 + n    a buffer of n bytes
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shoal.wire import first_piece
from shoal.wire.front import Memory
from shoal.wire.slots import as_tensor, view_of

FIRST, REST, PIECE, NEVER, WHOLE = 1, 2, 3, 4, 16
"""NEVER: what nothing is sent under."""
PIECE_BYTES = 2**20


class Parts(NamedTuple):
    tags: list[int]
    pieces: list[torch.Tensor]
    on_gpu: list[torch.Tensor]
    """What goes from GPU to GPU, behind all else."""


def parts_of(head: bytes, buffers: list[Memory], *, is_sign: bool = False) -> Parts:
    """In the order in which they are sent. head: none where the first buffer stands for it."""
    fronts: list[tuple[int, torch.Tensor]] = []
    wholes: list[tuple[int, torch.Tensor]] = []
    pieces: list[tuple[int, torch.Tensor]] = []
    on_gpu = []
    if head:
        message = as_tensor(bytearray(first_piece.with_length(head, is_sign=is_sign)))
        fronts.append((FIRST, message[: first_piece.MAX_PIECE_BYTES]))
        if len(message) > first_piece.MAX_PIECE_BYTES:
            fronts.append((REST, message[first_piece.MAX_PIECE_BYTES :]))
    else:
        fronts.append((FIRST, torch.from_numpy(buffers[0])))
        buffers = buffers[1:]
    for buffer in buffers:
        if isinstance(buffer, torch.Tensor):
            on_gpu.append(buffer)
        elif buffer.nbytes <= first_piece.MOST_ROOM_BYTES:
            wholes.append((WHOLE + buffer.nbytes, torch.from_numpy(buffer)))
        else:
            content = as_tensor(view_of(buffer))
            pieces += [(PIECE, piece) for piece in content.split(PIECE_BYTES)]
    # The front after what the other side may be waiting for: it wakes up once, for both.
    row = wholes + fronts + pieces
    return Parts([tag for tag, _ in row], [piece for _, piece in row], on_gpu)
