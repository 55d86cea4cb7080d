"""Blocks with Kronecker factors: what they estimate, and the damping that goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from secondorder.capture.statistics import averages
from secondorder.capture.statistics.kronecker import KroneckerSums, Sampler
from secondorder.capture.statistics.measurement import Estimate, Measured
from secondorder.curvature import factors
from secondorder.curvature.block import Block
from secondorder.curvature.extremes import Extremes, of_product
from secondorder.curvature.factors import FACTORS, KroneckerFactors
from secondorder.curvature.layer import Layer, LayerOptions
from secondorder.curvature.schema import Schema, shaped, tensors
from secondorder.options import FisherOptions
from secondorder.runtime import Runtime


class FactoredBlock(Block):
    """A running estimate of A and G, an eigenbasis of each, and the damping of both.

    Args:
        layer: The layer.
        index: Position among the blocks of the optimizer.
        group: The parameter group of the owner.
        runtime: What all parts of the optimizer share.
        options: What is chosen for all layers.
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
        """A tensor of the state in the precision of products: itself where it is kept in it."""
        kept: Tensor = self.state[key]
        return kept.to(self.layer.precision)

    def basis(self, side: str) -> Tensor | None:
        """Eigenvectors of a factor in the precision of products, None for the identity."""
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
        """Factor from sums over captured gradients to means over per-example ones; a 0-dim tensor on a device."""
        group = self.group
        if self.fisher.is_observed:  # vectors are of unit scale
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
        """β of the coming update of a running estimate, ``last`` being where the step of the last one is kept."""
        group = self.group
        if updates < group["burnin_steps"]:
            return 1.0
        return float(decay ** (self.runtime.step - self.state[last])) if group["decay_per_step"] else decay

    def note_step(self, last: str) -> None:
        """Keep the step of an update, where decay counts steps."""
        if self.group["decay_per_step"]:
            self.state[last] = self.runtime.step

    def batch_weight(self, examples: int) -> float:
        """W of a batch in the running estimates."""
        return float(examples) if self.group["weighting"] == "samples" else 1.0

    # ------------------------------------------------------------------ damping
    def damping_of(self, mean_value: Tensor) -> Tensor:
        """λ of a block whose mean eigenvalue is ``mean_value [...]``."""
        damping, group = self.tikhonov(mean_value), self.group
        return damping + group["weight_decay"] if group["weight_decay_in_curvature"] else damping

    def tikhonov(self, mean_value: Tensor) -> Tensor:
        """λ as the options give it, without weight decay."""
        if self.adapter.is_exact:
            # Relative to the steepest of the units: one that hardly matters must not take the longest step.
            mean_value = mean_value.amax().expand_as(mean_value)
        return averages.effective_damping(self.group["damping"], self.group["damping_mode"], mean_value)

    def damping(self) -> Tensor:
        """λ of a block as the damping of its quadratic model."""
        means = [factors.mean_diagonal(self.factor(side), self.is_diagonal(side)) for side in "ag"]
        return self.tikhonov(means[0] * means[1])

    def adopt_tensor(self, key: str, found: Tensor, good: Tensor) -> None:
        """Take a result over if it is good."""
        current: Tensor = self.state[key]
        current.copy_(torch.where(good, found.reshape(current.shape), current))

    def extremes(self) -> Extremes | None:
        """λ of a block and the extreme eigenvalues of ``G ⊗ A + λI``; None if its eigenvalues are on other ranks."""
        state = self.state
        if "eigenvalues_a" not in state or "eigenvalues_g" not in state:
            return None
        values_a, values_g = state["eigenvalues_a"], state["eigenvalues_g"]
        return of_product(values_a, values_g, self.damping_of(values_a.mean(-1) * values_g.mean(-1)))


def _identity_like(factor: Tensor, diagonal: bool) -> Tensor:
    if diagonal:
        return torch.ones_like(factor)
    return torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor)
