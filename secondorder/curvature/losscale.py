"""The scale of a loss in float16 training: who multiplied it, and by what the gradients are divided."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

#: Frames between the step of an optimizer and the scaler that calls it: torch's own wrappers, those of schedulers and
#: of trainers.
_DEPTH = 32

UNKNOWN = (
    "the gradients of this batch are float16 and nothing says what the loss was multiplied with, so its statistics are "
    "left out: have a torch.amp.GradScaler call the step, scaler.step(optimizer), or set optimizer.grad_scaler "
    "(GradScaler(enabled=False) where nothing scales the loss)"
)


def calling_scaler() -> torch.amp.GradScaler | None:
    """The loss scaler whose ``step`` is running further up the stack, through the wrappers of any trainer.

    Returns:
        The innermost scaler, or None if no scaler is stepping.
    """
    frame, depth = sys._getframe(1).f_back, 0
    while frame is not None and depth < _DEPTH:
        if frame.f_code.co_name in ("step", "_maybe_opt_step"):
            found = frame.f_locals.get("self")
            if isinstance(found, torch.amp.GradScaler):
                return found
        frame, depth = frame.f_back, depth + 1
    return None


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
