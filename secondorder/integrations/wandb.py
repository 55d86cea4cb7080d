"""Measurements of an optimizer in Weights & Biases."""

from __future__ import annotations

from typing import Any, Protocol

from torch.optim import Optimizer

from secondorder.integrations.stepwise import PREFIX, StepwiseCallback


class Run(Protocol):
    """The methods of a run of ``wandb`` that are used."""

    def log(self, data: dict[str, Any]) -> Any:
        """Log numbers."""

    def define_metric(self, name: str, step_metric: str) -> Any:
        """Define the axis of a metric."""


class WandbCallback(StepwiseCallback):
    """Logs ``diagnostics()`` to a run of Weights & Biases under ``secondorder/``.

    Values are plotted against ``secondorder/step``, the steps of the optimizer. They are logged without wandb's
    ``step=``, which every call of ``run.log`` increments. If your script logs too, do not pass ``step=`` either, and
    define the axis of your values with ``run.define_metric``.

    With several processes, create the callback only on the process with the run. It logs the report of this rank.

    Args:
        optimizer: The optimizer, or the wrapper that a trainer made of it.
        run: The result of ``wandb.init``. You have to finish the run yourself.
        every: Number of steps between two reports. Reading the measurements may wait for the device.
        by_layer: Whether to report all values by layer. Otherwise, the largest of each kind is reported as ``…/max``.

    Raises:
        TypeError: If the optimizer is not from this package, or ``run`` is not a run.
        ValueError: If ``every`` is not a positive whole number.

    Example:
        >>> import torch
        >>> from secondorder import KFAC
        >>> from secondorder.integrations.wandb import WandbCallback
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = KFAC(model, lr=0.1)
        >>> run = wandb.init(mode="offline")  # doctest: +SKIP
        >>> callback = WandbCallback(optimizer, run, every=50)  # doctest: +SKIP
    """

    def __init__(self, optimizer: Optimizer, run: Run, every: int = 50, *, by_layer: bool = False) -> None:
        if not (callable(getattr(run, "log", None)) and callable(getattr(run, "define_metric", None))):
            raise TypeError(f"run must be the run that wandb.init returns, got {type(run).__name__}")
        self._run = run
        super().__init__(optimizer, every, by_layer=by_layer)
        run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def _write(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers)
