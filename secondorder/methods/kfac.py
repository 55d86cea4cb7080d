r"""K-FAC: Kronecker-factored approximate curvature.

For a layer with weight ``[W | b]``, input ``a`` (1 appended for the bias) and gradient ``g`` at its output, the
Fisher's block is approximated by ``F = G ⊗ A`` with ``A = E[a aᵀ]`` and ``G = E[g gᵀ]``, and the gradient matrix ∇
becomes

.. math::
    V = Q_G \left[ (Q_G^\top \nabla Q_A) \oslash (s_G s_A^\top + \lambda) \right] Q_A^\top
    \qquad\text{or}\qquad V = (G + \tfrac{\sqrt\lambda}{\pi} I)^{-1} \nabla (A + \pi\sqrt\lambda I)^{-1}.

=====================  ==========================================
``damping``            λ
``factor_decay``       β of the running factors, weight of the old
``kl_clip``            κ of ``ν = min(1, √(κ / |Σ η² ⟨V, ∇⟩|))``
=====================  ==========================================

Martens & Grosse 2015 (arXiv 1503.05671); convolutions: Grosse & Martens 2016 (1602.01407); positions shared within an
example: Eschenhagen et al. 2023 (2311.00636); ``ν``: Pauloski et al. 2020 (2007.00784).
"""

# bridge: verbs that take blocks with factors
# mypy: disable-error-code="override"

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder import options
from secondorder.capture.fisher.likelihood import Likelihood
from secondorder.capture.sites import Statistic
from secondorder.capture.statistics import averages
from secondorder.capture.statistics.kronecker import KroneckerSums
from secondorder.capture.statistics.measurement import Measured
from secondorder.comm import CommStrategy
from secondorder.curvature import factors
from secondorder.curvature.extremes import Extremes, of_product
from secondorder.curvature.factorization import joint_ok
from secondorder.curvature.kronecker import FactoredBlock
from secondorder.curvature.kronecker_factors import FactoredOptimizer
from secondorder.curvature.layer import SkipRule
from secondorder.curvature.schema import FOUND, Schema, shaped
from secondorder.lifecycle import Group
from secondorder.linalg import dense, eigenbasis
from secondorder.methods import documentation


@options.complete_docstring(documentation.OPTIMIZER, documentation.LAYERS, documentation.FACTORS)
class KFAC(FactoredOptimizer):
    """K-FAC on every layer type that has an adapter; every other parameter follows the fallback rule.

    Args:
        damping_split: ``"exact"`` adds λ to the eigenvalues of ``G ⊗ A``; ``"pi"`` splits it between the two factors.
            If None, it is ``"exact"`` for ``inverse_method="eigen"`` and ``"pi"`` for ``"cholesky"``.
        inverse_method: ``"eigen"``, with which a change of λ takes effect at once, or ``"cholesky"``, with which it
            takes effect at the next refresh. ``"cholesky"`` needs half the work per step, and its refreshes are many
            times cheaper.
        loss_terms: Number of scalar loss terms per example (such as tokens) over which a mean runs; :meth:`observe`
            counts them itself.

    Raises:
        ValueError: For a value out of range, a pattern that matches nothing, or without a module.
        TypeError: For a value of a wrong kind.
        RuntimeError: If the ranks of a process group do not all construct it; ``ValueError`` on all if they differ.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.KFAC(model, lr=0.1)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    checks: ClassVar[dict[str, options.Check]] = {
        **FactoredOptimizer.checks,
        "damping_split": options.choice(None, "exact", "pi"),
        "inverse_method": options.choice("eigen", "cholesky"),
    }
    catalog: ClassVar[Schema] = {**FactoredOptimizer.catalog, "inverse_a": FOUND, "inverse_g": FOUND}
    allocating: ClassVar[tuple[str, ...]] = ("max_factor_dim", "decay_per_step", "inverse_method")

    def __init__(
        self,
        params: ParamsT | nn.Module | Sequence[nn.Module],
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        *,
        module: nn.Module | Sequence[nn.Module] | None = None,
        comm: CommStrategy | None = None,
        damping: float | None = None,
        damping_mode: str | None = None,
        damping_split: str | None = None,
        inverse_method: str = "eigen",
        factor_decay: float = 0.95,
        factor_update_steps: int | None = None,
        inv_update_steps: int | None = None,
        factor_dtype: torch.dtype = torch.float32,
        inv_dtype: torch.dtype = torch.float32,
        factor_storage: str = "dense",
        stagger: bool = False,
        overlap: bool = False,
        refresh_warmup: bool | None = None,
        approx: str = "expand",
        fisher: str = "empirical",
        fisher_samples: int = 1,
        loss_reduction: str = "mean",
        loss_terms: float = 1,
        batch_dim: int = 0,
        batch_input: str | Callable[..., int] | None = None,
        skip_layers: Sequence[SkipRule] | SkipRule = (),
        norm_curvature: str = "unit",
        tied: str | None = "head",
        max_factor_dim: int | str | None = "auto",
        weighting: str = "samples",
        burnin_steps: int = 0,
        decay_per_step: bool = False,
        factor_batch_size: int | None = None,
        factor_positions: int | None = None,
        weight_decay_in_curvature: bool = False,
        power: float = 1.0,
        orthogonalize: bool = False,
        orthogonal_dtype: torch.dtype = torch.float32,
        kl_clip: float | None = 1e-3,
        adaptive_damping: bool = False,
        damping_interval: int = 5,
        min_damping: float = 1e-8,
        max_damping: float = math.inf,
        include_damping_in_model: bool = False,
        reject_steps: bool = False,
        quadratic_model: bool = False,
        likelihood: str | Likelihood | None = None,
        calibrate_damping: bool = False,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fallback: str | None = None,
        fallback_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fallback_betas: tuple[float, float] | None = None,
        fallback_eps: float | None = None,
        inner: str = "sgd",
        graft: str | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        grad_scaler: Any = None,
        checkpoint_curvature: str = "all",
        max_failures: int = 10,
        deterministic_seed: int = 0,
    ) -> None:
        given = locals()
        super().__init__(given)

    # ------------------------------------------------------------------ the verbs
    def schema(self, block: FactoredBlock, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        """Factors, what is derived from them, and counters."""
        found = block.factor_schema(group)
        if group["inverse_method"] == "eigen":
            return found | block.basis_schema(group)
        dense = block.factors.dense_keys("inverse", group)
        if not dense:
            return found
        kept = block.factors.kept_in(self._layer_options.inv_dtype)
        likes = {f"inverse_{name}": block.layer.empty(side.shape, kept) for name, side in block.factors.sides(group)}
        return found | shaped(self.catalog, likes, dense)

    def new_statistic(self, block: FactoredBlock, group: Group) -> KroneckerSums:
        """Empty sums of a block."""
        return block.new_sums()

    def sums(self, block: FactoredBlock) -> Schema:
        """Both factors, at every step that captures."""
        return block.factors.sums(block.group)

    def measure(self, block: FactoredBlock, statistic: Statistic, examples: int) -> Measured:
        """The factors of this rank's batch, scaled per datum."""
        return Measured(block.measured_factors(cast(KroneckerSums, statistic), examples), examples)

    def fold(self, block: FactoredBlock, measured: Measured, gate: Tensor | None) -> Tensor:
        """Fold the factors of the batch into the running ones."""
        return block.fold_factors(measured, gate)

    def _needs_estimate_everywhere(self, block: FactoredBlock, group: Mapping[str, Any]) -> bool:
        # Both factors diagonal: there are no inverses, and the factors themselves precondition.
        return group["inverse_method"] == "cholesky" and self._is_entrywise(block)

    def refresh_some(self, blocks: Sequence[FactoredBlock], host_checks: bool) -> Tensor:
        """Factorise the factors of some blocks; one that fails keeps its last good result."""
        ok: dict[FactoredBlock, Tensor] = {}
        for method, work in (("eigen", self.refresh_bases), ("cholesky", self._invert)):
            chosen = [b for b in blocks if b.group["inverse_method"] == method]
            if chosen:
                ok.update(zip(chosen, work(chosen, host_checks).unbind(), strict=True))
        return torch.stack([ok[b] for b in blocks])

    def precondition(self, block: FactoredBlock, gradient: Tensor) -> Tensor:
        """``(G ⊗ A + λI)^(-p) vec(∇)``, or its factored form."""
        state, group = self.state[block.owner], block.group
        if group["inverse_method"] == "cholesky":
            if self._is_entrywise(block):
                values = block.factor("g")[..., :, None] * block.factor("a")[..., None, :]
                return gradient / (values + block.damping_of(values.mean((-2, -1)))[..., None, None])
            inverses = block.working("inverse_a"), block.working("inverse_g")
            return averages.solve_factored(gradient, *inverses, self._runtime.workspace)
        values_a, values_g = state["eigenvalues_a"], state["eigenvalues_g"]
        damping: Tensor | None = block.damping_of(values_a.mean(-1) * values_g.mean(-1))
        if group["damping_split"] == "pi" and not block.adapter.is_exact:
            values_a, values_g = averages.split_eigenvalues(values_a, values_g, cast(Tensor, damping))
            damping = None
        values = values_g[..., :, None] * values_a[..., None, :]
        bases = block.basis("a"), block.basis("g")
        return eigenbasis.precondition(gradient, *bases, values, damping, group["power"], self._runtime.workspace)

    def block_curvature(self, block: FactoredBlock) -> Tensor:
        """``G ⊗ A``; block-diagonal over the groups of a grouped convolution."""
        a, g = (factors.as_dense(block.factor(side), block.is_diagonal(side)) for side in "ag")
        return block.adapter.natural_order(factors.kron(a, g))

    def extremes(self, block: FactoredBlock) -> Extremes | None:
        """λ of a block and the extreme eigenvalues of what is inverted; of factored inverses λ alone."""
        state, split = self.state[block.owner], block.group["damping_split"] == "pi" and not block.adapter.is_exact
        if block.group["inverse_method"] == "eigen":
            found = super().extremes(block)
            if found is None or not split:
                return found
            values = averages.split_eigenvalues(state["eigenvalues_a"], state["eigenvalues_g"], found.damping)
            (small_a, large_a), (small_g, large_g) = (v.aminmax(dim=-1) for v in values)
            return Extremes(found.damping, small_a * small_g, large_a * large_g, found.undamped)
        if not block.factors.are_in(block.state):
            return None
        if self._is_entrywise(block):
            a, g = block.factor("a"), block.factor("g")
            return of_product(a, g, block.damping_of(a.mean(-1) * g.mean(-1)))
        means = [factors.mean_diagonal(block.factor(side), block.is_diagonal(side)) for side in "ag"]
        return Extremes(block.damping_of(means[0] * means[1]))

    def bounds(self, block: FactoredBlock) -> Extremes | None:
        """λ of a block, and upper bounds of the largest eigenvalues; never waits for the device."""
        found = self.extremes(block)
        if found is None or found.largest is not None:
            return found
        sides = [(block.factor(side), block.is_diagonal(side)) for side in "ag"]
        mean_a, mean_g = (factors.mean_diagonal(*side) for side in sides)
        add_a, add_g = averages.pi_damping(mean_a, mean_g, found.damping)
        # A Frobenius norm is at least the largest eigenvalue.
        a, g = (x.abs().amax(-1) if diagonal else torch.linalg.matrix_norm(x) for x, diagonal in sides)
        return Extremes(found.damping, largest=(a + add_a) * (g + add_g), undamped=a * g)

    def curvature_product(self, block: FactoredBlock, matrix: Tensor) -> Tensor:
        """``G X A`` of a matrix ``X [(Γ,) n_g, n_a]``, undamped."""
        return factors.times(factors.times(matrix, block.factor("g"), left=True), block.factor("a"), left=False)

    def reason_against_roles(self) -> str | None:
        """Factors and their inverses may be found by other ranks; what is judged by trial steps may not."""
        if self._layer_options.overlap:
            return "inverses are found beside training there anyway. Drop overlap=True"
        chosen = self._adaptation
        options_on = [*chosen.needing_loss, *(["quadratic_model"] if chosen.quadratic_model else [])]
        if options_on:
            return (
                f"{', '.join(options_on)} judge a step by a quadratic model of the parameters as they are, and the "
                "curvature belongs to those of two periods ago. Drop them, or use comm=MemOpt()"
            )
        if any(group["checkpoint_curvature"] == "factors" for group in self.param_groups):
            return "checkpoint_curvature='factors' needs factors and inverses on one rank. Use 'all' or 'none'"
        return None

    # ------------------------------------------------------------------ refresh in detail
    def _invert(self, blocks: Sequence[FactoredBlock], host_checks: bool) -> Tensor:
        """Invert the damped factors of some blocks; one that fails keeps its last good result."""
        found = self.factorised(blocks, host_checks)
        ok = joint_ok(found, blocks)
        for block, good in zip(blocks, ok.unbind(), strict=True):
            for side in "" if self._is_entrywise(block) else "ag":
                inverse = found[block, side][0][0]
                if self.comm.combines and not block.is_diagonal(side):
                    inverse = dense.mirror_upper_(inverse.clone())  # others get a triangle, and all must have the same
                block.adopt_tensor(f"inverse_{side}", inverse, good)
        return ok

    def to_factorise(self, block: FactoredBlock) -> tuple[Tensor, Tensor]:
        """The factors, for Cholesky with their damping."""
        return self._damped_factors(block) if self.way_of(block) == "cholesky" else super().to_factorise(block)

    def _is_entrywise(self, block: FactoredBlock) -> bool:
        """Whether both factors are diagonal: then the damped product is too, and needs no inverse of its factors."""
        return block.is_diagonal("a") and block.is_diagonal("g")

    def _damped_factors(self, block: FactoredBlock) -> tuple[Tensor, Tensor]:
        """``A + π√λ I`` and ``G + √λ/π I``."""
        a, g = block.factor("a"), block.factor("g")
        flat_a, flat_g = block.is_diagonal("a"), block.is_diagonal("g")
        mean_a, mean_g = factors.mean_diagonal(a, flat_a), factors.mean_diagonal(g, flat_g)
        damping = block.damping_of(mean_a * mean_g)
        add_a, add_g = (
            (0 * damping, damping) if block.adapter.is_exact else averages.pi_damping(mean_a, mean_g, damping)
        )
        return averages.add_to_diagonal(a, add_a, flat_a), averages.add_to_diagonal(g, add_g, flat_g)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if group["inverse_method"] != "cholesky":
            return
        if group["damping_split"] == "exact":
            raise ValueError(
                "damping_split='exact' needs the eigenvalues: use inverse_method='eigen', or damping_split='pi' with "
                "inverse_method='cholesky'"
            )
        if group["power"] != 1.0:
            raise ValueError(f"power={group['power']} needs the eigenvalues: use inverse_method='eigen'")
