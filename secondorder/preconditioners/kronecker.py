"""The stages of a step over blocks with Kronecker factors."""

# bridge: verbs that take blocks with factors
# mypy: disable-error-code="override"

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from secondorder.capture.fisher.fisher import Observing
from secondorder.capture.sites import Statistic
from secondorder.capture.statistics.measurement import Measured
from secondorder.curvature import factors
from secondorder.curvature.block import Block
from secondorder.curvature.factorization import Found, joint_ok
from secondorder.curvature.factors import FACTORS
from secondorder.curvature.inverse import INVERSES
from secondorder.curvature.kronecker import FactoredBlock, KroneckerBlock
from secondorder.curvature.layer import Layer
from secondorder.curvature.schema import Schema
from secondorder.linalg import polar
from secondorder.parameters import Group
from secondorder.preconditioners.base import SavedStates

_Key = tuple[FactoredBlock, str]
#: Numbers of the factors that a refresh works on at a time, more only if one layer has more.
REFRESH_PORTION = 1 << 24


class OverlappingRefreshes(Observing):
    """Methods that factorize factors, at once or in the background."""

    catalog: ClassVar[Schema] = FACTORS
    _blocks: list[FactoredBlock]  # type: ignore[assignment]
    _block_of: dict[nn.Parameter, FactoredBlock]  # type: ignore[assignment]

    def refresh_due(self) -> list[int]:
        """As in the base class; with ``overlap`` it adopts what was begun and begins what is due."""
        if not self._layer_options.overlap:
            return super().refresh_due()
        with self.refresher.adopting(self._blocks) as adopted:
            refreshed = set(super().refresh_due())
        count, renews = len(self._blocks), self.comm.renews
        at_once = {b for b in self._blocks if b.index in refreshed and b not in adopted}
        self.refresher.forget(at_once)
        begun = [b for b in self._blocks if renews(b.index) and self.refresher.begins(b, count) and b not in at_once]
        self.refresher.begin(begun, self._factorizes, self.comm.combines)
        return sorted(refreshed)

    def _factorizes(self, block: Block) -> bool:
        return not self.comm.combines or self.comm.refreshes(block.index)

    def renew(self, blocks: list[FactoredBlock]) -> Tensor:
        """Refresh and share some blocks outside of their schedule."""
        ok = super().renew(list(blocks))
        self.refresher.forget(blocks)  # what was begun is older
        return ok

    def _renew_loaded(self, blocks: list[FactoredBlock]) -> Tensor:
        return super().renew(list(blocks))  # what was begun is newer

    def factorised(self, blocks: Sequence[FactoredBlock], host_checks: bool) -> dict[_Key, Found]:
        """What a refresh of some blocks finds: of the matrices that it was begun with, else of those of now."""
        return cast("dict[_Key, Found]", self.refresher.find(blocks, host_checks, self.comm.combines))

    # ------------------------------------------------------------------ checkpoints and ends
    def translated(self, states: SavedStates, group_of: Mapping[nn.Parameter, Group]) -> SavedStates:
        """Return saved states in the form in which this optimizer stores them."""
        return {p: self._translated(p, group_of[p], theirs) for p, theirs in states.items()}

    def _translated(self, p: nn.Parameter, group: Group, theirs: Mapping[str, Any]) -> Mapping[str, Any]:
        block = self._block_of.get(p)
        if block is not None and block.owner is p:
            return block.factors.in_own_form(theirs, group)
        return factors.without_block(theirs, self._layer_options, self.entries if block is None else ())

    def rebuilt(self) -> None:
        """Act on a new plan, whose state has been allocated."""
        self.refresher.forget_jobs()  # parameters may have moved, or be of another dtype

    def loaded(self, rebuild: Callable[[], bool]) -> None:
        """Complete what a checkpoint may leave out; see the base class."""
        self.refresher.forget_jobs()
        super().loaded(rebuild)

    def detach(self) -> None:
        """See the base class."""
        try:
            super().detach()
        finally:
            self.refresher.close()

    def pending_bytes(self) -> int:
        """Return the bytes of statistics, and of refreshes in progress, that wait for a coming step."""
        return super().pending_bytes() + self.refresher.nbytes


class FactoredPreconditioner(OverlappingRefreshes):
    """The blocks of methods with factors A and G per layer, and an eigenbasis or an inverse of each."""

    #: The class of the blocks.
    block_type: ClassVar[type[FactoredBlock]]

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

    def sets_length(self, p: nn.Parameter) -> bool:
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
