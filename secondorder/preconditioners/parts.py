"""The parts of an optimizer that its preconditioner needs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from secondorder.capture.loss_scale import LossScale
from secondorder.comm.strategy import CommStrategy
from secondorder.config import FisherOptions
from secondorder.curvature.layer import LayerOptions
from secondorder.parameters import ParameterTable
from secondorder.runtime import Runtime


@dataclass(frozen=True)
class Shared:
    """The parts of an optimizer that its preconditioner needs.

    Attributes:
        method: Name of the optimizer's class, for messages.
        comm: Communication strategy.
        table: The parameters.
        runtime: Step counter, seeds and temporary memory.
        loss_scale: The loss scale of float16 training.
        before_forward: Called before each forward pass of the module, if the optimizer still exists.
    """

    method: str
    comm: CommStrategy
    table: ParameterTable
    runtime: Runtime
    loss_scale: LossScale
    before_forward: weakref.WeakMethod[Callable[[], None]]


@dataclass(frozen=True)
class Setting(Shared):
    """The parts of an optimizer that the preconditioner of a layer method needs.

    Attributes:
        layers: The options that apply to all layers.
        fisher: The Fisher estimate.
    """

    layers: LayerOptions
    fisher: FisherOptions
