"""The preconditioner of K-FAC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from secondorder.curvature.block import Block
from secondorder.curvature.factors import FACTORS
from secondorder.curvature.inverse import INVERSES
from secondorder.curvature.kronecker import KroneckerBlock
from secondorder.curvature.schema import Schema
from secondorder.preconditioners.block_stacks import StackRule, stacked_state
from secondorder.preconditioners.estimate_stacks import fold_factors
from secondorder.preconditioners.layers import LayerPreconditioner


def _read(block: KroneckerBlock) -> tuple[Sequence[str], Sequence[str]]:
    """Return what the inverse of a block reads. A subclass has to declare that its ``apply`` supports stacks."""
    inverse = type(block.inverse)
    takes_stacks = type(block) is KroneckerBlock and "stacked" in vars(inverse)
    return (inverse.stacked, inverse.options) if takes_stacks else ((), ())


def _precondition(blocks: Sequence[KroneckerBlock], gradients: Tensor) -> Tensor:
    """Return the preconditioned matrices ``[k, (Γ,) n_g, n_a]``."""
    first = blocks[0]
    state = stacked_state(blocks, first.inverse.stacked)
    return first.inverse.apply(state, first.group, gradients, first.runtime.workspace)


class KroneckerPreconditioner(LayerPreconditioner[KroneckerBlock]):
    """Preconditions with blocks that are inverted by eigenvalues or factor by factor."""

    catalog: ClassVar[Schema] = {**FACTORS, **INVERSES}
    block_type: ClassVar[type[Block]] = KroneckerBlock
    allocating: ClassVar[tuple[str, ...]] = ("max_factor_dim", "decay_per_step", "inverse_method", "inverse_rank")
    stack_rule: ClassVar[StackRule] = StackRule(_read, _precondition, fold_factors)
