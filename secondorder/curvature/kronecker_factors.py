"""Methods with Kronecker factors: how A and G of a layer are estimated and brought into their eigenbasis."""

# bridge: verbs that take blocks with factors
# mypy: disable-error-code="override"

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from secondorder.capture.sites import Statistic
from secondorder.capture.statistics.measurement import Measured
from secondorder.curvature import factors
from secondorder.curvature.background_refresh import OverlappingRefreshes
from secondorder.curvature.extremes import Extremes
from secondorder.curvature.factorization import joint_ok
from secondorder.curvature.inverse import INVERSES
from secondorder.curvature.kronecker import FactoredBlock, KroneckerBlock
from secondorder.curvature.layer import Layer
from secondorder.curvature.schema import Schema
from secondorder.linalg import polar
from secondorder.preconditioners.base import Group

#: Numbers of the factors that a refresh works on at a time, more only if one layer has more.
REFRESH_PORTION = 1 << 24


class FactoredPreconditioner(OverlappingRefreshes):
    """The blocks of methods with factors A and G per layer, and an eigenbasis or an inverse of each."""

    #: The class of the blocks.
    block_type: ClassVar[type[FactoredBlock]] = FactoredBlock  # type: ignore[type-abstract]

    # ------------------------------------------------------------------ blocks
    def new_block(self, layer: Layer, index: int, group: Group) -> FactoredBlock:
        """Return the block of a layer."""
        return self.block_type(layer, index, group, self._runtime, self._layer_options, self._fisher)

    def count_update(self, block: FactoredBlock, measured: Measured) -> None:
        """Count a statistic that was folded in, on whatever rank."""
        super().count_update(block, measured)
        block.note_step("factor_step")

    # ------------------------------------------------------------------ verbs of blocks
    def schema(self, block: FactoredBlock, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        """Return the entries of the state of a block."""
        return block.schema(group, held)

    def new_statistic(self, block: FactoredBlock, group: Group) -> Statistic:
        """Return empty sums of a block."""
        return block.statistic()

    def sums(self, block: FactoredBlock) -> Schema:
        """Return what this step measures of a block, as ranks add it up."""
        return block.sums()

    def measure(self, block: FactoredBlock, statistic: Statistic, examples: int) -> Measured:
        """Return what this rank's batch says about the estimate, scaled per datum."""
        return block.measure(statistic, examples)

    def fold(self, block: FactoredBlock, measured: Measured, gate: Tensor | None) -> Tensor:
        """Fold what was measured into the running estimate, and return whether it was finite."""
        return block.fold(measured, gate)

    def precondition(self, block: FactoredBlock, gradient: Tensor) -> Tensor:
        """Apply the inverse of the damped curvature of a block to a gradient matrix ``[(Γ,) n_g, n_a]``."""
        return block.precondition(gradient)

    def block_curvature(self, block: FactoredBlock) -> Tensor:
        """Return the undamped curvature of a block as a dense matrix."""
        return block.dense()

    def curvature_product(self, block: FactoredBlock, matrix: Tensor) -> Tensor:
        """Apply the undamped curvature of a block to a matrix ``[(Γ,) n_g, n_a]``."""
        return block.product(matrix)

    def block_damping(self, block: FactoredBlock) -> Tensor:
        """Return λ of a block as the damping of its quadratic model."""
        return block.damping()

    # ------------------------------------------------------------------ refresh
    def refresh(self, blocks: Sequence[FactoredBlock], host_checks: bool) -> Tensor:
        """Factorise the factors of some blocks, a portion at a time: temporaries do not grow with the model."""
        return torch.cat([self.refresh_some(some, host_checks) for some in self._refresh_portions(blocks)])

    def refresh_some(self, blocks: Sequence[FactoredBlock], host_checks: bool) -> Tensor:
        """Factorize the factors of some blocks; one that fails keeps its last good result. Returns ``ok [len]``."""
        results = self.factorised(blocks, host_checks)
        ok = joint_ok(results, blocks)
        for block, good in zip(blocks, ok.unbind(), strict=True):
            block.adopt({side: results[block, side][0] for side in "ag"}, good)
        return ok

    def _refresh_portions(self, blocks: Sequence[FactoredBlock]) -> Iterator[Sequence[FactoredBlock]]:
        start = size = 0
        for i, block in enumerate(blocks):
            own = sum(math.prod(side.shape) for side in factors.sides(block.adapter, block.group["max_factor_dim"]))
            if size and size + own > REFRESH_PORTION:
                yield blocks[start:i]
                start, size = i, 0
            size += own
        yield blocks[start:]

    # ------------------------------------------------------------------ what it tells
    def coverage(self, p: Any) -> tuple[str, str, str]:
        treatment, sizes, owner = super().coverage(p)
        block = self._block_of.get(p)
        if block is None:
            return treatment, sizes, owner
        lead = f"{block.adapter.groups}×" if block.adapter.groups > 1 else ""
        names = [
            f"diagonal {n}" if block.is_diagonal(side) else str(n)
            for side, n in zip("ag", (block.adapter.n_a, block.adapter.n_g), strict=True)
        ]
        return treatment, lead + ", ".join(names), owner

    # ------------------------------------------------------------------ directions
    def shape_direction(self, block: FactoredBlock, direction: Tensor) -> Tensor:
        """The matrix itself, or with ``orthogonalize`` its polar factor."""
        if not self.is_orthogonalized(block):
            return direction
        return polar.step_of(direction, self._layer_options.orthogonal_dtype)

    def is_orthogonalized(self, block: FactoredBlock) -> bool:
        """Whether directions of a block get a uniform spectrum: those that mix all inputs into all outputs do."""
        adapter = block.adapter
        mixes = not (adapter.one_hot or adapter.is_exact) and min(adapter.n_a, adapter.n_g) > 1
        return bool(block.group["orthogonalize"]) and mixes

    def shaping_flops(self, block: FactoredBlock) -> float:
        """FLOPs of :meth:`shape_direction`."""
        adapter = block.adapter
        each = polar.flops(adapter.n_g, adapter.n_a) if self.is_orthogonalized(block) else 0.0
        return adapter.groups * each

    def sets_length(self, p: torch.nn.Parameter) -> bool:
        """Whether directions of a parameter have a length that no clip shall change."""
        return self.is_orthogonalized(self._block_of[p])


class KroneckerPreconditioner(FactoredPreconditioner):
    """Blocks that are inverted by eigenvalues, or factor by factor."""

    catalog: ClassVar[Schema] = {**FactoredPreconditioner.catalog, **INVERSES}
    block_type: ClassVar[type[FactoredBlock]] = KroneckerBlock
    allocating: ClassVar[tuple[str, ...]] = ("max_factor_dim", "decay_per_step", "inverse_method")

    def needs_estimate_everywhere(self, block: KroneckerBlock, group: Mapping[str, Any]) -> bool:
        # Both factors diagonal: there are no inverses, and the factors themselves precondition.
        return group["inverse_method"] == "cholesky" and block.is_entrywise

    def bounds(self, block: KroneckerBlock) -> Extremes | None:
        """Return λ of a block and upper bounds of the largest eigenvalues, without waiting for the device."""
        return block.bounds()
