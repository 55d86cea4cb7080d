"""Completes checkpoints on several ranks with Accelerate. Training with an ``Accelerator`` needs nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from secondorder.integrations.stepwise import unwrapped

if TYPE_CHECKING:
    from accelerate import Accelerator


def consolidate_before_save(accelerator: Accelerator, *optimizers: Optimizer) -> Any:
    """Make ``accelerator.save_state()`` save all of the curvature if it is spread over the ranks (``MemOpt()``).

    The saving rank first gathers the curvature on its CPU. Call this on all ranks, like ``save_state()``.

    Args:
        accelerator: The accelerator whose ``save_state()`` is called.
        *optimizers: Optimizers of this package that the accelerator prepared, before or after ``prepare``.

    Returns:
        A handle whose ``remove()`` reverts this.

    Raises:
        TypeError: If an optimizer is not from this package.

    Example:
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
        >>> consolidate_before_save(accelerator, optimizer)  # doctest: +SKIP
    """
    meant = [unwrapped(optimizer) for optimizer in optimizers]

    def gather(models: Any, weights: Any, output_dir: str) -> None:
        everywhere = accelerator.project_configuration.save_on_each_node
        for optimizer in meant:
            optimizer.consolidate_state_dict(to=None if everywhere else 0, pieces=False)

    return accelerator.register_save_state_pre_hook(gather)
