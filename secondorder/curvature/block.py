"""Blocks: one layer's curvature, what is kept of it, and the options it follows."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import nn

from secondorder.capture.layers.adapter import Adapter
from secondorder.curvature.extremes import Extremes
from secondorder.curvature.layer import Layer
from secondorder.runtime import Runtime


class Block:
    """The curvature of one layer.

    What outlives a step is in ``state``. Options are read from ``group`` whenever they are used.

    Args:
        layer: The layer.
        index: Position among the blocks of the optimizer.
        group: The parameter group of the owner, whose options the block follows.
        runtime: What all parts of the optimizer share.
    """

    def __init__(self, layer: Layer, index: int, group: dict[str, Any], runtime: Runtime) -> None:
        self.layer, self.index, self.group, self.runtime = layer, index, group, runtime

    def beside(self, runtime: Runtime) -> Block:
        """The same block with another state."""
        found = copy(self)
        found.runtime = runtime
        return found

    @property
    def name(self) -> str:
        """Module name as in ``named_modules()``."""
        return self.layer.name

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.layer.label

    @property
    def adapter(self) -> Adapter:
        """Shapes of the layer."""
        return self.layer.adapter

    @property
    def owner(self) -> nn.Parameter:
        """The parameter whose state holds the curvature."""
        return self.layer.owner

    @property
    def params(self) -> list[nn.Parameter]:
        """Weight and bias, as far as they are trained."""
        return self.layer.params

    @property
    def state(self) -> dict[str, Any]:
        """The state of the owner, as the optimizer has it now."""
        return self.runtime.states[self.owner]

    def extremes(self) -> Extremes | None:
        """λ and the extreme eigenvalues of the damped curvature; None where they are on other ranks."""
        return None
