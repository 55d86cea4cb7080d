r"""HyLo: natural gradient through the kernel of a few sampled or interpolated examples per layer.

Let ``u_n = Σ_s g_ns a_nsᵀ`` be the per-example gradients of a layer for m examples, computed from the loss before it is
averaged and with 1 appended to ``a`` for a bias. The empirical Fisher is ``F = (1/m) Σ u_n u_nᵀ``, and the Woodbury
identity gives

.. math::
    (F + \lambda I)^{-1} V = \frac{1}{\lambda} \left[ V - \frac{1}{m} \hat G^\top \mathrm{diag}(M \hat\jmath) \hat A
    \right], \qquad \hat\jmath_n = \langle \hat u_n, V \rangle.

=============  ====================================  ==========================================================
mode           rows kept                             M
=============  ====================================  ==========================================================
``"sngd"``     all m                                 ``(K + λI)⁻¹``, K = ⟨u, u'⟩ / m
``"kis"``      R drawn with probability π_n ∝ ‖u_n‖²  as above, rows divided by √π_n: the mean of F̂ is F
``"kid"``      R pivots of a Cholesky factorization  ``(S⁻¹ + K̂)⁻¹``, S = P D⁻¹ Pᵀ, K ≈ Pᵀ K̂ P + (D − λI)
``"auto"``     KID or KIS, as a policy decides
=============  ====================================  ==========================================================

=====================  ==========================================
``damping``            λ
``rank_fraction``      ρ = R / m
=====================  ==========================================

Mu et al., HyLo, SC22, with its interpolation corrected; Ren & Goldfarb 2019 (arXiv 1906.02353), section 3; positions
shared within an example: Eschenhagen et al. 2023 (2311.00636).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder import options
from secondorder.comm.strategy import CommStrategy
from secondorder.config import (
    BatchOptions,
    ClipOptions,
    FallbackOptions,
    FisherOptions,
    RefreshOptions,
    RowOptions,
    StatisticsOptions,
)
from secondorder.curvature.layer import SkipRule
from secondorder.curvature.mode import ModeSwitch
from secondorder.linalg import selection
from secondorder.methods import documentation
from secondorder.methods.arguments import expanded, show_new_spelling
from secondorder.methods.defaults import resolved_damping, with_step_size
from secondorder.methods.layers import LayerRecipe, LayerRules, layer_options
from secondorder.optimizer import SecondOrderOptimizer
from secondorder.parameters import Group
from secondorder.preconditioners.rows import RowPreconditioner
from secondorder.switching import GradNormChange, SwitchPolicy

_MODES = ("auto", "kid", "kis", "sngd")


@options.complete_docstring(
    documentation.OPTIMIZER, documentation.LAYERS, usual=documentation.USUAL, expert=documentation.EXPERT
)
class HyLo(SecondOrderOptimizer):
    """Implements HyLo for every supported layer type. The fallback rule updates all other parameters.

    With default options, it was at least as good as AdamW on six of eight workloads (``docs/evidence.md``, Defaults).

    Args:
        damping: Damping λ in units of the Fisher of the per-example loss, or a multiple according to ``damping_mode``.
            If None, it is 1. A change takes effect at the next refresh. In directions that no row covers, the step is
            the gradient times η / λ.
        damping_mode: ``"absolute"``, or ``"relative"`` to the mean eigenvalue of the kernel of each block, which falls
            with the gradients and with the number of examples. If None, it is ``"relative"`` if ``damping`` is not
            set and ``graft`` or ``inner`` sets the size of the steps, and ``"absolute"`` otherwise.
        mode: ``"kid"`` interpolates, ``"kis"`` samples, and ``"sngd"`` keeps every example. ``"auto"`` switches between
            KID and KIS with the policy ``GradNormChange()``. You can also pass a policy of
            :mod:`secondorder.switching`.
        update_steps: Number of steps between refreshes; 0 turns preconditioning off.
        rank_fraction: ρ, the fraction of the examples of a step that are kept.
        rows: How rows are chosen, see :class:`RowOptions`: their number (``max_rank``, ``energy``), the sampling of KIS
            and the interpolation of KID. ``RowOptions(normalize_damping=True)`` multiplies the direction by λ.
        batch: How the examples of a batch are counted, see :class:`BatchOptions`. ``BatchOptions(size=...)`` allocates
            the rows at construction, which is necessary to load a distributed checkpoint before the first step.
        refresh: ``RefreshOptions(max_failures=...)`` sets the number of consecutive failed refreshes of a layer after
            which an error is raised. HyLo does not support the other options of :class:`RefreshOptions`.
        statistics: ``StatisticsOptions(tied=...)`` selects the use of a tied weight that has a block. HyLo does not
            support the other options of :class:`StatisticsOptions`.
        approx: ``"reduce"`` uses the mean input and the summed gradient of each example; ``"expand"`` is exact.
        fisher: ``"empirical"`` uses the per-example gradients of the loss as rows. The other three need a call of
            :meth:`observe`: ``"mc"`` uses gradients for targets drawn from the model, ``"curvature_prop"`` uses
            gradients along random signs, and ``"exact"`` uses the Gauss-Newton rows of a loss with one output per
            example. A squared error needs one of these three, because its gradients vanish with the errors.
        kl_clip: κ, the bound on the step in the Fisher metric. If None, steps are not bounded.
        weight_decay_mode: ``"standard"``, or ``"reg"`` to include the decay in the gradient that is preconditioned.
        fallback: Rule for parameters without a block: ``"sgd"``, ``"adam"`` or ``"adamw"``, or
            :class:`FallbackOptions`, which also sets its learning rate. If None, it is the rule of ``graft`` if that is
            set, and SGD otherwise. The steps of SGD are η times the gradient, whereas those of blocks are of the order
            of η / λ unless ``rows`` normalizes the damping.
        checkpoint_curvature: How much of the curvature ``state_dict`` contains: ``"all"``, or ``"none"`` (rows are
            captured again).

    Raises:
        ValueError: If a value is out of range, a pattern matches nothing, or the module is missing.
        TypeError: If a value has the wrong type.

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

    #: Fields of option objects that this method does not have.
    absent: ClassVar[tuple[str, ...]] = (
        *(f"refresh.{field.name}" for field in fields(RefreshOptions) if field.name != "max_failures"),
        *(f"statistics.{field.name}" for field in fields(StatisticsOptions) if field.name != "tied"),
        "fisher.samples",
        "fallback.betas",
        "fallback.eps",
    )

    @show_new_spelling
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
        kl_clip: float | None = None,
        update_steps: int = 10,
        rank_fraction: float = 0.1,
        skip_layers: Sequence[SkipRule] | SkipRule = (),
        graft: str | None = "auto",
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        mode: str | SwitchPolicy = "auto",
        approx: str = "reduce",
        fisher: str | FisherOptions = "empirical",
        loss_reduction: str = "mean",
        batch: BatchOptions = BatchOptions(),
        weight_decay_mode: str = "standard",
        nesterov: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fallback: str | FallbackOptions | None = None,
        clip: float | ClipOptions | None = None,
        checkpoint_curvature: str = "all",
        rows: RowOptions = RowOptions(),
        refresh: RefreshOptions = RefreshOptions(),
        statistics: StatisticsOptions = StatisticsOptions(),
        inner: str = "sgd",
        deterministic_seed: int = 0,
    ) -> None:
        given = expanded(locals(), type(self)) | {"mode": "auto" if isinstance(mode, SwitchPolicy) else mode}
        given = with_step_size(given, rate=0.1, own_size=weight_decay_mode != "standard")
        given |= resolved_damping(given, absolute=1.0, relative=1.0)
        estimated: FisherOptions = given["fisher"]
        options.choice("empirical", "mc", "exact", "curvature_prop")("fisher", estimated.kind)
        modes = ModeSwitch(mode if isinstance(mode, SwitchPolicy) else GradNormChange(), type(self).__name__)
        rules = LayerRules(partial(_exclude, fisher=estimated.kind), mode_by_default=damping_mode is None)
        own = {"batch_size": batch.size, "modes": modes}
        super().__init__(given, LayerRecipe(RowPreconditioner, rules, layer_options(given), estimated, own))

    @property
    def switch(self) -> SwitchPolicy:
        """The policy that switches between KID and KIS if ``mode`` is ``"auto"``. It is a copy of the one passed."""
        return cast("RowPreconditioner", self.preconditioner).plan.modes.policy


def _exclude(group: Mapping[str, Any], groups: list[Group], fisher: str) -> None:
    """Reject options that exclude each other."""
    if group["conv_scale"] == "hylo" and group["approx"] != "reduce":
        raise ValueError("conv_scale='hylo' is defined for summed gradients: use approx='reduce'")
    if group["kfac_when_cheaper"] and fisher != "empirical":
        raise ValueError(f"kfac_when_cheaper=True uses factors of the gradients of the loss: drop fisher={fisher!r}")
    if group["kfac_when_cheaper"] and group["rank_energy"] is not None:
        raise ValueError(
            "kfac_when_cheaper=True needs the number of rows in advance, but with rank_energy it depends on the rows: "
            "drop one of them"
        )
    if group["weight_decay_mode"] == "reg":
        clashes = {
            "decoupled_weight_decay=True": group["decoupled_weight_decay"],
            f"inner={group['inner']!r}": options.is_adam(group["inner"]),
            f"graft={group['graft']!r}": options.is_adam(group["graft"]),
        }
        options.refuse(clashes, "weight_decay_mode='reg' makes decay part of the gradient: drop")
