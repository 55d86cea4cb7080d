"""The preconditioner of K-FAC."""

from __future__ import annotations

from typing import ClassVar

from secondorder.curvature.block import Block
from secondorder.curvature.factors import FACTORS
from secondorder.curvature.inverse import INVERSES
from secondorder.curvature.kronecker import KroneckerBlock
from secondorder.curvature.schema import Schema
from secondorder.preconditioners.layers import LayerPreconditioner


class KroneckerPreconditioner(LayerPreconditioner[KroneckerBlock]):
    """Blocks that are inverted by eigenvalues, or factor by factor."""

    catalog: ClassVar[Schema] = {**FACTORS, **INVERSES}
    block_type: ClassVar[type[Block]] = KroneckerBlock
    allocating: ClassVar[tuple[str, ...]] = ("max_factor_dim", "decay_per_step", "inverse_method")
