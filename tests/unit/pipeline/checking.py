"""A net with a check of every kind. Not in a test file, where pytest rewrites what is asserted."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

WIDTH = 4
MOST = 6


class Checking(nn.Module):
    def __init__(self, check: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer, self.check = nn.Linear(WIDTH, WIDTH), check

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return self.layer(x)  # type: ignore[no-any-return]


def by_assert(x: Tensor) -> None:
    assert x.size(0) <= MOST, f"{x.size(0)} rows"


def by_two(x: Tensor) -> None:
    assert x.size(0) <= MOST and x.dim() == 2  # noqa: PT018


def by_a_chain(x: Tensor) -> None:
    assert 0 < x.size(0) <= MOST


def by_its_opposite(x: Tensor) -> None:
    assert not x.size(0) > MOST


def by_raise(x: Tensor) -> None:
    if x.size(0) > MOST:
        raise ValueError(f"{x.size(0)} rows")


def by_raise_of_two(x: Tensor) -> None:
    if x.dim() != 2 or x.size(0) > MOST:
        raise ValueError(f"{x.size(0)} rows")


def by_raise_in_the_end(x: Tensor) -> Tensor:
    if x.size(0) <= MOST:
        return x
    raise ValueError(f"{x.size(0)} rows")


def by_value(x: Tensor) -> None:
    if x.isnan().any():
        raise ValueError("not a number")


def branches(x: Tensor) -> Tensor:
    if x.size(0) > MOST:
        x = x + 1
    return x


def either(x: Tensor) -> None:
    assert x.size(0) > MOST or x.dim() == 2


def caught(x: Tensor) -> Tensor:
    try:
        assert x.size(0) > MOST
    except AssertionError:
        return x
    return x + 1


def raises_in_a_loop(x: Tensor) -> None:
    while x.size(0) > MOST:
        if x.dim() == 3:
            raise ValueError
        x = x[1:]


def one_of_three(x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x
    if x.dim() == 3:
        return x.sum(1)
    raise ValueError("dimensions")
