"""Norms of gradients and directions step by step, as events of the trend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from secondorder.curvature.block import Block

if TYPE_CHECKING:
    from secondorder.optimizer import SecondOrderOptimizer

Event = dict[str, Any]


class Trend:
    """Measures the norms of the layers of an optimizer.

    Args:
        optimizer: The optimizer.
        epoch_steps: Number of steps of an epoch, or None.
        last: Norms of the gradient by layer at the last measurement.
    """

    def __init__(self, optimizer: SecondOrderOptimizer, epoch_steps: int | None, last: Mapping[str, float]) -> None:
        self._optimizer, self._epoch_steps, self._last = optimizer, epoch_steps, dict(last)
        self._norms: dict[Block, float] = {}
        self._keeping = ExitStack()
        self._kept: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Start to keep the directions of the next step."""
        self.end()
        self._kept = self._keeping.enter_context(self._optimizer.keep_directions())

    def look(self, gradients: Mapping[Block, Sequence[Tensor]]) -> None:
        """Measure the gradients of a step. Layers without gradients are left out."""
        self._norms = {block: norm(found) for block, found in gradients.items() if found}

    def end(self) -> dict[str, Tensor]:
        """Stop keeping directions, and return those of the step by the name of the parameter."""
        self._keeping.close()
        found, self._kept = self._kept, {}
        return found

    def events(self, step: int, mode: str, mode_by_layer: Mapping[str, str]) -> Iterator[Event]:
        """Yield one event for each measured layer after the step."""
        directions, name_of = self.end(), self._optimizer.parameter_name
        for block, size in self._norms.items():
            before = self._last.get(block.name)
            kept = [directions[name] for name in map(name_of, block.params) if name in directions]
            self._last[block.name] = size
            yield {
                "epoch": None if self._epoch_steps is None else step // self._epoch_steps,
                "layer": block.name,
                "grad_norm": size,
                "update_norm": norm(kept) if len(kept) == len(block.params) else None,
                "rel_change": (size - before) / before if before else None,
                "mode": mode_by_layer.get(block.name, mode),
            }


def norm(tensors: Sequence[Tensor]) -> float:
    """Return the Frobenius norm of several tensors together."""
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
