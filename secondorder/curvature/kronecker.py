"""Blocks with Kronecker factors, and their damping."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from secondorder.capture.sites import Statistic
from secondorder.capture.statistics import averages
from secondorder.capture.statistics.kronecker import KroneckerSums, Sampler
from secondorder.capture.statistics.measurement import Estimate, Measured
from secondorder.curvature import factors
from secondorder.curvature.block import ESTIMATE_ALONE, Due, EstimatedBlock
from secondorder.curvature.extremes import Extremes
from secondorder.curvature.factorization import Task
from secondorder.curvature.factors import STORAGES, KroneckerFactors, Storage
from secondorder.curvature.inverse import Cholesky, Eigen, Entrywise, Inverse
from secondorder.curvature.layer import LayerOptions
from secondorder.curvature.schema import Schema, tensors
from secondorder.curvature.truncation import Truncated


class FactoredBlock(EstimatedBlock):
    """Base class of blocks with running estimates of A and G, their eigenbases, and damping."""

    #: How the state stores dense factors. If it is None, the option ``packed`` decides.
    storage: ClassVar[Storage | None] = None

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.factors = KroneckerFactors(
            self.layer, self.options, self.storage or STORAGES["packed" if self.options.storage.packed else "dense"]
        )
        self.eigen = Eigen(self.factors)

    # ------------------------------------------------------------------ what the state holds
    def factor_schema(self, group: Mapping[str, Any]) -> Schema:
        """Factors and their counters."""
        return self.factors.schema(group, max(self.runtime.step - 1, 0))

    def factor(self, side: str) -> Tensor:
        """A running factor as a matrix, or its diagonal, in the precision of products."""
        return self.factors.whole(self.state, self.group, side)

    def is_diagonal(self, side: str) -> bool:
        """Whether a factor is kept as its diagonal."""
        return self.factors.is_diagonal(self.state, self.group, side)

    def basis(self, side: str) -> Tensor | None:
        """Eigenvectors of a factor in the precision of products; None means the identity."""
        return self.eigen.basis(self.state, side)

    # ------------------------------------------------------------------ statistics
    def new_sums(self) -> KroneckerSums:
        """Empty sums of a block."""
        group, sampler = self.group, None
        if group["factor_batch_size"] is not None or group["factor_positions"] is not None:
            generator = torch.Generator().manual_seed(self.runtime.seed(self.index))
            sampler = Sampler(group["factor_batch_size"], group["factor_positions"], generator)
        constant_g = self.fisher.kind == "forward_only"
        found = tensors(self.factors.sums(group)).values()  # empty_like of a meta tensor takes seven times as long
        likes = [torch.empty(like.shape, dtype=like.dtype, device=self.owner.device) for like in found]
        return KroneckerSums(self.adapter, group["approx"], likes[0], likes[1], sampler, constant_g)

    def measured_factors(self, sums: KroneckerSums, examples: int) -> dict[str, Estimate]:
        """The factors of a batch, scaled per datum."""
        a, g = sums.finish()
        scale: Any = self.gradient_scale(examples)
        if self.fisher.kind == "forward_only":
            g, scale = _identity_like(g, self.is_diagonal("g")), 1.0
        return {"factor_a": Estimate(a, 1.0, sums.rows), "factor_g": Estimate(g, scale, self.data(examples))}

    def fold_factors(self, measured: Measured, gate: Tensor | None) -> Tensor:
        """Update the running factors with those of a batch, and return whether they were finite."""
        group, state = self.group, self.state
        a, g = measured.parts["factor_a"], measured.parts["factor_g"]
        finite = averages.all_finite([a.total, g.total])
        ok = finite if gate is None else finite & gate
        weight = self.batch_weight(measured.examples)
        self.factors.fold(state, group, {"a": a, "g": g}, weight, factor_decay(self), ok)
        return finite

    def decay(self, decay: float, updates: int, last: str) -> float:
        """β of the next update of a running estimate. ``last`` is the state key with the step of the last update."""
        group = self.group
        if updates < group["burnin_steps"]:
            return 1.0
        return float(decay ** (self.runtime.step - self.state[last])) if group["decay_per_step"] else decay

    def note_step(self, last: str) -> None:
        """Store the step of an update if the decay is counted per step."""
        if self.group["decay_per_step"]:
            self.state[last] = self.runtime.step

    def count_factors(self) -> None:
        """Count an update of the factors, on whichever rank it took place."""
        self.state["factor_updates"] += 1
        self.note_step("factor_step")

    def batch_weight(self, examples: int) -> float:
        """Weight W of a batch in the running estimates."""
        return float(examples) if self.group["weighting"] == "samples" else 1.0

    # ------------------------------------------------------------------ damping
    def damping_of(self, mean_value: Tensor) -> Tensor:
        """λ of a block whose mean eigenvalue is ``mean_value [...]``."""
        return self.factors.damping_of(mean_value, self.group)

    def damping(self) -> Tensor:
        """λ of a block in its quadratic model."""
        mean_a, mean_g = self.factors.means(self.state, self.group)
        return self.factors.tikhonov(mean_a * mean_g, self.group)

    # ------------------------------------------------------------------ refresh
    @property
    def inverse(self) -> Inverse:
        """The factorization that a refresh computes."""
        return self.eigen

    def tasks(self, begun: bool = False) -> dict[str, Task]:
        """Return the matrices that a refresh factorizes for each side; see the base class."""
        return self.inverse.tasks(self.state, self.group, begun)

    def adopt(self, found: Mapping[str, Sequence[Tensor]], good: Tensor) -> None:
        """Adopt the results of a refresh for each side where ``good`` is True."""
        self.inverse.adopt(self.state, found, good)

    @property
    def refresh_size(self) -> int:
        """Number of elements of both factors."""
        return sum(math.prod(side.shape) for _, side in self.factors.sides(self.group))

    # ------------------------------------------------------------------ reading and loading
    def described(self) -> tuple[str, str]:
        """The text that ``describe()`` adds to the treatment of the layer, and the sizes of its factors."""
        lead = f"{self.adapter.groups}×" if self.adapter.groups > 1 else ""
        rank = self.group.get("inverse_rank")
        forms = list(self.factors.sides(self.group))
        kept = [f" ({rank} kept)" if factors.is_truncated(form, rank) else "" for _, form in forms]
        sizes = [f"diagonal {form.n}" if self.is_diagonal(name) else str(form.n) for name, form in forms]
        return "", lead + ", ".join(size + few for size, few in zip(sizes, kept, strict=True))

    def translated(self, theirs: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert the factors of a loaded state to the form in which this optimizer stores them."""
        return self.factors.in_own_form(theirs, group)

    @classmethod
    def without_block(
        cls, theirs: Mapping[str, Any], options: LayerOptions, known: Container[str]
    ) -> Mapping[str, Any]:
        """Convert the loaded state of a parameter that owns no block."""
        return factors.without_block(theirs, options, known)


def factor_decay(block: FactoredBlock) -> float:
    """Return β of the next update of the factors."""
    return block.decay(block.group["factor_decay"], block.state["factor_updates"], "factor_step")


class KroneckerBlock(FactoredBlock):
    """``F = G ⊗ A``, inverted by eigenvalues or factor by factor."""

    #: The last inverse, which every step asks for, with the options that it is for.
    _last: tuple[tuple[str, int | None, int | None], Inverse] | None = None

    # ------------------------------------------------------------------ estimate
    def schema(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Schema:
        """Entries for the factors, for tensors derived from them, and for the counters."""
        return self.factor_schema(group) | self.inverse_for(group).schema(group)

    def statistic(self, due: Due = ESTIMATE_ALONE) -> KroneckerSums:
        """Empty sums for the statistics of a batch."""
        return self.new_sums()

    def sums(self, due: Due = ESTIMATE_ALONE) -> Schema:
        """Entries for both factors, to which every captured batch contributes."""
        return self.factors.sums(self.group)

    def measure(self, statistic: Statistic, examples: int) -> Measured:
        """The factors of this rank's batch, scaled per datum."""
        return Measured(self.measured_factors(cast(KroneckerSums, statistic), examples), examples)

    def fold(self, measured: Measured, gate: Tensor | None) -> Tensor:
        """Update the running factors with those of the batch."""
        return self.fold_factors(measured, gate) if measured.parts else torch.tensor(True)

    def count_update(self, measured: Measured, due: Due) -> None:
        """Count an update of the factors, on whichever rank it took place."""
        self.count_factors()

    # ------------------------------------------------------------------ inverse
    def inverse_for(self, group: Mapping[str, Any]) -> Inverse:
        """The inverse of a block with these options. Two diagonal factors have a diagonal product."""
        options = group["inverse_method"], group.get("inverse_rank"), group["max_factor_dim"]
        if self._last is None or self._last[0] != options:
            self._last = options, self._new_inverse(*options)
        return self._last[1]

    def _new_inverse(self, method: str, rank: int | None, max_dim: int | None) -> Inverse:
        sides = factors.sides(self.adapter, max_dim)
        if any(factors.is_truncated(side, rank) for side in sides):
            return Truncated(self.factors)
        if method == "eigen":
            return self.eigen
        return (Entrywise if all(side.diagonal for side in sides) else Cholesky)(self.factors)

    @property
    def inverse(self) -> Inverse:
        """The inverse of the block."""
        return self.inverse_for(self.group)

    @property
    def uses_estimate(self) -> bool:
        """Whether the factors themselves precondition, which is the case if both are diagonal."""
        inverse = self.inverse
        if not isinstance(inverse, Eigen):
            _ = self.state  # state dicts list the owners of such blocks first
        return inverse.uses_factors

    # ------------------------------------------------------------------ use
    def precondition(self, gradient: Tensor) -> Tensor:
        """``(G ⊗ A + λI)^(-p) vec(∇)``, or its factored form."""
        return self.inverse.apply(self.state, self.group, gradient, self.runtime.workspace)

    def extremes(self) -> Extremes | None:
        """λ of a block and the extreme eigenvalues of the inverted matrix; only λ if the inverse is factored."""
        return self.inverse.extremes(self.state, self.group)

    def bounds(self) -> Extremes | None:
        """λ of a block, and upper bounds of the largest eigenvalues; never waits for the device."""
        return self.inverse.bounds(self.state, self.group)

    def product(self, matrix: Tensor) -> Tensor:
        """``G X A`` of a matrix ``X [(Γ,) n_g, n_a]``, undamped."""
        return factors.times(factors.times(matrix, self.factor("g"), left=True), self.factor("a"), left=False)

    def dense(self) -> Tensor:
        """``G ⊗ A``; block-diagonal over the groups of a grouped convolution."""
        a, g = (factors.as_dense(self.factor(side), self.is_diagonal(side)) for side in "ag")
        return self.adapter.natural_order(factors.kron(a, g))


def _identity_like(factor: Tensor, diagonal: bool) -> Tensor:
    if diagonal:
        return torch.ones_like(factor)
    return torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor)
