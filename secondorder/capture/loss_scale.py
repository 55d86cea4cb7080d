"""The scale of the loss in float16 training, by which captured gradients are divided."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from secondorder.frames import calling_scaler

if TYPE_CHECKING:
    from secondorder.capture.step_statistics import StepStatistics

UNKNOWN = (
    "the gradients of this batch are float16 and the scale of the loss is not known, so its statistics are left out: "
    "let a torch.amp.GradScaler call the step, scaler.step(optimizer), or set optimizer.grad_scaler "
    "(GradScaler(enabled=False) if the loss is not scaled)"
)


class LossScale:
    """The loss scaler of an optimizer, which the user passes or the optimizer finds.

    Copies of an optimizer do not copy it, because the scaler belongs to the training loop of the original.

    Attributes:
        scaler: The loss scaler that scales the gradients, if any.
    """

    def __init__(self) -> None:
        self.scaler: Any = None
        #: Whether the scaler was found, and not passed by the user.
        self._is_found = False
        self._looked_for: set[str] = set()
        self._followers: weakref.WeakSet[StepStatistics] = weakref.WeakSet()

    @property
    def multiplies(self) -> bool:
        """Whether a scaler, if there is one, multiplies the loss."""
        return _multiplies(self.scaler)

    def register(self, follower: StepStatistics) -> None:
        """Notify ``follower`` of every scaler that is set from now on, keeping only a weak reference to it."""
        self._followers.add(follower)

    def set(self, scaler: Any, averages: bool) -> None:
        """Set the loss scaler.

        Args:
            scaler: The scaler, or None to remove the current one.
            averages: Whether the strategy averages gradients in the step.

        Raises:
            TypeError: If ``scaler`` is not a loss scaler.
            NotImplementedError: If the ranks could not agree on the steps to skip.
        """
        if scaler is not None and not (hasattr(scaler, "scale") and hasattr(scaler, "is_enabled")):
            raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, got {scaler!r}")
        changes = scaler is not self.scaler and (_multiplies(scaler) or self.multiplies)
        self.scaler = scaler
        self._is_found = False  # an explicit scaler has priority; ``infer`` sets the flag again
        self.require_common(averages)
        for follower in self._followers:
            follower.follow_scale(changes)

    def require_common(self, averages: bool) -> None:
        """Raise an error if there is a scaler and the strategy averages gradients in the step.

        Raises:
            NotImplementedError: If this is the case.
        """
        if averages and self.multiplies:
            raise NotImplementedError(
                "a GradScaler checks the gradients of its rank before average_gradients=True averages them, and would "
                "skip steps only on some ranks: wrap the model in DistributedDataParallel, or use bfloat16"
            )

    def infer(self, batch: StepStatistics, averages: bool) -> None:
        """Adopt the loss scaler that calls this step if none was passed; statistics captured before are left out.

        The stack is searched in the first step, in the first step with float16 gradients, and in every step while a
        found scaler is in use, since a scaler that no longer calls the step no longer scales the loss either.
        """
        if not (batch.by_site or batch.scale_is_unknown):
            return
        if self.scaler is not None:
            if self._is_found and calling_scaler() is not self.scaler:
                self.set(None, averages)
            return
        wanted = {"first", "float16"} if batch.scale_is_unknown else {"first"}
        if wanted <= self._looked_for:
            return
        self._looked_for |= wanted
        if (found := calling_scaler()) is not None:
            self.set(found, averages)
            self._is_found = True

    def inverse(self, device: torch.device) -> Tensor | None:
        """Return the factor that unscales gradients, as a 0-dim tensor on the device; None means 1."""
        if not self.multiplies:
            return None
        # `scale` gives the loss scale as a device tensor, whereas `get_scale` would wait for the device.
        scale: Tensor = self.scaler.scale(torch.ones((), device=device))
        return scale.reciprocal()


def _multiplies(scaler: Any) -> bool:
    return scaler is not None and bool(scaler.is_enabled())
