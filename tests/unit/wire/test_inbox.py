"""Several threads at one inbox: who gets what, and what they must not break for each other."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from shoal.errors import WireError
from shoal.wire.front import FrontReader, Packer
from shoal.wire.inbox import MAX_BACKLOG_BYTES, Inbox

LIMIT_BYTES = 2**30
NUM_TAGS = 20_000


def deliver(inbox: Inbox, message: Any, tag: str = "") -> None:
    """A message without tensors."""
    head, _ = Packer(LIMIT_BYTES).pack(message, tag, 0)
    inbox.deliver_whole(0, FrontReader(LIMIT_BYTES).read(memoryview(head))[1], [])


def test_what_came_for_one_who_gave_up_goes_to_the_next_who_waits_already() -> None:
    """It came between the end of a wait and its being withdrawn: another thread may be waiting."""
    inbox = Inbox(timeout_s=5)
    hasty, patient = inbox.expect(0, "", None), inbox.expect(0, "", None)
    deliver(inbox, 1)
    inbox.withdraw(hasty)
    deliver(inbox, 2)
    assert [patient.wait(), inbox.expect(0, "", None).wait()] == [1, 2]


def test_what_came_for_one_who_gave_up_and_does_not_fit_the_next_is_kept() -> None:
    inbox = Inbox(timeout_s=5)
    hasty, other = inbox.expect(0, "", None), inbox.expect(0, "", torch.empty(3))
    deliver(inbox, 1)
    inbox.withdraw(hasty)
    deliver(inbox, 2)
    assert other.has_failed
    assert [inbox.expect(0, "", None).wait() for _ in range(2)] == [1, 2]


def test_room_is_looked_for_while_others_ask_for_new_tags() -> None:
    """A transport's thread looks, without the lock, at queues that any thread may add to."""
    inbox = Inbox(timeout_s=5)
    inbox._backlog[0] = MAX_BACKLOG_BYTES
    is_over = threading.Event()
    faults: list[RuntimeError] = []

    def look() -> None:
        try:
            while not is_over.is_set():
                inbox.has_room(0)
        except RuntimeError as error:
            faults.append(error)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for number in range(NUM_TAGS):
            inbox.withdraw(inbox.expect(1, f"step {number}", None))
    finally:
        is_over.set()
        looking.join()
    assert not faults


@pytest.mark.parametrize("message", [["x" * 1000] * 1000, None], ids=["long", "short"])
def test_plain_values_that_nobody_asks_for_fill_the_room_too(message: Any) -> None:
    inbox = Inbox(timeout_s=5)
    for _ in range(70 * 1024):
        if not inbox.has_room(0):
            break
        deliver(inbox, message)
    assert not inbox.has_room(0)


class Stubborn(torch.Tensor):
    """A place that torch cannot fill: a broken GPU's, say."""

    @classmethod
    def __torch_function__(cls, called: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
        if called is torch.Tensor.copy_:
            raise RuntimeError("the device is lost")
        return super().__torch_function__(called, types, args, kw or {})


def test_a_place_that_cannot_be_filled_is_the_fault_of_who_brought_it() -> None:
    """Not of the thread that receives, nor of the peer; and the message is not lost."""
    inbox = Inbox(timeout_s=5)
    stubborn = torch.empty(2, 3).T.as_subclass(Stubborn)
    job = inbox.expect(0, "", stubborn)
    head, _ = Packer(LIMIT_BYTES).pack(torch.ones(3, 2), "", 0)
    read = FrontReader(LIMIT_BYTES).read(memoryview(head))[1]
    inbox.deliver_whole(0, read, [bytearray(head[start:end]) for _, start, end in read.small])
    with pytest.raises(
        WireError, match=r"into= cannot be filled: the device is lost\. The message"
    ):
        job.wait()
    assert torch.equal(inbox.expect(0, "", None).wait(), torch.ones(3, 2))
