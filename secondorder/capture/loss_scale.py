"""The scale of a loss in float16 training: who multiplied it, and by what the gradients are divided."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

UNKNOWN = (
    "the gradients of this batch are float16 and nothing says what the loss was multiplied with, so its statistics are "
    "left out: have a torch.amp.GradScaler call the step, scaler.step(optimizer), or set optimizer.grad_scaler "
    "(GradScaler(enabled=False) where nothing scales the loss)"
)


def multiplies(scaler: Any) -> bool:
    """Whether a scaler, if there is one, multiplies the loss."""
    return scaler is not None and bool(scaler.is_enabled())


def inverse_scale(scaler: Any, device: torch.device) -> Tensor | None:
    """What gradients are to be multiplied with now, 0-dim on the device; None for 1."""
    if not multiplies(scaler):
        return None
    # `scale` is the public way to the loss scale as a device tensor: `get_scale` would wait for the device.
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale.reciprocal()
