"""A model that was trained in a pipeline: on rank 0, where the next one would get its weights from,
those of other stages are still the old ones, unless the trained state was loaded since.
"""

from __future__ import annotations

from torch import nn

from shoal.errors import ModelError

_TRAINED_ELSEWHERE = "shoal: weights that were trained on other ranks"
"""A name that no attribute of a model's has. Under it: what they were like, by name."""
_Seen = tuple[int, int]


def note_trained(model: nn.Module, own: nn.Module) -> None:
    """The model in a pipeline has been trained; own: this rank's part of it."""
    mine = {id(parameter) for parameter in own.parameters()}
    vars(model)[_TRAINED_ELSEWHERE] = {
        name: _seen(parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in mine
    }


def check_not_stale(model: nn.Module) -> None:
    """Raises ModelError if it has old weights."""
    before: dict[str, _Seen] = vars(model).get(_TRAINED_ELSEWHERE, {})
    stale = [name for name, p in model.named_parameters() if before.get(name) == _seen(p)]
    if stale:
        more = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
        raise ModelError(
            f"{type(model).__name__} was trained in a pipeline, and rank 0 still has the old "
            f"weights of other stages ({stale[0]}{more}). Load the trained ones first: on every "
            "rank state = pipe.state_dict(), then on rank 0 model.load_state_dict(state). Or use "
            "the pipeline that there is."
        )


def _seen(parameter: nn.Parameter) -> _Seen:
    """How often it was written to, and where it lies."""
    return parameter._version, parameter.data_ptr()
