"""Orthogonalized momentum, which is orthogonal EKFAC with the identity as curvature: a control for that method.

It uses the parameter groups of the recipe of ``ekfac_orthogonal``. Hidden layers move along the polar factor of their
momentum, with the bias as one more column, and AdamW updates all other parameters, as in Muon.
"""

from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from benchmarks.recipes.building import second_order, settings_of

_SETTINGS = settings_of(
    "inv_update_steps=0 momentum=0.8 momentum_mode=pre nesterov=true kl_clip=none decoupled_weight_decay=true "
    "fallback=adamw fallback_beta2=0.95"
)


def orthogonal_momentum(model: nn.Module, plain_lr: float, plain_layers: str | None, **settings: Any) -> Optimizer:
    """Return the control. AdamW updates layers of the types or names in ``plain_layers``, and those of one output."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | _ConvNd)]
    single = [name for name, layer in layers if min(layer.weight.flatten(1).shape) == 1]
    plain = ",".join(filter(None, [plain_layers, *single]))
    rates = {"plain_lr": plain_lr, "fallback_lr": plain_lr}
    return second_order(
        "ekfac", model, **{**_SETTINGS, **rates, "plain_layers": plain, "skip_layers": plain, **settings}
    )
