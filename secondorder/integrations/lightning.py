"""Complete checkpoints with every strategy of Lightning, the loss scaler, and measurements in the trainer's logger."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from secondorder.integrations.stepwise import figures
from secondorder.optimizer import SecondOrderOptimizer

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    import pytorch_lightning as pl  # the same library under its old name
else:
    import lightning.pytorch as pl


class SecondOrderCallback(pl.Callback):
    """Supports a trainer whose module has optimizers of this package. Other optimizers are not affected.

    * If curvature is spread over the ranks (``MemOpt()``), checkpoints contain all of it with every strategy, because
      rank 0 gathers it on its CPU. Lightning's strategies for one device and for DistributedDataParallel already
      collect it. Nothing is gathered with ``save_weights_only=True`` or for distributed checkpoints, in which every
      rank writes its part.
    * The optimizers are connected to the loss scaler of ``precision="16-mixed"``.
    * ``diagnostics()`` is sent to the loggers of the trainer, as numbers under ``secondorder/``, or under
      ``secondorder/0/`` and so on for several optimizers. It is the report of rank 0, by ``trainer.global_step``.

    Args:
        consolidate: Whether to complete checkpoints.
        log_every_n_steps: Number of steps between two reports to the loggers, or 0 for none. Reading the measurements
            may wait for the device.
        by_layer: Whether to report all values by layer. Otherwise, the largest of each kind is reported as ``…/max``.

    Raises:
        ValueError: If ``log_every_n_steps`` is negative or not a whole number.

    Example:
        >>> trainer = Trainer(callbacks=[SecondOrderCallback()])  # doctest: +SKIP
    """

    def __init__(self, *, consolidate: bool = True, log_every_n_steps: int = 50, by_layer: bool = False) -> None:
        super().__init__()
        if isinstance(log_every_n_steps, bool) or not isinstance(log_every_n_steps, int) or log_every_n_steps < 0:
            raise ValueError(f"log_every_n_steps must be a whole number >= 0, got {log_every_n_steps!r}")
        self.consolidate = consolidate
        self.log_every_n_steps = log_every_n_steps
        self.by_layer = by_layer
        self._trainer: pl.Trainer | None = None
        self._logged_at = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Record whether the checkpoints of the strategy have to be completed."""
        self._trainer = trainer

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Connect the loss scaler before the first batch and before a checkpoint is restored."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        for _, optimizer in _optimizers(trainer):
            if scaler is not None and optimizer.grad_scaler is None:
                optimizer.grad_scaler = scaler

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting at the step of a restored checkpoint."""
        self._logged_at = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        """Complete the state of the optimizers, which Lightning collects next. The callback itself stores nothing.

        A trainer calls this on all ranks when it saves more than weights, before ``strategy.optimizer_state``.
        ``on_save_checkpoint`` is called after that.

        Returns:
            An empty dict.
        """
        if self.consolidate and self._trainer is not None and not _consolidates(self._trainer.strategy):
            for _, optimizer in _optimizers(self._trainer):
                if not getattr(self._trainer.strategy, "_save_distributed_checkpoint", False):
                    optimizer.consolidate_state_dict(pieces=False)
                optimizer.warned_of_partial = True  # other ranks' state is not saved, or each rank saves its own
        return {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report to the loggers after enough steps."""
        step = trainer.global_step
        due = self.log_every_n_steps and step // self.log_every_n_steps > self._logged_at // self.log_every_n_steps
        if not due:
            return
        self._logged_at = step
        if trainer.is_global_zero and trainer.loggers:
            numbers = _numbers(trainer, self.by_layer)
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=step)


def _consolidates(strategy: Any) -> bool:
    """Whether a strategy makes optimizers consolidate before it collects their state, as the base class does."""
    return type(strategy).optimizer_state is pl.strategies.Strategy.optimizer_state


def _optimizers(trainer: pl.Trainer) -> Iterator[tuple[int, SecondOrderOptimizer]]:
    """Yield the optimizers of this package, with their index."""
    for i, optimizer in enumerate(trainer.optimizers):
        if isinstance(optimizer, SecondOrderOptimizer):
            yield i, optimizer


def _numbers(trainer: pl.Trainer, by_layer: bool) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for i, optimizer in _optimizers(trainer):
        place = f"secondorder/{i}/" if len(trainer.optimizers) > 1 else "secondorder/"
        found |= {key.replace("secondorder/", place, 1): value for key, value in figures(optimizer, by_layer).items()}
    return found
