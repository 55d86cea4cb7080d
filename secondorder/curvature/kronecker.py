"""Blocks with Kronecker factors, and their damping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from secondorder.capture.sites import Statistic
from secondorder.capture.statistics import averages
from secondorder.capture.statistics.kronecker import KroneckerSums, Sampler
from secondorder.capture.statistics.measurement import Estimate, Measured
from secondorder.curvature import factors
from secondorder.curvature.block import Block
from secondorder.curvature.extremes import Extremes, of_product
from secondorder.curvature.factors import FACTORS, KroneckerFactors
from secondorder.curvature.layer import Layer, LayerOptions
from secondorder.curvature.schema import FOUND, Schema, shaped, tensors
from secondorder.linalg import eigenbasis
from secondorder.options import FisherOptions
from secondorder.runtime import Runtime

#: What a refresh computes if the factors are inverted separately.
INVERSES: Schema = {"inverse_a": FOUND, "inverse_g": FOUND}


class FactoredBlock(Block):
    """A running estimate of A and G, an eigenbasis of each, and the damping of both.

    Args:
        layer: The layer.
        index: Position among the blocks of the optimizer.
        group: The parameter group of the owner.
        runtime: The values that all parts of the optimizer share.
        options: The options that are the same for all layers.
        fisher: Which Fisher is estimated.
    """

    def __init__(
        self,
        layer: Layer,
        index: int,
        group: dict[str, Any],
        runtime: Runtime,
        options: LayerOptions,
        fisher: FisherOptions,
    ) -> None:
        super().__init__(layer, index, group, runtime)
        self.options, self.fisher = options, fisher
        self.factors = KroneckerFactors(layer, options)

    # ------------------------------------------------------------------ what the state holds
    def factor_schema(self, group: Mapping[str, Any]) -> Schema:
        """Factors and their counters."""
        return self.factors.schema(group, max(self.runtime.step - 1, 0))

    def basis_schema(self, group: Mapping[str, Any]) -> Schema:
        """Eigenbases and eigenvalues; a diagonal factor has no basis."""
        likes, kept = dict[str, Tensor | int](), self.factors.kept_in(self.options.inv_dtype)
        for name, side in self.factors.sides(group):
            if not side.diagonal:
                likes[f"basis_{name}"] = self.layer.empty(side.shape, kept)
            likes[f"eigenvalues_{name}"] = self.layer.empty((*side.lead, side.n))
        return shaped(FACTORS, likes)

    def factor(self, side: str) -> Tensor:
        """A running factor as a matrix, or its diagonal, in the precision of products."""
        return self.factors.whole(self.state, self.group, side)

    def is_diagonal(self, side: str) -> bool:
        """Whether a factor is kept as its diagonal."""
        return self.factors.is_diagonal(self.state, self.group, side)

    def working(self, key: str) -> Tensor:
        """A tensor of the state in the precision of products; not copied if it is stored in that precision."""
        kept: Tensor = self.state[key]
        return kept.to(self.layer.precision)

    def basis(self, side: str) -> Tensor | None:
        """Eigenvectors of a factor in the precision of products; None stands for the identity."""
        return self.working(f"basis_{side}") if f"basis_{side}" in self.state else None

    # ------------------------------------------------------------------ statistics
    def new_sums(self) -> KroneckerSums:
        """Empty sums of a block."""
        group, sampler = self.group, None
        if group["factor_batch_size"] is not None or group["factor_positions"] is not None:
            generator = torch.Generator().manual_seed(self.runtime.seed(self.index))
            sampler = Sampler(group["factor_batch_size"], group["factor_positions"], generator)
        constant_g = self.fisher.fisher == "forward_only"
        found = tensors(self.factors.sums(group)).values()
        likes = [torch.empty_like(like, device=self.owner.device) for like in found]
        return KroneckerSums(self.adapter, group["approx"], likes[0], likes[1], sampler, constant_g)

    def gradient_scale(self, examples: int) -> Any:
        """Factor that turns sums over captured gradients into means over examples; may be a 0-dim tensor."""
        group = self.group
        if self.fisher.is_observed:  # the vectors have unit scale
            if group["loss_reduction"] == "sum":
                return 1.0 / examples
            terms = self.runtime.observed_terms.clamp(min=1)
            return 1.0 / (float(terms.numpy()) if terms.device.type == "cpu" else terms)
        return averages.gradient_scale(examples, group["loss_reduction"], group["loss_terms"])

    def measured_factors(self, sums: KroneckerSums, examples: int) -> dict[str, Estimate]:
        """The factors of a batch, scaled per datum."""
        a, g = sums.finish()
        scale: Any = self.gradient_scale(examples)
        if self.fisher.fisher == "forward_only":
            g, scale = _identity_like(g, self.is_diagonal("g")), 1.0
        observed = self.fisher.is_observed and self.group["loss_reduction"] == "mean"
        count = self.runtime.observed_terms.clamp(min=1) if observed else float(examples)
        return {"factor_a": Estimate(a, 1.0, sums.rows), "factor_g": Estimate(g, scale, count)}

    def fold_factors(self, measured: Measured, gate: Tensor | None) -> Tensor:
        """Fold the factors of a batch into the running ones; returns whether they were finite."""
        group, state = self.group, self.state
        a, g = measured.parts["factor_a"], measured.parts["factor_g"]
        finite = averages.all_finite([a.total, g.total])
        ok = finite if gate is None else finite & gate
        (kept_a, total_a), (kept_g, total_g) = (
            self.factors.as_kept(state, side, x.total) for side, x in (("a", a), ("g", g))
        )
        running, totals, weight = [kept_a, kept_g], [total_a, total_g], state["factor_weight"]
        decay = self.decay(group["factor_decay"], state["factor_updates"], "factor_step")
        batch = self.batch_weight(measured.examples)
        scales = [cast(float, part.scale) for part in (a, g)]
        averages.ratio_ema_(running, weight, totals, scales, batch, decay, ok)
        return finite

    def decay(self, decay: float, updates: int, last: str) -> float:
        """β of the next update of a running estimate; ``last`` is the state key with the step of the previous one."""
        group = self.group
        if updates < group["burnin_steps"]:
            return 1.0
        return float(decay ** (self.runtime.step - self.state[last])) if group["decay_per_step"] else decay

    def note_step(self, last: str) -> None:
        """Store the step of an update if the decay is counted per step."""
        if self.group["decay_per_step"]:
            self.state[last] = self.runtime.step

    def batch_weight(self, examples: int) -> float:
        """Weight W of a batch in the running estimates."""
        return float(examples) if self.group["weighting"] == "samples" else 1.0

    # ------------------------------------------------------------------ damping
    def damping_of(self, mean_value: Tensor) -> Tensor:
        """λ of a block whose mean eigenvalue is ``mean_value [...]``."""
        damping, group = self.tikhonov(mean_value), self.group
        return damping + group["weight_decay"] if group["weight_decay_in_curvature"] else damping

    def tikhonov(self, mean_value: Tensor) -> Tensor:
        """λ according to the options, without weight decay."""
        if self.adapter.is_exact:
            # Relative to the steepest unit, so that a unit that hardly matters does not take the longest step.
            mean_value = mean_value.amax().expand_as(mean_value)
        return averages.effective_damping(self.group["damping"], self.group["damping_mode"], mean_value)

    def damping(self) -> Tensor:
        """λ of a block in its quadratic model."""
        means = [factors.mean_diagonal(self.factor(side), self.is_diagonal(side)) for side in "ag"]
        return self.tikhonov(means[0] * means[1])

    # ------------------------------------------------------------------ refresh
    def to_factorise(self) -> tuple[Tensor, Tensor]:
        """The matrices (or diagonals) that a refresh would factorize now."""
        return self.factor("a"), self.factor("g")

    def adopt_tensor(self, key: str, found: Tensor, good: Tensor) -> None:
        """Copy a result into the state where ``good`` is True."""
        current: Tensor = self.state[key]
        current.copy_(torch.where(good, found.reshape(current.shape), current))

    def extremes_of_product(self) -> Extremes | None:
        """λ of a block and the extreme eigenvalues of ``G ⊗ A + λI``; None if its eigenvalues are on other ranks."""
        state = self.state
        if "eigenvalues_a" not in state or "eigenvalues_g" not in state:
            return None
        values_a, values_g = state["eigenvalues_a"], state["eigenvalues_g"]
        return of_product(values_a, values_g, self.damping_of(values_a.mean(-1) * values_g.mean(-1)))


class KroneckerBlock(FactoredBlock):
    """``F = G ⊗ A``, inverted by eigenvalues or factor by factor."""

    # ------------------------------------------------------------------ estimate
    def schema(self, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        """Entries for the factors, for what is derived from them, and for the counters."""
        found = self.factor_schema(group)
        if group["inverse_method"] == "eigen":
            return found | self.basis_schema(group)
        dense = self.factors.dense_keys("inverse", group)
        if not dense:
            return found
        kept = self.factors.kept_in(self.options.inv_dtype)
        likes = {f"inverse_{name}": self.layer.empty(side.shape, kept) for name, side in self.factors.sides(group)}
        return found | shaped(INVERSES, likes, dense)

    def statistic(self) -> KroneckerSums:
        """Empty sums for the statistics of a batch."""
        return self.new_sums()

    def sums(self) -> Schema:
        """Entries for both factors, which every captured batch contributes to."""
        return self.factors.sums(self.group)

    def measure(self, statistic: Statistic, examples: int) -> Measured:
        """The factors of this rank's batch, scaled per datum."""
        return Measured(self.measured_factors(cast(KroneckerSums, statistic), examples), examples)

    def fold(self, measured: Measured, gate: Tensor | None) -> Tensor:
        """Fold the factors of the batch into the running ones."""
        return self.fold_factors(measured, gate)

    # ------------------------------------------------------------------ refresh
    @property
    def is_entrywise(self) -> bool:
        """Whether both factors are diagonal, so that the damped product is diagonal and is inverted entry by entry."""
        return self.is_diagonal("a") and self.is_diagonal("g")

    def to_factorise(self) -> tuple[Tensor, Tensor]:
        """The factors, including their damping if Cholesky is used."""
        return self.damped_factors() if self.group["inverse_method"] == "cholesky" else super().to_factorise()

    def damped_factors(self) -> tuple[Tensor, Tensor]:
        """``A + π√λ I`` and ``G + √λ/π I``."""
        a, g = self.factor("a"), self.factor("g")
        flat_a, flat_g = self.is_diagonal("a"), self.is_diagonal("g")
        mean_a, mean_g = factors.mean_diagonal(a, flat_a), factors.mean_diagonal(g, flat_g)
        damping = self.damping_of(mean_a * mean_g)
        add_a, add_g = (0 * damping, damping) if self.adapter.is_exact else averages.pi_damping(mean_a, mean_g, damping)
        return averages.add_to_diagonal(a, add_a, flat_a), averages.add_to_diagonal(g, add_g, flat_g)

    def adopt(self, found: Mapping[str, Sequence[Tensor]], good: Tensor) -> None:
        """Adopt the inverses, or the eigenvalues and bases, that a refresh has found for each side if they are good."""
        for side, tensors_of_side in found.items():
            if self.group["inverse_method"] == "cholesky":
                self.adopt_tensor(f"inverse_{side}", tensors_of_side[0], good)
                continue
            for key, tensor in zip(("eigenvalues", "basis"), tensors_of_side, strict=False):
                self.adopt_tensor(f"{key}_{side}", tensor, good)

    # ------------------------------------------------------------------ use
    def precondition(self, gradient: Tensor) -> Tensor:
        """``(G ⊗ A + λI)^(-p) vec(∇)``, or its factored form."""
        state, group = self.state, self.group
        if group["inverse_method"] == "cholesky":
            if self.is_entrywise:
                values = self.factor("g")[..., :, None] * self.factor("a")[..., None, :]
                return gradient / (values + self.damping_of(values.mean((-2, -1)))[..., None, None])
            inverses = self.working("inverse_a"), self.working("inverse_g")
            return averages.solve_factored(gradient, *inverses, self.runtime.workspace)
        values_a, values_g = state["eigenvalues_a"], state["eigenvalues_g"]
        damping: Tensor | None = self.damping_of(values_a.mean(-1) * values_g.mean(-1))
        if group["damping_split"] == "pi" and not self.adapter.is_exact:
            values_a, values_g = averages.split_eigenvalues(values_a, values_g, cast(Tensor, damping))
            damping = None
        values = values_g[..., :, None] * values_a[..., None, :]
        bases = self.basis("a"), self.basis("g")
        return eigenbasis.precondition(gradient, *bases, values, damping, group["power"], self.runtime.workspace)

    def extremes(self) -> Extremes | None:
        """λ of a block and the extreme eigenvalues of the inverted matrix; only λ if the inverse is factored."""
        state, split = self.state, self.group["damping_split"] == "pi" and not self.adapter.is_exact
        if self.group["inverse_method"] == "eigen":
            found = self.extremes_of_product()
            if found is None or not split:
                return found
            values = averages.split_eigenvalues(state["eigenvalues_a"], state["eigenvalues_g"], found.damping)
            (small_a, large_a), (small_g, large_g) = (v.aminmax(dim=-1) for v in values)
            return Extremes(found.damping, small_a * small_g, large_a * large_g, found.undamped)
        if not self.factors.are_in(self.state):
            return None
        if self.is_entrywise:
            a, g = self.factor("a"), self.factor("g")
            return of_product(a, g, self.damping_of(a.mean(-1) * g.mean(-1)))
        means = [factors.mean_diagonal(self.factor(side), self.is_diagonal(side)) for side in "ag"]
        return Extremes(self.damping_of(means[0] * means[1]))

    def bounds(self) -> Extremes | None:
        """λ of a block, and upper bounds of the largest eigenvalues; never waits for the device."""
        found = self.extremes()
        if found is None or found.largest is not None:
            return found
        sides = [(self.factor(side), self.is_diagonal(side)) for side in "ag"]
        mean_a, mean_g = (factors.mean_diagonal(*side) for side in sides)
        add_a, add_g = averages.pi_damping(mean_a, mean_g, found.damping)
        # A Frobenius norm is at least the largest eigenvalue.
        a, g = (x.abs().amax(-1) if diagonal else torch.linalg.matrix_norm(x) for x, diagonal in sides)
        return Extremes(found.damping, largest=(a + add_a) * (g + add_g), undamped=a * g)

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
