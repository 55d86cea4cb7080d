r"""HyLo: natural gradient through the kernel of a few examples per layer, sampled or interpolated.

With the per-example gradients ``u_n = Σ_s g_ns a_nsᵀ`` of a layer (of the un-averaged loss, 1 appended to ``a`` for a
bias) over m examples, the empirical Fisher is ``F = (1/m) Σ u_n u_nᵀ``, and the Woodbury identity gives

.. math::
    (F + \lambda I)^{-1} V = \frac{1}{\lambda} \left[ V - \frac{1}{m} \hat G^\top \mathrm{diag}(M \hat\jmath) \hat A
    \right], \qquad \hat\jmath_n = \langle \hat u_n, V \rangle.

=============  ====================================  ==========================================================
mode           rows kept                             M
=============  ====================================  ==========================================================
``"sngd"``     all m                                 ``(K + λI)⁻¹``, K = ⟨u, u'⟩ / m
``"kis"``      R drawn with probability π_n ∝ ‖u_n‖²  as above, rows divided by √π_n: the mean of F̂ is F
``"kid"``      R pivots of a Cholesky factorisation  ``(S⁻¹ + K̂)⁻¹``, S = P D⁻¹ Pᵀ, K ≈ Pᵀ K̂ P + (D − λI)
``"auto"``     KID or KIS, as a policy says
=============  ====================================  ==========================================================

=====================  ==========================================
``damping``            λ
``rank_fraction``      ρ = R / m
=====================  ==========================================

Mu et al., HyLo, SC22, with its interpolation corrected; Ren & Goldfarb 2019 (arXiv 1906.02353), section 3; positions
shared within an example: Eschenhagen et al. 2023 (2311.00636).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder import options
from secondorder.comm.strategy import CommStrategy
from secondorder.curvature.layer import LayerOptions, SkipRule
from secondorder.curvature.mode import ModeSwitch
from secondorder.linalg import selection
from secondorder.methods import documentation
from secondorder.methods.defaults import resolved_damping, with_step_size
from secondorder.methods.layers import LayerRecipe, LayerRules
from secondorder.optimizer import SecondOrderOptimizer
from secondorder.options import FisherOptions
from secondorder.parameters import Group
from secondorder.preconditioners.rows import RowPreconditioner
from secondorder.switching import GradNormChange, SwitchPolicy

_MODES = ("auto", "kid", "kis", "sngd")


@options.complete_docstring(documentation.OPTIMIZER, documentation.LAYERS)
class HyLo(SecondOrderOptimizer):
    """HyLo on every layer type that has an adapter; every other parameter follows the fallback rule.

    Args:
        damping: Damping λ, in units of the Fisher of the per-example loss, or a multiple as ``damping_mode`` says. If
            None, it is 1. A change takes effect at the next refresh. In directions that no row covers, the step is that
            of the gradient times η / λ.
        damping_mode: ``"absolute"``, or ``"relative"`` to the mean eigenvalue of the kernel of each block, which falls
            with the gradients and with the number of examples. If None, it is ``"relative"`` if ``damping`` is not
            given and ``graft`` or ``inner`` sets the size of the steps, and ``"absolute"`` otherwise.
        normalize_damping: Whether to multiply the direction by λ, so that it does not grow when λ falls, and equals the
            gradient where λ is large.
        mode: ``"kid"`` interpolates, ``"kis"`` samples, and ``"sngd"`` keeps every example. ``"auto"`` switches between
            KID and KIS as ``switch`` says.
        switch: Policy of ``mode="auto"``, see :mod:`secondorder.switching`. If None, it is ``GradNormChange()``.
        update_steps: Number of steps between refreshes; 0 turns preconditioning off.
        rank_fraction: ρ, the fraction of the examples of a step that are kept.
        max_rank: Largest number of rows that are kept on all ranks together; each rank keeps at least one. It does not
            bound ``mode="sngd"``.
        rank_energy: Fraction of the trace of a layer's kernel that its rows have to hold. If given, it determines the
            number of rows per layer instead of ``rank_fraction``.
        kis_sampling: ``"systematic"`` (unbiased, no row twice), ``"replacement"`` (unbiased), ``"unweighted"`` (the
            published draw, biased) or ``"uniform"``.
        kid_pivoting: How the rows for interpolation are chosen: ``"cholesky"`` by the remainder of the kernel's
            diagonal, ``"qr"`` by the kernel's columns, and ``"score"`` takes the largest rows.
        kid_residual: What represents the part of the kernel that is not interpolated: its diagonal (``"diag"``), the
            full matrix (``"full"``) or nothing (``"none"``).
        approx: ``"reduce"`` uses the mean input and the summed gradient of each example; ``"expand"`` is exact.
        conv_scale: ``"exact"``, or ``"hylo"`` to divide the summed gradients of convolutions by the number of
            positions, which reproduces the published recipes.
        kfac_when_cheaper: Whether to use K-FAC's factors for a layer where R rows would take more memory or time. This
            is decided at the first refresh, and :meth:`describe` reports it.
        factor_decay: β, the weight of the old factors in the running mean, for layers that use K-FAC's factors.
        fisher: ``"empirical"`` uses the gradients of the loss, example by example, as rows. With :meth:`observe`,
            ``"mc"`` uses the gradients for targets drawn from the model, ``"curvature_prop"`` those along random signs,
            and ``"exact"``, if the loss of an example has one output, the Gauss-Newton rows. A squared error needs one
            of these three, because its own gradients vanish with the errors.
        loss_terms: Number of scalar loss terms per example (such as tokens) over which a mean runs.
        batch_size: Number of examples per step and rank. If given, the rows of ``approx="reduce"`` are allocated at
            construction, which is necessary for loading a distributed checkpoint before the first step. If None, they
            are allocated at the first refresh.
        kl_clip: κ, the bound on the step in the Fisher metric. If None, steps are not bounded.
        weight_decay_mode: ``"standard"``, or ``"reg"``, with which the decay is part of the gradient that is
            preconditioned.
        fallback: Rule for parameters without a block: ``"sgd"``, ``"adam"`` or ``"adamw"``. If None, it is the rule of
            ``graft`` if that is given, and SGD otherwise. The steps of SGD are η times the gradient, whereas those of
            blocks are of the order of η / λ; see ``normalize_damping``.
        checkpoint_curvature: How much of the curvature ``state_dict`` contains: ``"all"``, or ``"none"`` (rows are
            captured anew).

    Raises:
        ValueError: For a value out of range, a pattern that matches nothing, or without a module.
        TypeError: For a value of a wrong kind.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.HyLo(model, lr=1e-3, graft="adamw")
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    checks: ClassVar[dict[str, options.Check]] = {
        "damping": options.number(0.0, low_open=True),
        "damping_mode": options.choice("absolute", "relative"),
        "normalize_damping": options.flag,
        "mode": options.choice(*_MODES),
        "update_steps": options.whole(0),
        "rank_fraction": options.number(0.0, 1.0, low_open=True),
        "max_rank": options.whole(1),
        "rank_energy": options.number(0.0, 1.0, low_open=True, optional=True),
        "kis_sampling": options.choice(*selection.SAMPLINGS),
        "kid_pivoting": options.choice("cholesky", "qr", "score"),
        "kid_residual": options.choice("diag", "none", "full"),
        "approx": options.choice("reduce", "expand"),
        "conv_scale": options.choice("exact", "hylo"),
        "kfac_when_cheaper": options.flag,
        "factor_decay": options.number(0.0, 1.0),
        "loss_reduction": options.choice("mean", "sum"),
        "loss_terms": options.number(0.0, low_open=True),
        "kl_clip": options.number(0.0, low_open=True, optional=True),
        "weight_decay_mode": options.choice("standard", "reg"),
        "checkpoint_curvature": options.choice("all", "none"),
        "deterministic_seed": options.whole(0),
    }

    def __init__(
        self,
        params: ParamsT | nn.Module | Sequence[nn.Module],
        lr: float | Tensor | None = None,
        momentum: float = 0.9,
        *,
        module: nn.Module | Sequence[nn.Module] | None = None,
        comm: CommStrategy | None = None,
        damping: float | None = None,
        damping_mode: str | None = None,
        normalize_damping: bool = False,
        mode: str = "auto",
        switch: SwitchPolicy | None = None,
        update_steps: int = 10,
        rank_fraction: float = 0.1,
        max_rank: int = 1024,
        rank_energy: float | None = None,
        kis_sampling: str = "systematic",
        kid_pivoting: str = "cholesky",
        kid_residual: str = "diag",
        approx: str = "reduce",
        conv_scale: str = "exact",
        kfac_when_cheaper: bool = False,
        factor_decay: float = 0.95,
        fisher: str = "empirical",
        loss_reduction: str = "mean",
        loss_terms: float = 1,
        batch_dim: int = 0,
        batch_input: str | Callable[..., int] | None = None,
        batch_size: int | None = None,
        skip_layers: Sequence[SkipRule] | SkipRule = (),
        tied: str | None = "head",
        kl_clip: float | None = None,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        weight_decay_mode: str = "standard",
        maximize: bool = False,
        foreach: bool | None = None,
        fallback: str | None = None,
        fallback_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fallback_betas: tuple[float, float] | None = None,
        fallback_eps: float | None = None,
        inner: str = "sgd",
        graft: str | None = "auto",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        grad_scaler: Any = None,
        checkpoint_curvature: str = "all",
        max_failures: int = 10,
        deterministic_seed: int = 0,
    ) -> None:
        given = with_step_size(locals(), rate=0.1, own_size=weight_decay_mode != "standard")
        given |= resolved_damping(given, absolute=1.0, relative=1.0)
        options.choice("empirical", "mc", "exact", "curvature_prop")("fisher", fisher)
        options.optional_whole(1)("batch_size", batch_size)
        if switch is not None and not isinstance(switch, SwitchPolicy):
            raise TypeError(f"switch must be a policy of secondorder.switching, got {switch!r}")
        modes = ModeSwitch(GradNormChange() if switch is None else switch, type(self).__name__)
        if switch is not None and "auto" not in _modes(params, mode):
            raise ValueError(f"mode={mode!r} never asks the policy {switch!r}: drop switch, or mode")
        layers = LayerOptions(
            skip_layers, max_failures=max_failures, tied=tied, batch_dim=batch_dim, batch_input=batch_input
        )
        rules = LayerRules(partial(_exclude, fisher=fisher), mode_by_default=damping_mode is None)
        own = {"batch_size": batch_size, "modes": modes}
        super().__init__(given, LayerRecipe(RowPreconditioner, rules, layers, FisherOptions(fisher), own))

    @property
    def switch(self) -> SwitchPolicy:
        """The policy of ``mode="auto"``: a copy of the argument of this name."""
        return cast("RowPreconditioner", self.preconditioner).plan.modes.policy


def _exclude(group: Mapping[str, Any], groups: list[Group], fisher: str) -> None:
    """Refuse options that exclude each other."""
    if group["conv_scale"] == "hylo" and group["approx"] != "reduce":
        raise ValueError("conv_scale='hylo' is of summed gradients: use approx='reduce'")
    if group["kfac_when_cheaper"] and fisher != "empirical":
        raise ValueError(f"kfac_when_cheaper=True has factors of the loss's own gradients: drop fisher={fisher!r}")
    if group["kfac_when_cheaper"] and group["rank_energy"] is not None:
        raise ValueError(
            "kfac_when_cheaper=True compares with a number of rows, which rank_energy tells only from the rows: "
            "drop one of them"
        )
    if group["weight_decay_mode"] == "reg":
        clashes = {
            "decoupled_weight_decay=True": group["decoupled_weight_decay"],
            f"inner={group['inner']!r}": options.is_adam(group["inner"]),
            f"graft={group['graft']!r}": options.is_adam(group["graft"]),
        }
        if found := options.clashing(clashes):
            raise ValueError(f"weight_decay_mode='reg' makes decay part of the gradient: drop {found}")


def _modes(params: Any, mode: str) -> set[str]:
    """Modes of the groups that a constructor was given."""
    groups = [g for g in params if isinstance(g, dict)] if isinstance(params, (list, tuple)) else []
    return {str(group.get("mode", mode)) for group in groups} or {mode}
