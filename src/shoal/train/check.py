"""Everything that can be found wrong before any rank is started, reported together.

Imports no torch unless the user named a factory of their own.
"""

from __future__ import annotations

from pathlib import Path

from shoal import settings as values
from shoal.report import run_folder
from shoal.settings import TrainSettings
from shoal.train.data import catalog
from shoal.train.factory import factory_faults, is_factory
from shoal.train.models.catalog import MODELS


def check(
    settings: TrainSettings,
    num_ranks: int,
    keeps_folder: bool = True,
    *,
    is_elsewhere: bool = False,
) -> list[str]:
    """All faults of a run of `num_ranks` ranks, as far as this host can see them.

    keeps_folder: rank 0 is on this host, and with it the run folder.
    is_elsewhere: other hosts read the data and compute; what they lack, they tell themselves.
    """
    found = values.faults(settings, num_ranks)
    if is_factory(settings.model):
        found += factory_faults("--model", settings.model)
    else:
        found += [
            f.removesuffix(".") + ", or package.module:factory of your own."
            for f in values.unknown("--model", settings.model, MODELS)
        ]
    if is_factory(settings.data):
        found += factory_faults("--data", settings.data)
    else:
        data_dir = Path(settings.data_dir) if settings.data_dir is not None else None
        if is_elsewhere:
            found += catalog.name_faults(settings.data, data_dir)
        else:
            found += catalog.faults(settings.data, data_dir, values.cache_dir())
    found += _fit(settings) + _enough_steps(settings)
    if settings.device == "cuda" and not is_elsewhere:
        import torch  # only who asks for a GPU waits for the answer

        if not torch.cuda.is_available():
            found.append("--device cuda: torch sees no GPU on this host. Use --device cpu.")
    if keeps_folder and not settings.verify:
        found += run_folder.faults(settings.out)
    return found


def _enough_steps(settings: TrainSettings) -> list[str]:
    """For the stages; a model of the user's own is counted by who makes it."""
    entry = MODELS.get(settings.model)
    if entry is None or settings.stages <= entry.num_steps:
        return []
    option = "--workers" if settings.boss else "--stages"
    return [
        f"{option} {settings.stages}: --model {settings.model} has {entry.num_steps} steps, and "
        "every stage needs at least one."
    ]


def _fit(settings: TrainSettings) -> list[str]:
    """The zoo's model and the catalogue's data must have been made for each other."""
    if settings.model not in MODELS or settings.data not in catalog.NAMES:
        return []
    takes = MODELS[settings.model].input_shape
    gives = catalog.ENTRIES[settings.data].input_shape
    if takes == gives:
        return []
    fitting = [name for name in catalog.NAMES if catalog.ENTRIES[name].input_shape == takes]
    return [
        f"--model {settings.model} takes samples of shape {takes}, --data {settings.data} gives "
        f"{gives}. Data for this model: {', '.join(fitting)}."
    ]
