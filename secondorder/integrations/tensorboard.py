"""Measurements of an optimizer in TensorBoard."""

from __future__ import annotations

from typing import Any, Protocol

from torch.optim import Optimizer

from secondorder.integrations.stepwise import StepwiseCallback


class ScalarWriter(Protocol):
    """The methods of ``torch.utils.tensorboard.SummaryWriter`` that are used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one number."""


class TensorBoardCallback(StepwiseCallback):
    """Writes ``diagnostics()`` to TensorBoard as scalars under ``secondorder/``.

    With several processes, create the callback only on the process that writes. It writes the report of this rank.

    Args:
        optimizer: The optimizer, or the wrapper that a trainer made of it.
        writer: A ``SummaryWriter``, or any object with its ``add_scalar``. You have to close it yourself.
        every: Number of steps between two reports. Reading the measurements may wait for the device.
        by_layer: Whether to report all values by layer. Otherwise, the largest of each kind is reported as ``…/max``.

    Raises:
        TypeError: If the optimizer is not from this package, or the writer has no ``add_scalar``.
        ValueError: If ``every`` is not a positive whole number.

    Example:
        >>> import torch
        >>> from secondorder import KFAC
        >>> from secondorder.integrations.tensorboard import TensorBoardCallback
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = KFAC(model, lr=0.1)
        >>> writer = torch.utils.tensorboard.SummaryWriter("runs/one")  # doctest: +SKIP
        >>> callback = TensorBoardCallback(optimizer, writer, every=50)  # doctest: +SKIP
    """

    def __init__(self, optimizer: Optimizer, writer: ScalarWriter, every: int = 50, *, by_layer: bool = False) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"writer must have add_scalar, as a SummaryWriter does, got {type(writer).__name__}")
        self._writer = writer
        super().__init__(optimizer, every, by_layer=by_layer)

    def _write(self, numbers: dict[str, float], step: int) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)
