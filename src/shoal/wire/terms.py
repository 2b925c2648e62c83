"""What may be said to a link: checked before anything moves, since a slip must not cost a peer."""

from __future__ import annotations

import threading
from itertools import pairwise

import torch

from shoal.errors import WireError
from shoal.wire.header import MAX_TAG_LETTERS
from shoal.wire.tree import Tree, tensors_of


def check_way(peer: int, tag: str, rank: int, size: int) -> None:
    """Between this rank and another of the crew, with a tag. On the way of every message: quick."""
    if type(peer) is not int or not 0 <= peer < size or peer == rank:
        raise _no_peer(peer, rank, size)
    if type(tag) is not str or len(tag) > MAX_TAG_LETTERS or not tag.isascii():
        _check_tag(tag)


def _no_peer(peer: int, rank: int, size: int) -> WireError:
    others = ", ".join(str(other) for other in range(size) if other != rank) or "none"
    what = f"rank {peer}" if type(peer) is int else f"{peer!r}: a rank is an int"
    return WireError(f"rank {rank} has no link to {what}; it has links to: {others}")


def _check_tag(tag: str) -> None:
    if type(tag) is not str:
        raise WireError(f"a tag is a str, not {type(tag).__name__} ({tag!r})")
    if len(tag) > MAX_TAG_LETTERS:
        raise WireError(f"a tag has at most {MAX_TAG_LETTERS} letters, this one has {len(tag)}")
    try:
        tag.encode()
    except UnicodeEncodeError as error:
        raise WireError(f"the tag {tag!r} is no text that can be sent") from error


def seconds(timeout_s: float | None, usual_s: float) -> float:
    """How long to wait: so long, or as long as usual."""
    if timeout_s is None:
        return usual_s
    check_seconds("timeout_s", timeout_s)
    return timeout_s


def check_seconds(name: str, value: float, least: float = 0.0) -> None:
    """A number of seconds that a wait can last."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and least <= value <= threading.TIMEOUT_MAX):  # nan is neither
        raise WireError(
            f"{name} is a number of seconds from {least:g} on, not {value!r}. Every wait has an end"
        )


def check_size(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise WireError(f"{name} is a number of bytes from 1 on, not {value!r}")


def check_places(into: Tree) -> None:
    """Tensors that can be filled: each element has a place of its own."""
    spans = []
    for path, tensor in tensors_of(into).items():
        place = "into=" + "".join(f"[{step!r}]" for step in path)
        if tensor.is_meta:
            raise WireError(f"{place}: a tensor on the meta device has no memory to be filled.")
        if tensor.layout is not torch.strided or _overlaps(tensor):
            raise WireError(
                f"{place}: this tensor cannot be filled, since several of its elements are in "
                "one place (expand() makes such, .contiguous() undoes it), or it is not dense."
            )
        if tensor.numel():
            begin, is_solid = tensor.data_ptr(), tensor.is_contiguous()  # else: with gaps
            spans.append((begin, begin + (tensor.nbytes if is_solid else 1), place))
    _check_apart(sorted(spans))


def _check_apart(spans: list[tuple[int, int, str]]) -> None:
    """Where places begin and end, in order: none has memory of another."""
    for (_, end, one), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise WireError(
                f"{other} and {one} share memory: what comes for one would overwrite the other."
            )


def _overlaps(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return False
    reach = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride < reach:
            return True
        reach += stride * (extent - 1)
    return False
