"""What the callbacks of loggers share: figures of an optimizer, handed over every so many steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from torch.optim import Optimizer

from secondorder.diagnostics import flat
from secondorder.optimizer import SecondOrderOptimizer

#: Stands before every key, so that loggers put the figures into one section.
PREFIX = "secondorder/"
SelfT = TypeVar("SelfT", bound="StepwiseCallback")


def unwrapped(optimizer: Any) -> SecondOrderOptimizer:
    """The optimizer of this package behind the wrappers of trainers.

    Args:
        optimizer: The optimizer, or a wrapper with it as ``optimizer`` (Accelerate) or ``_optimizer`` (Lightning).

    Returns:
        The optimizer itself.

    Raises:
        TypeError: If there is none.
    """
    while isinstance(inner := getattr(optimizer, "_optimizer", getattr(optimizer, "optimizer", None)), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, SecondOrderOptimizer):
        raise TypeError(f"an optimizer of secondorder is needed, got {type(optimizer).__name__}")
    return optimizer


def figures(optimizer: SecondOrderOptimizer) -> dict[str, float]:
    """The numbers of ``diagnostics()``, by keys that begin with ``secondorder/``."""
    return {PREFIX + key: value for key, value in flat(optimizer.diagnostics()).items()}


class StepwiseCallback(ABC):
    """Hands the figures of an optimizer to a logger after every ``every``-th step, until it is closed.

    Args:
        optimizer: The optimizer, or the wrapper that a trainer made of it.
        every: Steps between two reports; reading the figures may wait for the device.

    Raises:
        TypeError: If it is no optimizer of this package.
        ValueError: If ``every`` is no positive whole number.
    """

    def __init__(self, optimizer: Optimizer, every: int = 50) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a positive whole number, got {every!r}")
        self.every = every
        self._steps = 0
        self._handle = unwrapped(optimizer).register_step_post_hook(self._after_step)

    @abstractmethod
    def _write(self, numbers: dict[str, float], step: int) -> None:
        """Hand figures over; ``step`` counts those of the optimizer, through checkpoints too."""

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if self._steps % self.every == 0:
            numbers = figures(unwrapped(optimizer))
            self._write(numbers, int(numbers[PREFIX + "step"]))

    def close(self) -> None:
        """Report no more. Idempotent; the logger itself stays open."""
        self._handle.remove()

    def __enter__(self: SelfT) -> SelfT:
        """The callback itself; leaving the block closes it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()
