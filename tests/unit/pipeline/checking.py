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


def position(x: Tensor) -> Tensor:
    if x.size(0) > MOST:
        raise ValueError("too many")
    return x


def caught_by_its_caller(x: Tensor) -> Tensor:
    try:
        return position(x)
    except ValueError:
        return -x


class Rows:
    """What a `for` asks until there is no more."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.x.size(0):
            raise IndexError
        return self.x[index]


def until_there_is_no_more(x: Tensor) -> list[Tensor]:
    return [row + 1 for row in Rows(x)]  # type: ignore[attr-defined]


def each_by_itself(x: Tensor) -> None:
    """Tuples ask each of their elements, and need another answer than what they are asked for."""
    if (x.size(0), x.size(1)) != (MOST, WIDTH):
        raise ValueError("another size")
