"""A forward() that checks what it is given: `assert x.dim() == 2`, or `if ...: raise ValueError`.

While a model is read nobody knows the values of a batch, so that it cannot branch on one. But where
one of the two ways only raises, the other is the model, and the check is a step (tracer.py).
"""

from __future__ import annotations

import dis
import linecache
from pathlib import Path
from types import FrameType

_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RERAISE", "YIELD_VALUE")


def needed(frame: FrameType) -> bool | None:
    """What the value that `frame` branches on has to be, lest it raises. None: it is no check."""
    code = frame.f_code
    if code.co_exceptiontable:  # somebody may catch it
        return None
    instructions = list(dis.get_instructions(code))
    places = {each.offset: place for place, each in enumerate(instructions)}
    here = places[frame.f_lasti]
    while instructions[here].opname == "TO_BOOL":
        here += 1
    branch = instructions[here]
    if not branch.opname.startswith("POP_JUMP") or branch.opname.endswith("NONE"):
        return None
    jumps_if = branch.opname.endswith("TRUE")
    jumped, went_on = places[int(branch.argval)], here + 1
    if jumped <= here:
        return None
    raises = [_only_raises(instructions, places, start) for start in (jumped, went_on)]
    if raises == [True, False]:
        return not jumps_if
    return jumps_if if raises == [False, True] else None


def check_in(frame: FrameType) -> str:
    """Its text, and where it stands: the same on every host."""
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{linecache.getline(file, number).strip()} ({Path(file).name}:{number})"


def _only_raises(instructions: list[dis.Instruction], places: dict[int, int], start: int) -> bool:
    """Whether it goes from there straight to a `raise`."""
    while start < len(instructions):
        each = instructions[start]
        if each.opname == "RAISE_VARARGS":
            return True
        if each.opname == "JUMP_FORWARD":
            start = places[int(each.argval)]
            continue
        is_jump = each.opcode in dis.hasjrel or each.opcode in dis.hasjabs
        if is_jump or each.opname in _ENDS or each.opname.startswith("STORE"):
            return False
        start += 1
    return False
