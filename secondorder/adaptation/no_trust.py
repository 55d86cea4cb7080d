"""Steps that are not judged by the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from secondorder.parameters import Directions

ReturnedT = TypeVar("ReturnedT")
#: Directions, and the rate and momentum ``[2]`` of the quadratic model, or None for those of the groups.
Sized = tuple[Directions, Tensor | None]


#: Moves the parameters by a step. With ``quiet=True``, it is not timed, and its directions are not kept.
Move = Callable[..., None]


class NoTrust:
    """Takes every step unchanged, for every loss."""

    #: Whether λ changes with the loss, so that a large value does not mean anything.
    adapts_damping = False

    def check_module(self, root: nn.Module | None) -> None:
        """Do nothing, since every module is supported."""

    def refuse(self) -> None:
        """Do nothing, since parameters and blocks may be anywhere."""

    def why_not_joinable(self) -> str | None:
        """Return None, since a rank without data can take such steps."""
        return None

    def evaluate(self, closure: Callable[[], ReturnedT] | None) -> ReturnedT | None:
        """Call the closure, if there is one, with gradients enabled."""
        return None if closure is None else called(closure)

    def dropped(self) -> None:
        """Do nothing if a batch is left out."""

    def take(self, move: Move, gradients: Directions, gate: Tensor | None) -> None:
        """Take the step."""
        move()

    def size(self, gradients: Directions, directions: Directions) -> Sized:
        """Return the directions, to which the rate and the momentum of the groups apply."""
        return directions, None

    def diagnostics(self) -> dict[str, Any]:
        """Return nothing, since there is nothing to report."""
        return {}


def called(closure: Callable[[], ReturnedT]) -> ReturnedT:
    """Return what a closure returns with gradients enabled."""
    with torch.enable_grad():
        return closure()
