"""What a model that is elsewhere refuses: all that would do nothing here, unnoticed."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from shoal.errors import ModelError

DTYPES = ("half", "bfloat16", "float", "double")


class Elsewhere(nn.Module):
    """A module whose parameters are on workers."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises; so does `parameters()`."""
        raise ModelError(
            "the parameters of a placed model are on its workers. There are instead: "
            "boss.optimizer(torch.optim.Adam, lr=...), boss.clip_grad_norm_(max_norm), "
            "model.zero_grad(), model.state_dict() and model.num_parameters."
        )

    def __getstate__(self) -> NoReturn:
        raise ModelError(
            "a placed model is on its workers and cannot be copied or saved whole: "
            "save model.state_dict(), which loads into a plain model."
        )

    # Not `_apply`, which all of these come to: a module around this one may be moved, without it.

    def to(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_to_move("to")

    def to_empty(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_to_move("to_empty")

    def type(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_to_move("type")

    def half(self) -> NoReturn:
        _refuse_to_move("half")

    def bfloat16(self) -> NoReturn:
        _refuse_to_move("bfloat16")

    def float(self) -> NoReturn:
        _refuse_to_move("float")

    def double(self) -> NoReturn:
        _refuse_to_move("double")

    def cpu(self) -> NoReturn:
        _refuse_to_move("cpu")

    def cuda(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_to_move("cuda")


def _refuse_to_move(how: str) -> NoReturn:
    raise ModelError(
        f"model.{how}(): the parameters of a placed model are on its workers, and stay as they "
        f"came. For another dtype: boss.place(model.{how if how in DTYPES else 'half'}()), before "
        "it is placed. For another device: shoal worker --device cuda."
    )
