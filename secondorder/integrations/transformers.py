"""Complete checkpoints on several ranks, logging, and optimizers from a model, for the Hugging Face ``Trainer``.

Training does not need this module; pass the optimizers as ``optimizers=`` or ``optimizer_cls_and_kwargs=``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import TrainerCallback

from secondorder.diagnostics import flat
from secondorder.integrations.stepwise import PREFIX, unwrapped
from secondorder.optimizer import SecondOrderOptimizer


class SecondOrderCallback(TrainerCallback):
    """Supports a ``Trainer`` with an optimizer of this package. It must be the last of the ``callbacks=``.

    * If curvature is spread over the ranks (``MemOpt()``), every checkpoint contains all of it, because the saving rank
      first gathers it on its CPU. This works with all values of ``save_strategy``. With ``"best"``, the ``Trainer``
      decides after the last event before the save, so every evaluation gathers. ``save_only_model`` prevents this.
    * The optimizer is connected to the loss scaler of float16 training before the first batch.
    * ``diagnostics()`` is logged with every training loss, as numbers under ``secondorder/``. It is the report of this
      rank, and reading it may wait for the device.

    Built-in reporters (TensorBoard, Weights & Biases, ...) receive a log line before the callbacks of the user. To
    report to them too, add the callback later and pass the trainer, which then writes the values to a separate line:
    ``trainer.add_callback(SecondOrderCallback(trainer=trainer))``.

    Args:
        optimizer: The optimizer; None for the optimizer of the ``Trainer``.
        trainer: Trainer whose ``log`` receives the values; None to add them to the line of the loss.
        consolidate: Whether to complete checkpoints.
        log: Whether to log values.
        by_layer: Whether to also log the values of every layer.

    Raises:
        TypeError: If training starts with an optimizer that is not from this package.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[SecondOrderCallback()])  # doctest: +SKIP
    """

    def __init__(
        self,
        optimizer: SecondOrderOptimizer | None = None,
        *,
        trainer: Any = None,
        consolidate: bool = True,
        log: bool = True,
        by_layer: bool = False,
    ) -> None:
        self.optimizer: SecondOrderOptimizer | None = None if optimizer is None else unwrapped(optimizer)
        self.trainer = trainer
        self.consolidate = consolidate
        self.log = log
        self.by_layer = by_layer
        self._consolidated_at = -1
        self._in_training = self._in_log = False

    # ------------------------------------------------------------------ events, in the order of a step
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the optimizer and connect it to the loss scaler."""
        optimizer = self._optimizer(kwargs)
        scaler = getattr(kwargs.get("optimizer"), "scaler", None)
        if scaler is not None and optimizer.grad_scaler is None:
            optimizer.grad_scaler = scaler
        self._consolidated_at = -1
        self._in_training = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ignore evaluations that are not part of training."""
        self._in_training = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete the state if it is saved after this step or epoch."""
        self._complete(control.should_save, args, state, kwargs)

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete the state if this evaluation may lead to a save."""
        self._complete(control.should_save or args.save_strategy == "best", args, state, kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Add values to a line with the training loss, or write them in a separate line."""
        if not self.log or self._in_log or logs is None or "loss" not in logs:
            return
        numbers = self._figures(self._optimizer(kwargs))
        if self.trainer is None:
            logs.update(numbers)
            state.log_history[-1].update(numbers)
            return
        self._in_log = True
        try:
            self.trainer.log(numbers)
        finally:
            self._in_log = False

    # ------------------------------------------------------------------ completion and figures
    def _optimizer(self, event: Mapping[str, Any]) -> SecondOrderOptimizer:
        return self.optimizer if self.optimizer is not None else unwrapped(event.get("optimizer"))

    def _complete(self, wanted: bool, args: Any, state: Any, event: Mapping[str, Any]) -> None:
        """Gather the state that other ranks hold once per step. All ranks call this under the same conditions."""
        if not (wanted and self.consolidate and self._in_training) or args.save_only_model:
            return
        if self._consolidated_at == state.global_step:
            return
        self._consolidated_at = state.global_step
        self._optimizer(event).consolidate_state_dict(to=None if args.save_on_each_node else 0, pieces=False)

    def _figures(self, optimizer: SecondOrderOptimizer) -> dict[str, float]:
        found = optimizer.diagnostics()
        if not self.by_layer:
            found = {key: value for key, value in found.items() if not isinstance(value, Mapping)}
        return {PREFIX + key: value for key, value in flat(found).items()}


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups like those of the ``Trainer``, without decay for biases and normalization layers.

    Args:
        model: Model whose trainable parameters are grouped.
        weight_decay: Weight decay of the first group. The second group has none.

    Returns:
        Two groups, to be passed with ``module=model``.
    """
    from transformers import Trainer  # this takes seconds and is not needed for logging

    decayed = set(Trainer.get_decay_parameter_names(None, model))  # it uses no attribute of a trainer
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]


def optimizer_factory(method: Callable[..., SecondOrderOptimizer]) -> Callable[[], Callable[..., SecondOrderOptimizer]]:
    """Return a factory for ``optimizer_cls_and_kwargs=`` that builds the optimizer for the model of the ``Trainer``.

    Use it if the model does not exist yet when you define the options, as with ``model_init=``. Otherwise, ``(KFAC,
    {"module": model, ...})`` is sufficient.

    Args:
        method: ``KFAC``, ``EKFAC``, ... or a function of parameter groups and ``module=``.

    Returns:
        A function that a ``Trainer`` calls without arguments. Its result is called with the model and the options.
        ``weight_decay`` applies to the parameters that the ``Trainer`` would decay, see :func:`decay_groups`; all other
        options are passed to the method.

    Example:
        >>> options = {"lr": 1e-3, "weight_decay": 0.01}
        >>> trainer = Trainer(  # doctest: +SKIP
        ...     model_init=make_model, args=args, optimizer_cls_and_kwargs=(optimizer_factory(KFAC), options)
        ... )
    """

    def make(model: nn.Module, weight_decay: float = 0.0, **options: Any) -> SecondOrderOptimizer:
        return method(decay_groups(model, weight_decay), module=model, **options)

    return lambda: make
