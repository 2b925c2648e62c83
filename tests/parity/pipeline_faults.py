"""What pipelines refuse: FAULTS on every rank, with words that help; FATAL ends the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from pipeline_nets import (
    Aliased,
    Branching,
    FanOut,
    PairOut,
    Tied,
    in_place_then_used,
    rows,
    sequential,
)
from torch import nn

import shoal
from shoal.train.models.zoo import MnistCnn

SGD: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.1}
Case = Callable[[shoal.JoinedCrew], None]


def refused(crew: shoal.JoinedCrew, words: list[str], act: Callable[[], Any]) -> None:
    """On every rank, and with all of these words."""
    try:
        act()
        text = "no error"
    except shoal.ShoalError as error:
        text = f"{type(error).__name__}: {error}"
    for rank, told in enumerate(crew.exchange("errors", text)):
        for word in words:
            assert word in told, f"rank {rank}: expected {word!r} in:\n{told}"


def fault_stages_that_do_not_divide_the_ranks(crew: shoal.JoinedCrew) -> None:
    stages = crew.size - 1 if crew.size > 2 else 3
    words = ["SettingsError", f"stages={stages}", f"{crew.size} ranks", "left over", "Use "]
    refused(crew, words, lambda: crew.pipeline(sequential(), stages=stages, transport="dist"))


def fault_many_settings_at_once(crew: shoal.JoinedCrew) -> None:
    refused(
        crew,
        ["SettingsError", "microbatches=0", "reduction='max'", "sync='rung'", "clip_norm=-1.0"],
        lambda: crew.pipeline(
            sequential(), microbatches=0, reduction="max", sync="rung", clip_norm=-1.0
        ),
    )


def fault_unknown_schedule(crew: shoal.JoinedCrew) -> None:
    refused(
        crew,
        ["1f1bb", "1f1b", "gpipe", "sequential"],
        lambda: crew.pipeline(sequential(), schedule="1f1bb", transport="dist"),
    )


def fault_unknown_transport(crew: shoal.JoinedCrew) -> None:
    refused(
        crew,
        ["SettingsError", "transport='tcp': unknown. Known: zmq, dist."],
        lambda: crew.pipeline(sequential(), transport="tcp"),
    )


def fault_unknown_cut(crew: shoal.JoinedCrew) -> None:
    cuts = ["covn2", *["fc1", "fc2"][: crew.size - 2]]
    refused(
        crew,
        ["ModelError", "covn2", "Did you mean conv2", "pool3"],
        lambda: crew.pipeline(MnistCnn(), cuts=cuts, transport="dist"),
    )


def fault_cuts_out_of_order(crew: shoal.JoinedCrew) -> None:
    refused(
        crew,
        ["ModelError", "begins" if crew.size == 2 else "conv2: comes no later"],
        lambda: crew.pipeline(
            MnistCnn(),
            cuts=[["conv1"], ["conv3", "conv2"], ["conv1", "conv3", "conv2"]][crew.size - 2],
            transport="dist",
        ),
    )


def fault_other_number_of_cuts(crew: shoal.JoinedCrew) -> None:
    refused(
        crew,
        [f"{crew.size} stages", "5 given", "conv2"],
        lambda: crew.pipeline(
            MnistCnn(), cuts=["conv2", "conv3", "pool3", "fc1", "fc2"], transport="dist"
        ),
    )


def fault_cuts_in_other_places(crew: shoal.JoinedCrew) -> None:
    first = "conv3" if crew.rank == 1 else "conv2"
    refused(
        crew,
        ["do not agree on the cuts", "rank 1", "rank 0", "conv3", "conv2"],
        lambda: crew.pipeline(
            MnistCnn(), cuts=[first, *["fc1", "fc2"][: crew.size - 2]], transport="dist"
        ),
    )


def fault_other_models(crew: shoal.JoinedCrew) -> None:
    model = FanOut(12 if crew.rank == 0 else 14)
    refused(
        crew,
        ["do not agree on the model", "rank 1", "rank 0"],
        lambda: crew.pipeline(model, transport="dist"),
    )


def fault_more_stages_than_steps(crew: shoal.JoinedCrew) -> None:
    refused(
        crew,
        ["ModelError", f"{crew.size} stages", "1 step (0)"],
        lambda: crew.pipeline(nn.Sequential(nn.Linear(6, 3)), transport="dist"),
    )


def fault_branch_on_data(crew: shoal.JoinedCrew) -> None:
    refused(
        crew,
        ["ModelError", "Branching", "pipeline_nets.py:", "if x.sum() > 0", "shoal.Layer"],
        lambda: crew.pipeline(Branching(), transport="dist"),
    )


def fault_cut_between_tied_weights(crew: shoal.JoinedCrew) -> None:
    cuts = ["back"] if crew.size == 2 else ["there", "back", "last"][: crew.size - 1]
    refused(
        crew,
        ["ModelError", "there", "back", "share parameters"],
        lambda: crew.pipeline(Tied(), cuts=cuts, transport="dist"),
    )


def fault_changed_in_place_and_used_later(crew: shoal.JoinedCrew) -> None:
    refused(
        crew,
        ["ModelError", "in place", "inplace=False"],
        lambda: crew.pipeline(
            in_place_then_used(), cuts=["2", "4", "5"][: crew.size - 1], transport="dist"
        ),
    )


def fault_changed_through_a_view_and_used_later(crew: shoal.JoinedCrew) -> None:
    """One process would see the change; a later stage would compute something else, silently."""
    refused(
        crew,
        ["ModelError", "in place", "inplace=False"],
        lambda: crew.pipeline(
            Aliased(), cuts=["relu", "b", "add"][: crew.size - 1], transport="dist"
        ),
    )


def fault_asked_before_the_cuts_are_known(crew: shoal.JoinedCrew) -> None:
    pipe = crew.pipeline(FanOut(), transport="dist", loss=F.cross_entropy, **SGD)
    refused(crew, ["ModelError", "cuts=", "example="], lambda: pipe.module)
    refused(crew, ["ModelError", "cuts=", "example="], pipe.state_dict)


def fault_inputs_that_do_not_fit(crew: shoal.JoinedCrew) -> None:
    """Found by the profile, on rank 0; every rank is told."""
    pipe = crew.pipeline(FanOut(), transport="dist", loss=F.cross_entropy, **SGD)
    refused(
        crew, ["ModelError", "5)", "step add of the model"], lambda: pipe.step(torch.zeros(4, 5))
    )
    x, y = rows(4, 0)
    pipe.step(x, y)  # nothing was spoilt


def fault_no_loss_no_optimizer(crew: shoal.JoinedCrew) -> None:
    cuts = ["b", "c", "d"][: crew.size - 1]
    pipe = crew.pipeline(PairOut(), cuts=cuts, transport="dist")
    refused(crew, ["ModelError", "loss="], lambda: pipe.step(*rows(4, 0)))
    refused(crew, ["ModelError", "optimizer="], pipe.update)


def fault_an_update_without_the_batch(crew: shoal.JoinedCrew) -> None:
    cuts = ["b", "c", "d"][: crew.size - 1]
    pipe = crew.pipeline(PairOut(), cuts=cuts, transport="dist", optimizer=torch.optim.LBFGS)
    refused(crew, ["ModelError", "LBFGS computes the loss again", "pipe.step(x, y)"], pipe.update)


def fault_gradients_that_a_step_would_drop(crew: shoal.JoinedCrew) -> None:
    cuts = ["b", "c", "d"][: crew.size - 1]
    pipe = crew.pipeline(
        FanOut(), cuts=cuts, transport="dist", loss=F.cross_entropy, optimizer=torch.optim.LBFGS
    )
    pipe.backward(*rows(4, 0))
    refused(crew, ["ModelError", "earlier backward()"], lambda: pipe.step(*rows(4, 0)))


def fault_a_state_of_another_model(crew: shoal.JoinedCrew) -> None:
    cuts = ["b", "c", "d"][: crew.size - 1]
    pipe = crew.pipeline(PairOut(), cuts=cuts, transport="dist")
    state = pipe.state_dict()
    if crew.rank == 0:
        state["a.wieght"] = state.pop("a.weight")
        state["b.bias"] = state["b.bias"][:-1]
    words = ["ModelError", "it has no a.weight", "the model has no a.wieght", "b.bias is ("]
    refused(crew, words, lambda: pipe.load_state_dict(state))


def hybrid_fault_unknown_sync(crew: shoal.JoinedCrew) -> None:
    refused(
        crew,
        ["SettingsError", "rinng", "ring"],
        lambda: crew.pipeline(sequential(), stages=2, sync="rinng", transport="dist"),
    )


def hybrid_fault_rows_that_forward_makes_shorter(crew: shoal.JoinedCrew) -> None:
    """By replicas of stages, and by replicas of models."""
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Flatten(), nn.Linear(8, 3))
    words = ["ModelError", "0: max_norm=", "each replica", "torch.renorm"]
    refused(crew, words, lambda: crew.pipeline(model, stages=2, cuts=["2"]))
    refused(crew, words, lambda: crew.replicate(model))


# -- what ends a run: rank 1 finds the fault, the others hear of it --------------------------------


def small(crew: shoal.JoinedCrew, first_cut: str = "2") -> Any:
    cuts = [first_cut, "3", "5"][: crew.size - 1]
    return crew.pipeline(sequential(), cuts=cuts, loss=F.cross_entropy, microbatches=2, **SGD)


def fatal_other_number_of_samples(crew: shoal.JoinedCrew) -> None:
    pipe = small(crew)
    x, y = rows(8, 0)
    pipe.step(x, y)
    pipe.step(x, y[:5])


def fatal_inference_on_one_rank_only(crew: shoal.JoinedCrew) -> None:
    pipe = small(crew)
    x, y = rows(8, 0)
    pipe.step(x, y)
    if crew.rank == 1:
        pipe(x)
    else:
        pipe.step(x, y)


def fatal_unknown_cut_on_one_rank_only(crew: shoal.JoinedCrew) -> None:
    small(crew, "22" if crew.rank == 1 else "2")


def _named(start: str) -> dict[str, Case]:
    return {
        name.removeprefix(start).replace("_", " "): case
        for name, case in globals().items()
        if name.startswith(start)
    }


FAULTS = _named("fault_")
HYBRID_FAULTS = _named("hybrid_fault_")
FATAL = dict(zip((2, 3, 4), _named("fatal_").items(), strict=True))
"""By number of ranks: each of its runs ends with one."""
