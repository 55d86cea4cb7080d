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
from secondorder.curvature.kronecker_factors import FactoredOptimizer
from secondorder.curvature.layer import Block, SkipRule
from secondorder.curvature.schema import FOUND, Schema, shaped
from secondorder.lifecycle import Group
from secondorder.linalg import dense, eigenbasis


class KFAC(FactoredOptimizer):
    """K-FAC on every layer type that has an adapter; every other parameter follows the fallback rule.

    Args:
        params: A module, a list of modules that are the parts of one model, or what ``torch.optim`` takes together with
            ``module``.
        lr: Learning rate η, a number or a tensor of one element.
        momentum: Heavy-ball momentum on the preconditioned gradient.
        module: Module, or list of modules, to hook when ``params`` is not one.
        comm: Communication strategy; None: ``CommOpt()`` in a process group of more than one rank.
        damping: λ, in the unit of the Fisher of the per-example loss (or a multiple, see ``damping_mode``). Unset: 10
            times the mean eigenvalue of each block, which is safe whatever the scale of the loss.
        damping_mode: ``"absolute"``, or ``"relative"`` to the mean eigenvalue of each block (of a normalisation layer:
            of its steepest unit). Unset: absolute when ``damping`` is given.
        damping_split: ``"exact"`` adds λ to the eigenvalues of ``G ⊗ A``, ``"pi"`` splits it over the factors. Unset:
            exact for eigen, pi for cholesky.
        inverse_method: ``"eigen"`` (λ acts at once) or ``"cholesky"`` (half the work per step, a refresh many times
            cheaper; λ acts at the next refresh).
        factor_decay: β, weight of the old factors in the running mean.
        factor_update_steps: F, steps between updates of the factors. Unset: 10.
        inv_update_steps: K, steps between refreshes; 0 turns preconditioning off. Unset: 100.
        factor_dtype: Precision in which A and G are kept, ``torch.float32`` (of float64 parameters float64) or
            ``torch.bfloat16``: half the bytes, and eigenvalues below 1/256 of the largest are rounding.
        inv_dtype: Of the bases and inverses, likewise; products are still taken in float32.
        factor_storage: ``"dense"``, or ``"packed"``: A and G are kept as their triangles, half the bytes, and are whole
            only while a refresh needs them.
        stagger: Spread the refreshes of the blocks over the interval.
        overlap: Factorise on a thread (on a GPU a stream) of its own while training goes on, and adopt what comes out
            ``max(1, inv_update_steps // 10)`` steps after it was begun; the first refresh and those of a warm-up
            are done at once. For copies of A and G it takes their bytes once more.
        refresh_warmup: Update factors on every step of the first interval, and refresh at 0, 1, 2, 4, 8, … in it: the
            curvature of a fresh network changes a thousandfold in its first hundred steps. Unset: on unless an interval
            is given, which is then kept to exactly.
        approx: ``"expand"`` treats shared positions as independent, ``"reduce"`` averages inputs and sums gradients.
        fisher: ``"empirical"`` from the gradients of the loss; ``"mc"`` from targets drawn from the model,
            ``"curvature_prop"`` from random signs, ``"exact"`` with every column of the loss curvature, all three by
            :meth:`observe`; ``"forward_only"`` takes G = I.
        fisher_samples: Draws per example of ``"mc"`` and ``"curvature_prop"``.
        loss_reduction: ``"mean"`` or ``"sum"`` over the examples, as the loss does.
        loss_terms: Scalar loss terms per example that a mean runs over (tokens); :meth:`observe` counts them itself.
        batch_dim: Dimension of the model's input that counts examples.
        batch_input: Name of the argument of the model's ``forward`` that has the examples along that dimension, or a
            function that takes the arguments of ``forward`` and returns their number. Unset: the first tensor, unless
            the outputs and the layers of the model agree on another number.
        skip_layers: Names, patterns, types or modules to leave out, with all below them.
        norm_curvature: Blocks of normalisation layers: ``"unit"``, scale and shift of a unit together, or
            ``"diagonal"``.
        tied: Which use of a weight that is both an embedding and an output head gives the statistics of its block,
            ``"head"`` or ``"embedding"``; None leaves the weight to the fallback.
        max_factor_dim: Factors of more rows are kept as their diagonal; None for no bound. ``"auto"``: on a CPU 2048
            with ``inverse_method="eigen"`` and 4096 with ``"cholesky"``, elsewhere 8192.
        weighting: Weight of a batch in the running means, its ``"samples"`` or 1 per ``"update"``.
        burnin_steps: First updates of the running means that all weigh the same (β = 1).
        decay_per_step: Raise β to the power of the interval, so that it is a decay per step.
        factor_batch_size: Examples of each micro-batch, drawn at random, that enter the factors; unset: all. Not
            together with :meth:`mask`.
        factor_positions: Positions of each example (pixels, tokens), drawn at random, that do; unset: all.
        weight_decay_in_curvature: Count ``weight_decay`` as curvature: λ grows by it.
        power: p of ``(F + λ)^(-p)``: 1 is the natural gradient, 1/2 whitens. Below 1 it needs the eigenvalues,
            ``inverse_method="eigen"``.
        orthogonalize: Give steps of linear and convolution layers a uniform spectrum, as Muon does: of the
            preconditioned matrix only its polar factor is taken, at the usual size of Adam's steps (or that of
            ``graft``), so that ``lr`` is several times AdamW's. It wants momentum before it: ``momentum_mode="pre"`` of
            EKFAC, or ``graft="adam"``.
        orthogonal_dtype: Of the products that find the polar factor, ``torch.float32``, or ``torch.bfloat16`` for
            matrices of 128 rows and columns or more: Muon's precision, faster where the hardware has units for it, and
            noise in directions that the gradient hardly has.
        kl_clip: κ, bound on the step in the Fisher metric; None disables. Steps that graft or orthogonalize have their
            own size.
        adaptive_damping: Move λ every ``damping_interval`` steps by how well the quadratic model predicted the change
            of the loss; needs ``step(closure)``, and calls the closure once more on those steps.
        damping_interval: T, steps between two changes of λ.
        min_damping: Floor of an adapted λ.
        max_damping: Ceiling of an adapted λ.
        include_damping_in_model: Judge the model with ``½ λ ‖δ‖²`` in it.
        reject_steps: Undo a step that raised the loss or made it non-finite, and raise λ; calls the closure once more
            on every step.
        quadratic_model: Take rate and momentum of each step from the quadratic model; ``lr`` then multiplies its step,
            so that 1.0 is the pure one, and momentum 0 leaves the previous step out.
        likelihood: What the loss is to the outputs, ``"categorical"``, ``"bernoulli"``, ``"gaussian"`` or an object:
            with a closure that returns ``(loss, outputs)`` the model is then exact.
        calibrate_damping: Try damping from a thousandth to a thousandfold of ``damping`` at the first refresh, and keep
            the best.
        nesterov: Nesterov momentum.
        weight_decay: Weight decay.
        decoupled_weight_decay: Apply decay to the parameter instead of the direction.
        maximize: Maximize the objective.
        foreach: As in ``torch.optim``.
        fallback: Rule of parameters without a block, ``"sgd"``, ``"adam"`` or ``"adamw"``; unset follows ``graft``,
            else SGD.
        fallback_lr: Learning rate of Adam's fallback, scheduled in proportion to ``lr``; unset: ``lr`` when
            grafting, else 1e-3.
        betas: β₁ and β₂ of Adam's rule, wherever ``graft``, ``inner`` or ``fallback`` name it. Schedulers that cycle
            the momentum cycle this β₁ where ``graft`` or ``inner`` do.
        eps: ε of Adam's rule.
        fallback_betas: Another name of ``betas``.
        fallback_eps: Another name of ``eps``.
        inner: Rule that takes the preconditioned gradient, ``"sgd"``, ``"adam"`` or ``"adamw"``.
        graft: ``"sgd"``, ``"adam"`` or ``"adamw"``: each block takes the step size of that rule, so that its schedule
            carries over. ``"adam"`` decays weights as ``decoupled_weight_decay`` says, ``"adamw"`` always decoupled.
        clip_norm: Bound on the norm of the direction over all blocks.
        clip_value: Bound on each entry of the direction.
        grad_scaler: ``torch.amp.GradScaler`` of float16 training.
        checkpoint_curvature: What ``state_dict`` holds: ``"all"``, ``"factors"`` (inverses are recomputed at load) or
            ``"none"`` (estimated anew).
        max_failures: Failed refreshes of a layer in a row before an error.
        deterministic_seed: Seed of every random choice.

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
    def schema(self, block: Block, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        """Factors, what is derived from them, and counters."""
        found = self.factor_schema(block, group)
        if group["inverse_method"] == "eigen":
            return found | self.basis_schema(block, group)
        sides = factors.named_sides(block.adapter, group["max_factor_dim"])
        dense = factors.dense_keys("inverse", sides)
        if not dense:
            return found
        kept = self._kept_in(block, self._layer_options.inv_dtype)
        likes = {f"inverse_{name}": self.zeros(block, side.shape, kept) for name, side in sides.items()}
        return found | shaped(self.catalog, likes, dense)

    def new_statistic(self, block: Block, group: Group) -> KroneckerSums:
        """Empty sums of a block."""
        return self.new_sums(block, group)

    def sums(self, block: Block) -> Schema:
        """Both factors, at every step that captures."""
        return self.factor_sums(block, block.group)

    def measure(self, block: Block, statistic: Statistic, examples: int) -> Measured:
        """The factors of this rank's batch, scaled per datum."""
        return Measured(self.measured_factors(block, cast(KroneckerSums, statistic), examples), examples)

    def fold(self, block: Block, measured: Measured, gate: Tensor | None) -> Tensor:
        """Fold the factors of the batch into the running ones."""
        return self.fold_factors(block, measured, gate)

    def _needs_estimate_everywhere(self, block: Block, group: Mapping[str, Any]) -> bool:
        # Both factors diagonal: there are no inverses, and the factors themselves precondition.
        return group["inverse_method"] == "cholesky" and self._is_entrywise(block)

    def refresh_some(self, blocks: Sequence[Block], host_checks: bool) -> Tensor:
        """Factorise the factors of some blocks; one that fails keeps its last good result."""
        ok: dict[Block, Tensor] = {}
        for method, work in (("eigen", self.refresh_bases), ("cholesky", self._invert)):
            chosen = [b for b in blocks if b.group["inverse_method"] == method]
            if chosen:
                ok.update(zip(chosen, work(chosen, host_checks).unbind(), strict=True))
        return torch.stack([ok[b] for b in blocks])

    def precondition(self, block: Block, gradient: Tensor) -> Tensor:
        """``(G ⊗ A + λI)^(-p) vec(∇)``, or its factored form."""
        state, group = self.state[block.owner], block.group
        if group["inverse_method"] == "cholesky":
            if self._is_entrywise(block):
                values = self.factor(block, "g")[..., :, None] * self.factor(block, "a")[..., None, :]
                return gradient / (values + self.damping_of(block, values.mean((-2, -1)))[..., None, None])
            inverses = self.working(block, "inverse_a"), self.working(block, "inverse_g")
            return averages.solve_factored(gradient, *inverses, self._workspace)
        values_a, values_g = state["eigenvalues_a"], state["eigenvalues_g"]
        damping: Tensor | None = self.damping_of(block, values_a.mean(-1) * values_g.mean(-1))
        if group["damping_split"] == "pi" and not block.adapter.is_exact:
            values_a, values_g = averages.split_eigenvalues(values_a, values_g, cast(Tensor, damping))
            damping = None
        values = values_g[..., :, None] * values_a[..., None, :]
        bases = self.basis(block, "a"), self.basis(block, "g")
        return eigenbasis.precondition(gradient, *bases, values, damping, group["power"], self._workspace)

    def block_curvature(self, block: Block) -> Tensor:
        """``G ⊗ A``; block-diagonal over the groups of a grouped convolution."""
        a, g = (factors.as_dense(self.factor(block, side), self.is_diagonal(block, side)) for side in "ag")
        return block.adapter.natural_order(factors.kron(a, g))

    def extremes(self, block: Block) -> Extremes | None:
        """λ of a block and the extreme eigenvalues of what is inverted; of factored inverses λ alone."""
        state, split = self.state[block.owner], block.group["damping_split"] == "pi" and not block.adapter.is_exact
        if block.group["inverse_method"] == "eigen":
            found = super().extremes(block)
            if found is None or not split:
                return found
            values = averages.split_eigenvalues(state["eigenvalues_a"], state["eigenvalues_g"], found.damping)
            (small_a, large_a), (small_g, large_g) = (v.aminmax(dim=-1) for v in values)
            return Extremes(found.damping, small_a * small_g, large_a * large_g, found.undamped)
        if not self.has_factors(block):
            return None
        if self._is_entrywise(block):
            a, g = self.factor(block, "a"), self.factor(block, "g")
            return of_product(a, g, self.damping_of(block, a.mean(-1) * g.mean(-1)))
        means = [factors.mean_diagonal(self.factor(block, side), self.is_diagonal(block, side)) for side in "ag"]
        return Extremes(self.damping_of(block, means[0] * means[1]))

    def bounds(self, block: Block) -> Extremes | None:
        """λ of a block, and upper bounds of the largest eigenvalues; never waits for the device."""
        found = self.extremes(block)
        if found is None or found.largest is not None:
            return found
        sides = [(self.factor(block, side), self.is_diagonal(block, side)) for side in "ag"]
        mean_a, mean_g = (factors.mean_diagonal(*side) for side in sides)
        add_a, add_g = averages.pi_damping(mean_a, mean_g, found.damping)
        # A Frobenius norm is at least the largest eigenvalue.
        a, g = (x.abs().amax(-1) if diagonal else torch.linalg.matrix_norm(x) for x, diagonal in sides)
        return Extremes(found.damping, largest=(a + add_a) * (g + add_g), undamped=a * g)

    def curvature_product(self, block: Block, matrix: Tensor) -> Tensor:
        """``G X A`` of a matrix ``X [(Γ,) n_g, n_a]``, undamped."""
        return factors.times(
            factors.times(matrix, self.factor(block, "g"), left=True), self.factor(block, "a"), left=False
        )

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
    def _invert(self, blocks: Sequence[Block], host_checks: bool) -> Tensor:
        """Invert the damped factors of some blocks; one that fails keeps its last good result."""
        found = self.factorised(blocks, host_checks)
        ok = joint_ok(found, blocks)
        for block, good in zip(blocks, ok.unbind(), strict=True):
            for side in "" if self._is_entrywise(block) else "ag":
                inverse = found[block, side][0][0]
                if self.comm.combines and not self.is_diagonal(block, side):
                    inverse = dense.mirror_upper_(inverse.clone())  # others get a triangle, and all must have the same
                self.adopt(block, f"inverse_{side}", inverse, good)
        return ok

    def to_factorise(self, block: Block) -> tuple[Tensor, Tensor]:
        """The factors, for Cholesky with their damping."""
        return self._damped_factors(block) if self.way_of(block) == "cholesky" else super().to_factorise(block)

    def _is_entrywise(self, block: Block) -> bool:
        """Whether both factors are diagonal: then the damped product is too, and needs no inverse of its factors."""
        return self.is_diagonal(block, "a") and self.is_diagonal(block, "g")

    def _damped_factors(self, block: Block) -> tuple[Tensor, Tensor]:
        """``A + π√λ I`` and ``G + √λ/π I``."""
        a, g = self.factor(block, "a"), self.factor(block, "g")
        flat_a, flat_g = self.is_diagonal(block, "a"), self.is_diagonal(block, "g")
        mean_a, mean_g = factors.mean_diagonal(a, flat_a), factors.mean_diagonal(g, flat_g)
        damping = self.damping_of(block, mean_a * mean_g)
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
