"""The optimizers that the benchmarks compare, and the recipe of each on each workload.

A method joins every command by adding one entry to :data:`METHODS`. A recipe is a set of constructor keywords that was
tuned for its workload at equal steps and constant learning rate; ``python -m benchmarks train --set ...`` is how.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.workloads import WorkloadName
from secondorder import KFAC

Setting = float | int | bool | str | None
Settings = Mapping[str, Setting]
MethodName = Literal["sgd", "adamw", "kfac"]


@dataclass(frozen=True)
class Method:
    """One optimizer: how it is built, and its keywords on each workload."""

    label: str
    """Its name in tables and plots."""
    construct: Callable[..., Optimizer]
    """Takes the model and the keywords of a recipe."""
    recipes: Mapping[WorkloadName, Settings]

    def settings(self, workload: WorkloadName | None, changes: Settings | None = None) -> Settings:
        """Return the keywords of a recipe.

        Args:
            workload: Whose recipe; None starts from the constructor's defaults.
            changes: Keywords that replace the recipe's.

        Returns:
            The keywords.
        """
        recipe = self.recipes[workload] if workload else {}
        return {**recipe, **(changes or {})}

    def build(
        self, model: nn.Module, workload: WorkloadName | None = None, changes: Settings | None = None
    ) -> Optimizer:
        """Return a new optimizer of ``model`` with the recipe of a workload.

        Args:
            model: The model to train.
            workload: Whose recipe; None starts from the constructor's defaults.
            changes: Keywords that replace the recipe's.

        Returns:
            The optimizer.
        """
        return self.construct(model, **self.settings(workload, changes))


def _sgd(model: nn.Module, **settings: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), **settings)


def _adamw(model: nn.Module, **settings: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **settings)


def _kfac(model: nn.Module, **settings: Any) -> Optimizer:
    return KFAC(model, **settings)


METHODS: dict[MethodName, Method] = {
    "sgd": Method(
        "SGD",
        _sgd,
        {
            "digits": {"lr": 0.1, "momentum": 0.9},
            "autoencoder": {"lr": 3e-3, "momentum": 0.9},
            "resnet20": {"lr": 0.1, "momentum": 0.9},
            "chargpt": {"lr": 0.3, "momentum": 0.9},
        },
    ),
    "adamw": Method(
        "AdamW",
        _adamw,
        {
            "digits": {"lr": 1e-2},
            "autoencoder": {"lr": 1e-3},
            "resnet20": {"lr": 3e-3},
            "chargpt": {"lr": 3e-3},
        },
    ),
    "kfac": Method(
        "KFAC",
        _kfac,
        {
            "digits": {
                "lr": 0.02,
                "graft": "adam",
                "inverse_method": "cholesky",
                "factor_update_steps": 5,
                "inv_update_steps": 10,
            },
            "autoencoder": {"lr": 1e-3, "graft": "adam"},
            "resnet20": {"lr": 3e-3, "graft": "adam", "weight_decay": 1e-2, "decoupled_weight_decay": True},
            "chargpt": {"lr": 3e-3, "graft": "adam", "weight_decay": 1e-2, "decoupled_weight_decay": True},
        },
    ),
}
