"""The common part of the callbacks for loggers, which report measurements of an optimizer at regular steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

from torch.optim import Optimizer

from secondorder.diagnostics import flat
from secondorder.optimizer import SecondOrderOptimizer

#: Prefix of every key, so that loggers put the values into one section.
PREFIX = "secondorder/"
SelfT = TypeVar("SelfT", bound="StepwiseCallback")


def unwrapped(optimizer: Any) -> SecondOrderOptimizer:
    """Return the optimizer of this package inside the wrappers of trainers.

    Args:
        optimizer: The optimizer, or a wrapper with it as ``optimizer`` (Accelerate) or ``_optimizer`` (Lightning).

    Returns:
        The optimizer itself.

    Raises:
        TypeError: If there is no such optimizer.
    """
    while isinstance(inner := getattr(optimizer, "_optimizer", getattr(optimizer, "optimizer", None)), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, SecondOrderOptimizer):
        raise TypeError(f"an optimizer of secondorder is needed, got {type(optimizer).__name__}")
    return optimizer


def figures(optimizer: SecondOrderOptimizer, by_layer: bool = False) -> dict[str, float]:
    """Return the numbers of ``diagnostics()`` for a logger.

    Args:
        optimizer: The optimizer.
        by_layer: Whether to return all values by layer or window. Otherwise, only the largest of each kind is returned
            as ``…/max``, and windows are left out unless there is only one.

    Returns:
        Numbers by keys that start with ``secondorder/``.
    """
    found = optimizer.diagnostics()
    if not by_layer:
        found = {key: _shortened(key, value) if isinstance(value, Mapping) else value for key, value in found.items()}
    return {PREFIX + key: value for key, value in flat(found).items()}


def _shortened(key: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
    if key == "stage_ms" or (key == "units" and len(value) == 1):
        return value
    numbers = {} if key == "units" else flat(value)
    return {"max": max(numbers.values())} if numbers else {}


class StepwiseCallback(ABC):
    """Reports measurements of an optimizer to a logger after every ``every``-th step, until it is closed.

    Args:
        optimizer: The optimizer, or the wrapper that a trainer made of it.
        every: Number of steps between two reports. Reading the measurements may wait for the device.
        by_layer: Whether to report all values by layer. Otherwise, the largest of each kind is reported as ``…/max``.

    Raises:
        TypeError: If the optimizer is not from this package.
        ValueError: If ``every`` is not a positive whole number.
    """

    def __init__(self, optimizer: Optimizer, every: int = 50, *, by_layer: bool = False) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a positive whole number, got {every!r}")
        self.every, self.by_layer = every, by_layer
        self._steps = 0
        self._handle = unwrapped(optimizer).register_step_post_hook(self._after_step)

    @abstractmethod
    def _write(self, numbers: dict[str, float], step: int) -> None:
        """Write values. ``step`` counts the steps of the optimizer, including those before a checkpoint."""

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if self._steps % self.every == 0:
            numbers = figures(unwrapped(optimizer), self.by_layer)
            self._write(numbers, int(numbers[PREFIX + "step"]))

    def close(self) -> None:
        """Stop reporting. The logger itself stays open. Idempotent."""
        self._handle.remove()

    def __enter__(self: SelfT) -> SelfT:
        """Return the callback. Leaving the block closes it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the callback."""
        self.close()
