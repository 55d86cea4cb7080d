"""Figures of an optimizer in Weights & Biases."""

from __future__ import annotations

from typing import Any, Protocol

from torch.optim import Optimizer

from secondorder.integrations.stepwise import PREFIX, StepwiseCallback


class Run(Protocol):
    """What is needed of a run of ``wandb``."""

    def log(self, data: dict[str, Any]) -> Any:
        """Log numbers."""

    def define_metric(self, name: str, step_metric: str) -> Any:
        """Say what a metric is drawn over."""


class WandbCallback(StepwiseCallback):
    """Logs ``diagnostics()`` to a run of Weights & Biases, under ``secondorder/``.

    The figures are drawn over ``secondorder/step``, the steps of the optimizer. They are logged without wandb's own
    ``step=``, which every call of ``run.log`` moves on: where your script logs, leave it out too, and name what its
    figures are to be drawn over with ``run.define_metric``.

    With several processes, make it on the one that has the run. It reports what that rank knows.

    Args:
        optimizer: The optimizer, or the wrapper that a trainer made of it.
        run: What ``wandb.init`` returned; it stays yours to finish.
        every: Steps between two reports; reading the figures may wait for the device.
        by_layer: Whether to report what there is by layer in full; else the largest of each sort, as ``…/max``.

    Raises:
        TypeError: If it is no optimizer of this package, or the run none.
        ValueError: If ``every`` is no positive whole number.

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
            raise TypeError(f"run must be what wandb.init returned, got {type(run).__name__}")
        self._run = run
        super().__init__(optimizer, every, by_layer=by_layer)
        run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def _write(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers)
