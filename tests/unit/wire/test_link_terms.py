"""What may be said of a link when it is opened."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.errors import WireError
from shoal.wire.open_link import LinkSettings
from shoal.wire.terms import check_places


@pytest.mark.parametrize("transport", ["zmq", "dist"])
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"hung_s": -1}, "hung_s is a number of seconds from 0.1 on, not -1"),
        ({"hung_s": float("nan")}, "hung_s .* not nan"),
        ({"hung_s": 0}, "hung_s .* not 0"),
        ({"timeout_s": -1}, "timeout_s .* not -1"),
        ({"timeout_s": "x"}, "timeout_s .* not 'x'"),
        ({"timeout_s": float("inf")}, "timeout_s .* not inf. Every wait has an end"),
        ({"limit_bytes": -5}, "limit_bytes is a number of bytes from 1 on, not -5"),
        ({"limit_bytes": 1.5}, "limit_bytes .* not 1.5"),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense(transport: str, wrong: dict[str, Any], told: str) -> None:
    with shoal.join() as crew, pytest.raises(WireError, match=told):
        crew.link(transport, **wrong)


@pytest.mark.parametrize(
    ("timeout_s", "silent_s"), [(300.0, 10.0), (8.0, 6.0), (4.0, 3.0), (0.5, 3.0)]
)
def test_who_is_frozen_is_named_before_a_wait_is_over(timeout_s: float, silent_s: float) -> None:
    assert LinkSettings(timeout_s=timeout_s).silent_s == silent_s
    assert LinkSettings(timeout_s=timeout_s, hung_s=0.5).silent_s == 0.5


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 4).t(),
        torch.ones(3, 4)[:, ::2],
        torch.ones(2, 3, 4).permute(1, 2, 0),
        torch.ones(1, 4).expand(1, 4),
        torch.ones(0, 5),
        torch.ones(()),
        torch.ones(4, 1).as_strided((4, 1), (1, 0)),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}",
)
def test_places_that_can_be_filled(tensor: torch.Tensor) -> None:
    check_places({"x": [tensor]})


ROOM = torch.zeros(6, 4)


@pytest.mark.parametrize(
    "into",
    [
        list(ROOM),
        list(ROOM.t()),
        [ROOM[:, :2], ROOM[:, 2:]],
        [ROOM[::2], ROOM[1::2]],
        [ROOM[:0], ROOM],
    ],
    ids=["rows", "columns", "halves", "turns", "nothing of it"],
)
def test_places_side_by_side(into: list[torch.Tensor]) -> None:
    check_places(into)


@pytest.mark.parametrize(
    "into",
    [[ROOM, ROOM], [ROOM[:2], ROOM[5:], ROOM[1:4]], [ROOM[2], ROOM[2, ::2]], [ROOM[4, 1], ROOM]],
    ids=["the same", "rows that overlap", "some of it, with gaps", "one element of it"],
)
def test_places_that_share_memory(into: list[torch.Tensor]) -> None:
    """What comes for one would overwrite what came for the other."""
    with pytest.raises(WireError, match=r"into=\[\d\] and into=\[\d\] share memory"):
        check_places(into)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1).expand(4),
        torch.ones(3, 1).expand(3, 2),
        torch.ones(9).as_strided((3, 3), (2, 1)),
        torch.eye(2).to_sparse(),
        torch.ones(4, device="meta"),
    ],
    ids=["expanded", "expanded in one way", "rows that overlap", "sparse", "meta"],
)
def test_places_that_cannot(tensor: torch.Tensor) -> None:
    with pytest.raises(WireError, match=r"into=\['x'\]\[0\]: "):
        check_places({"x": [tensor]})
