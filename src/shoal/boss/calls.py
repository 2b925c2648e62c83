"""What is said at the boss's port before there is a link: applications, cards, questions.

    worker   Application ───>            <─── Wait, Hired or Full     boss
    worker   Ready (its card) ───>       <─── Wait, then Roster (all cards)
    worker   Unable ───>                                                   if it has no link then
    anybody  Question ───>               <─── Status

Each call and each answer is one short message. Whoever cannot be read is told nothing.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.errors import WireError
from shoal.wire.zmq_sockets import Card

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Label = Annotated[str, msgspec.Meta(max_length=255, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""What is shown on terminals: without anything that would steer them."""


MAX_REASON_LETTERS = 4000
Reason = Annotated[
    str,
    msgspec.Meta(max_length=MAX_REASON_LETTERS, pattern=r"^[^\x00-\x09\x0b-\x1f\x7f-\x9f]*$"),
]
"""Several lines, perhaps."""
LINK_S = 10.0
"""How long boss and workers have to link up, once all know of each other."""


class Application(msgspec.Struct, frozen=True, tag="apply", forbid_unknown_fields=True):
    """A worker wants work, and says so again every second while it waits."""

    host: Label
    pid: Count
    device: Label
    memory_bytes: Count
    """What is free for a stage."""
    shoal: Label
    torch: Label
    id: Label = ""
    """Of the worker, whichever connection it calls by. Workers of old versions have none."""

    @property
    def who(self) -> str:
        return f"{self.host}, pid {self.pid}"


class Ready(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """A worker that was hired listens now."""

    round: int
    card: Card


class Unable(msgspec.Struct, frozen=True, tag="unable", forbid_unknown_fields=True):
    """A worker that has the roster, and found no way to all who are in it."""

    round: int
    reason: Reason
    is_consequence: bool
    """Of something that is wrong elsewhere."""


class Question(msgspec.Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    """How is it going?"""


class Wait(msgspec.Struct, frozen=True, tag="wait", forbid_unknown_fields=True):
    """Not all have come yet, or said where they listen."""

    missing: int


class Hired(msgspec.Struct, frozen=True, tag="hired", forbid_unknown_fields=True):
    """Listen, and say where."""

    round: int
    rank: int
    size: int
    timeout_s: float
    hung_s: float


class Roster(msgspec.Struct, frozen=True, tag="roster", forbid_unknown_fields=True):
    """All that there are: connect."""

    round: int
    cards: list[Card]
    names: list[str]


class Full(msgspec.Struct, frozen=True, tag="full", forbid_unknown_fields=True):
    """This boss needs nobody, or not you: why."""

    reason: str


class WorkerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker, as its boss knows it."""

    rank: int
    host: str
    pid: int
    device: str
    memory_bytes: int
    """Held by its process."""
    stage: int | None
    modules: list[str]
    step: int
    """As of when it was last seen; so is the memory, and what it keeps."""
    num_kept: int
    """Micro-batches that it keeps for a backward pass."""
    last_seen_s: float
    """Seconds ago."""
    is_lost: bool = False
    is_busy: bool = False
    """It was at work when it was last seen, and did not wait for what others send."""


class Status(msgspec.Struct, frozen=True, tag="is", forbid_unknown_fields=True):
    """How a boss and its workers are doing."""

    host: str
    pid: int
    user: str
    script: str
    step: int
    wanted: int
    """How many workers it asked for."""
    workers: list[WorkerStatus]


Call = Application | Ready | Unable | Question
Answer = Wait | Hired | Roster | Full | Status

encode = msgspec.json.Encoder().encode
_read_call = msgspec.json.Decoder(Call).decode
_read_answer = msgspec.json.Decoder(Answer).decode


def read_call(content: bytes) -> Call:
    """Believe nothing."""
    try:
        call: Call = _read_call(content)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"what it says is no call: {error}") from error
    return call


def read_answer(content: bytes) -> Answer:
    try:
        answer: Answer = _read_answer(content)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"what answers there is no boss: {error}") from error
    return answer
