"""The preconditioner of K-FAC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from secondorder.capture.statistics.measurement import Reduced
from secondorder.curvature.block import Block
from secondorder.curvature.factors import FACTORS
from secondorder.curvature.inverse import INVERSES
from secondorder.curvature.kronecker import KroneckerBlock
from secondorder.curvature.schema import Schema
from secondorder.linalg.dense import stacked
from secondorder.parallel.exchange import StatisticsExchange
from secondorder.parameters import Directions
from secondorder.preconditioners.budget import BudgetChooser
from secondorder.preconditioners.layers import LayerPreconditioner
from secondorder.preconditioners.parts import Setting
from secondorder.preconditioners.small_blocks import StackRule


def _read(block: KroneckerBlock) -> tuple[Sequence[str], Sequence[str]]:
    """Return what the inverse of a block reads. A subclass has to declare that its ``apply`` supports stacks."""
    inverse = type(block.inverse)
    takes_stacks = type(block) is KroneckerBlock and "stacked" in vars(inverse)
    return (inverse.stacked, inverse.options) if takes_stacks else ((), ())


def _precondition(blocks: Sequence[KroneckerBlock], gradients: Tensor) -> Tensor:
    """Return the preconditioned matrices ``[k, n_g, n_a]``."""
    first, workspace = blocks[0], blocks[0].runtime.workspace
    keys = [key for key in first.inverse.stacked if key in first.state]
    state = {key: stacked([block.state[key] for block in blocks], workspace) for key in keys}
    return first.inverse.apply(state, first.group, gradients, workspace)


class KroneckerPreconditioner(LayerPreconditioner[KroneckerBlock]):
    """Preconditions with blocks that are inverted by eigenvalues or factor by factor."""

    catalog: ClassVar[Schema] = {**FACTORS, **INVERSES}
    block_type: ClassVar[type[Block]] = KroneckerBlock
    allocating: ClassVar[tuple[str, ...]] = ("max_factor_dim", "decay_per_step", "inverse_method", "inverse_rank")
    stack_rule: ClassVar[StackRule] = StackRule(_read, _precondition)

    def __init__(self, setting: Setting, exchange: StatisticsExchange | None = None, **own: Any) -> None:
        super().__init__(setting, exchange, **own)
        self.budget = BudgetChooser(self.plan, self.exchange, self.options.budget)

    def learn(self, statistics: Reduced, gradients: Directions, gate: Tensor | None) -> None:
        """Fold what was measured into the running estimates, whose first sizes decide what a budget allows."""
        super().learn(statistics, gradients, gate)
        self.budget.follow(statistics.measured)
