"""From names in the settings to a model, data and an optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from shoal.errors import SettingsError
from shoal.pipeline.build import as_module
from shoal.settings import TrainSettings, cache_dir
from shoal.train.data.load import Data, load
from shoal.train.factory import find_factory, is_factory
from shoal.train.models import zoo
from shoal.train.models.catalog import MODELS


def build_model(settings: TrainSettings) -> nn.Module:
    """Initial weights follow from the seed."""
    torch.manual_seed(settings.seed)
    if not is_factory(settings.model):
        model: Any = getattr(zoo, MODELS[settings.model].factory)()
    else:
        model = find_factory(settings.model)()
    if isinstance(model, list | tuple):
        return as_module(model)
    if not isinstance(model, nn.Module):
        raise SettingsError(
            [
                f"--model {settings.model}: expected an nn.Module or a list of layers, it returned "
                f"{type(model)}."
            ]
        )
    return model


def build_data(settings: TrainSettings) -> Data:
    if not is_factory(settings.data):
        data_dir = None if settings.data_dir is None else Path(settings.data_dir)
        return load(settings.data, data_dir, cache_dir())
    made: Any = find_factory(settings.data)()
    if not (isinstance(made, tuple | list) and len(made) == 2):
        raise SettingsError(
            [
                f"--data {settings.data}: expected a pair (train dataset, test dataset), "
                f"it returned {type(made)}."
            ]
        )
    train, test = made
    for which, dataset in (("train", train), ("test", test)):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise SettingsError(
                [
                    f"--data {settings.data}: the {which} dataset needs __len__ and __getitem__; "
                    f"got {type(dataset)}."
                ]
            )
    return Data(train=train, test=test)


def build_optimizer(settings: TrainSettings, model: nn.Module) -> torch.optim.Optimizer:
    check_trainable(settings, model)
    return optimizer_for(settings, [p for p in model.parameters() if p.requires_grad])


def check_trainable(settings: TrainSettings, model: nn.Module) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise SettingsError([f"--model {settings.model}: has no parameter that can be trained."])


def optimizer_for(settings: TrainSettings, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    kind, options = optimizer_class(settings)
    return kind(parameters, **options)


def optimizer_class(
    settings: TrainSettings,
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Which one, and with which options."""
    if settings.optimizer == "sgd":
        return torch.optim.SGD, {"lr": settings.lr, "momentum": settings.momentum}
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind, {"lr": settings.lr}


def num_samples(dataset: Dataset[Any]) -> int:
    return len(dataset)  # type: ignore[arg-type]
