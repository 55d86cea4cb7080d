"""Hugging Face ``Trainer``: whole checkpoints on several ranks, figures in its log, optimizers from a model.

In a ``Trainer`` the optimizers train without anything from here, as ``optimizers=`` and ``optimizer_cls_and_kwargs=``.
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
    """For a ``Trainer`` with an optimizer of this package; to be the last of its ``callbacks=``.

    * Where curvature is spread over the ranks (``MemOpt()``), every checkpoint has all of it: the rank that saves
      gathers it on its CPU before. That is so for all values of ``save_strategy``. With ``"best"`` the ``Trainer``
      decides after the last event before the save, so every evaluation gathers. With ``save_only_model`` none does.
    * A loss scaler of float16 training is made known to the optimizer before the first batch.
    * ``diagnostics()`` goes into the log with every training loss, as numbers under ``secondorder/``: what this rank
      knows. Reading them may wait for the device.

    Built-in reporters (TensorBoard, Weights & Biases, ...) take a log line before the callbacks of the user see it. To
    reach them too, add the callback afterwards and name the trainer:
    ``trainer.add_callback(SecondOrderCallback(trainer=trainer))``; the figures are then a line of their own.

    Args:
        optimizer: The optimizer; None for the one of the ``Trainer``.
        trainer: Whose ``log`` takes the figures; None to add them to the line of the loss.
        consolidate: Whether to complete checkpoints.
        log: Whether to log figures.
        by_layer: Whether to log those figures too of which there is one per layer.

    Raises:
        TypeError: When training begins with an optimizer that is none of this package.

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
        """Look for the optimizer, and tell it which scaler there is."""
        optimizer = self._optimizer(kwargs)
        scaler = getattr(kwargs.get("optimizer"), "scaler", None)
        if scaler is not None and optimizer.grad_scaler is None:
            optimizer.grad_scaler = scaler
        self._consolidated_at = -1
        self._in_training = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave evaluations alone that are not part of training."""
        self._in_training = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete the state, if it is saved after this step."""
        self._complete(control.should_save, args, state, kwargs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete the state, if it is saved after this epoch."""
        self._complete(control.should_save, args, state, kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete the state, if this evaluation may lead to a save."""
        self._complete(control.should_save or args.save_strategy == "best", args, state, kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Add figures to a line with the training loss, or write them into one of their own."""
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

    # ------------------------------------------------------------------ what they do
    def _optimizer(self, event: Mapping[str, Any]) -> SecondOrderOptimizer:
        return self.optimizer if self.optimizer is not None else unwrapped(event.get("optimizer"))

    def _complete(self, wanted: bool, args: Any, state: Any, event: Mapping[str, Any]) -> None:
        """Gather what other ranks hold, once per step; all ranks come here with the same answers."""
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
    """Parameter groups as the ``Trainer`` makes them: no decay for biases and normalisation layers.

    Args:
        model: Whose trainable parameters to group.
        weight_decay: Of the first group; that of the second is 0.

    Returns:
        Two groups, to be passed with ``module=model``.
    """
    from transformers import Trainer  # takes seconds, and whoever logs only needs none of it

    decayed = set(Trainer.get_decay_parameter_names(None, model))  # reads nothing of a trainer
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]


def optimizer_factory(method: Callable[..., SecondOrderOptimizer]) -> Callable[[], Callable[..., SecondOrderOptimizer]]:
    """For ``optimizer_cls_and_kwargs=``: makes the optimizer from the model that the ``Trainer`` trains.

    Needed where the model does not exist yet when options are written down, as with ``model_init=``. Otherwise
    ``(KFAC, {"module": model, ...})`` does.

    Args:
        method: ``KFAC``, ``EKFAC``, ... or a function of parameter groups and ``module=``.

    Returns:
        What a ``Trainer`` calls without arguments, then with the model and the options. Of these ``weight_decay``
        is for the parameters that the ``Trainer`` would let decay, see :func:`decay_groups`; the others go to the
        method.

    Example:
        >>> options = {"lr": 1e-3, "weight_decay": 0.01}
        >>> trainer = Trainer(  # doctest: +SKIP
        ...     model_init=make_model, args=args, optimizer_cls_and_kwargs=(optimizer_factory(KFAC), options)
        ... )
    """

    def make(model: nn.Module, weight_decay: float = 0.0, **options: Any) -> SecondOrderOptimizer:
        return method(decay_groups(model, weight_decay), module=model, **options)

    return lambda: make
