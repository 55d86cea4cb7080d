"""Orthogonalized momentum: orthogonal EKFAC without curvature, which is the control of that method.

It takes the parameter groups of the recipe of ``ekfac_orthogonal``. A hidden layer moves along the polar factor of its
momentum, with its bias as one more column, and AdamW updates all other parameters, as in Muon.
"""

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.recipes.building import orthogonal_groups
from secondorder import EKFAC, FallbackOptions, StorageOptions


def orthogonal_momentum(
    model: nn.Module,
    lr: float,
    plain_lr: float,
    plain_layers: str,
    momentum: float = 0.8,
    orthogonal_dtype: str = "float32",
) -> Optimizer:
    """Build the control.

    Args:
        model: The model.
        lr: Learning rate of hidden layers.
        plain_lr: Learning rate of AdamW.
        plain_layers: Types or names of the layers that AdamW updates, separated by commas.
        momentum: Momentum of hidden layers.
        orthogonal_dtype: Dtype of the products of large polar factors.
    """
    keywords = {"plain_layers": plain_layers, "plain_lr": plain_lr, "momentum": momentum}
    return EKFAC(
        orthogonal_groups(model, keywords), module=model, lr=lr, momentum=momentum, nesterov=True, momentum_mode="pre",
        kl_clip=None, betas=(0.9, 0.95), inv_update_steps=0, fallback=FallbackOptions("adamw", lr=plain_lr),
        storage=StorageOptions(orthogonal_dtype=getattr(torch, orthogonal_dtype)),
    )  # fmt: skip
