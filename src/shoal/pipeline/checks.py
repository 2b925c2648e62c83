"""A forward() that checks what it is given: `assert x.dim() == 2`, or `if ...: raise ValueError`.

While a model is read nobody knows the values of a batch, so that it cannot branch on one. But where
one of the two ways only raises, the other is the model, and the check is a step (tracer.py).
"""

from __future__ import annotations

import dis
import linecache
import operator
from pathlib import Path
from types import FrameType

_ORDERS = {
    "<": (operator.lt, operator.gt),  # 0 < x asks x whether it is > 0
    "<=": (operator.le, operator.ge),
    ">": (operator.gt, operator.lt),
    ">=": (operator.ge, operator.le),
    "==": (operator.eq,),
    "!=": (operator.ne,),
}
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RERAISE", "YIELD_VALUE")


def may_catch(frame: FrameType) -> bool:
    """Whether what is raised below `frame` may end there, or end a loop (IndexError, for one)."""
    name = frame.f_code.co_name
    if name.startswith("__") and name.endswith("__") and name != "__call__":
        return True
    entries = dis.Bytecode(frame.f_code).exception_entries  # type: ignore[attr-defined]
    return any(each.start <= frame.f_lasti < each.end for each in entries)


def needed(frame: FrameType, made_by: object) -> bool | None:
    """What the value that `frame` branches on has to be, lest it raises. None: it is no check.

    made_by: what has made the value.
    """
    instructions = list(dis.get_instructions(frame.f_code))
    places = {each.offset: place for place, each in enumerate(instructions)}
    here = places[frame.f_lasti]
    asking = instructions[here]
    if asking.opname == "TO_BOOL":
        here += 1
    elif asking.opname == "COMPARE_OP":  # which asks itself, from Python 3.13 on; tuples do, too
        if made_by not in _ORDERS.get(asking.argval, ()):
            return None
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
