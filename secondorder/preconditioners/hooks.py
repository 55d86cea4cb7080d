"""The hooks of a preconditioner that captures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from secondorder.capture.fisher.fisher import resolved

if TYPE_CHECKING:
    from secondorder.capture.capture import Capture
    from secondorder.runtime import Clock


class NoHooks:
    """Null object for methods that capture nothing, such as window methods."""

    @property
    def capture(self) -> Capture:
        """The object that captures statistics.

        Raises:
            AttributeError: Always, since nothing is captured.
        """
        raise AttributeError("window methods capture no statistics from the layers of a module")

    def hook(self) -> None:
        """Hook nothing."""

    def replanned(self, changed: bool) -> None:
        """Do nothing after a new plan between two steps."""

    def begin_step(self, synchronize: Callable[[], None]) -> None:
        """Follow parameters that were frozen, unfrozen or moved since the last step, as no forward pass did."""
        synchronize()

    def check_gradients(self) -> None:
        """Do nothing, since no captured statistics belong to the gradients."""

    def discard(self) -> None:
        """Do nothing, since nothing was captured."""

    def follow_schedule(self) -> None:
        """Do nothing, since nothing is captured at intervals."""

    def observe(self, outputs: Any, likelihood: Any, targets: Any = None) -> None:
        """Check the arguments, which have no effect: windows contain gradients of the loss."""
        resolved(outputs, likelihood, targets)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Capture nothing from forward passes inside the ``with`` block."""
        yield

    @contextmanager
    def mask(self, keep: Tensor | None) -> Iterator[None]:
        """Check a mask, which has no effect on windows."""
        check_mask(keep)
        yield

    def spare(self) -> None:
        """Discard statistics together with the gradients."""

    def time_stages(self, clock: Clock | None) -> None:
        """Time the capture with a clock."""


def check_mask(keep: Tensor | None) -> None:
    """Check the argument of ``mask``.

    Raises:
        TypeError: If it is not a tensor of bools or integers.
        ValueError: If it does not have two dimensions.
    """
    if keep is not None and (not isinstance(keep, Tensor) or keep.is_floating_point() or keep.is_complex()):
        kind = keep.dtype if isinstance(keep, Tensor) else type(keep).__name__
        raise TypeError(f"mask takes a bool or integer tensor keep of shape [N, S], got {kind}")
    if keep is not None and keep.dim() != 2:
        raise ValueError(f"mask takes a tensor keep of shape [N, S], got shape {tuple(keep.shape)}")
