r"""GGT: full-matrix adaptive preconditioning from the last m gradients.

.. math::
    H = (G_w^\top G_w)^{1/2} + εI, \qquad G_w = \operatorname{diag}(β_2^{\text{age}})\, G, \qquad u = H^{-1} v,
    \qquad v ← β_1 v + (1-β_1) g .

====================  ==============================================================
``window_size``       m, rows of G
``betas``             β₁ of the momentum on gradients, β₂ of the decay of the rows
``eps``               ε
``sgd_weight``        c, what the complement of the span is multiplied with; 1/ε
====================  ==============================================================

Agarwal et al. 2018 (arXiv 1806.02958); sparse windows with error feedback: Modoranu et al. 2023 (EFCP, 2306.06098).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.optim.optimizer import ParamsT

from secondorder import options
from secondorder.comm import CommStrategy
from secondorder.curvature.damping_watch import Damped
from secondorder.curvature.extremes import Extremes
from secondorder.curvature.window.form import Compression
from secondorder.lifecycle import Group
from secondorder.linalg import gram
from secondorder.methods import documentation
from secondorder.preconditioners.units import Unit
from secondorder.preconditioners.windows import WINDOW_CHECKS, WindowOptimizer, window_betas


@options.complete_docstring(documentation.OPTIMIZER, documentation.WINDOW)
class GGT(WindowOptimizer):
    """GGT on any parameters, with or without a module.

    Args:
        window_size: m, the number of gradients in the window. Each step needs an eigendecomposition of a matrix ``[m,
            m]``, which makes 256 a sensible limit.
        betas: β₁ in [0, 1) of the momentum on gradients, and β₂ in (0, 1] of the decay of older rows.
        eps: ε, which must be positive.
        sgd_weight: c, the factor of the part of the gradient outside the span of the window. If None, it is 1/ε, which
            gives the exact inverse. It has no effect where the newest row itself is preconditioned.
        bias_correction: Whether to divide v by 1 − β₁ᵗ.
        fallback_betas: β₁ and β₂ of Adam's rule, wherever ``graft``, ``inner`` or ``fallback`` names it. With
            ``graft="adam"``, the β₁ of ``betas`` is used instead if it is positive, so that schedulers act on both.
        fallback_eps: ε of Adam's rule.

    Raises:
        ValueError: For a value out of range, for groups of one window that do not agree, or for ranks that differ.
        TypeError: For a value of a wrong kind.
        RuntimeError: If the window does not fit into free memory.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.GGT(model.parameters(), lr=1e-3, graft="adam", window_size=20)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    checks: ClassVar[dict[str, options.Check]] = {
        **WINDOW_CHECKS,
        "betas": window_betas,
        "eps": options.number(0.0, low_open=True),
        "sgd_weight": options.number(0.0, optional=True),
        "bias_correction": options.flag,
        "fallback_betas": options.betas,
        "fallback_eps": options.number(0.0),
    }
    shared_options = (*WindowOptimizer.shared_options, "betas", "eps", "sgd_weight", "bias_correction")

    def __init__(
        self,
        params: ParamsT | nn.Module | Sequence[nn.Module],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        *,
        module: nn.Module | Sequence[nn.Module] | None = None,
        comm: CommStrategy | None = None,
        window_size: int = 100,
        betas: tuple[float, float] = (0.0, 1.0),
        eps: float = 1e-4,
        sgd_weight: float | None = None,
        bias_correction: bool = False,
        partition: str = "global",
        compression: Compression = None,
        window_dtype: torch.dtype | None = None,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        weight_decay_mode: str = "standard",
        skip_norm_layers: bool = False,
        skip_biases: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fallback: str | None = None,
        fallback_lr: float | None = None,
        fallback_betas: tuple[float, float] = (0.9, 0.999),
        fallback_eps: float = 1e-8,
        inner: str = "sgd",
        graft: str | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        grad_scaler: Any = None,
        deterministic_seed: int = 0,
        checkpoint_curvature: str = "all",
    ) -> None:
        given = locals()
        super().__init__(
            params,
            options.from_arguments(given, self.checks),
            module=module,
            comm=comm,
            compression=compression,
            window_dtype=window_dtype,
            partition=partition,
            skip_norm_layers=skip_norm_layers,
            skip_biases=skip_biases,
            grad_scaler=grad_scaler,
            seed=deterministic_seed,
        )

    # ------------------------------------------------------------------ the verbs
    def momentum_of_gradients(self, group: Mapping[str, Any]) -> float:
        """β₁."""
        return float(group["betas"][0])

    def _cycles_betas(self, defaults: Group) -> bool:
        return defaults["graft"] is None or options.is_adam(defaults["graft"]) or defaults["betas"][0] > 0

    def _adam_options(self, group: Group) -> tuple[tuple[float, float], float]:
        """Those of the fallback: ``betas`` and ``eps`` are GGT's own, but a β₁ above 0 is also that of a graft."""
        own, (beta1, beta2) = group["betas"][0], group["fallback_betas"]
        return (own if own and options.is_adam(group["graft"]) else beta1, beta2), group["fallback_eps"]

    def corrects_bias(self, group: Mapping[str, Any]) -> bool:
        """As ``bias_correction`` says."""
        return bool(group["bias_correction"])

    def coefficients(self, units: Sequence[Unit], lower: Tensor) -> Tensor:
        """``φ(G_wᵀG_w) x``, see :func:`secondorder.linalg.gram.ggt_coefficients`."""
        group, window = units[0].group, units[0].window
        outside = _outside(group)
        w = torch.stack([self._decays(unit) for unit in units])
        b = torch.stack([unit.source.b for unit in units if unit.source is not None])
        dots = [unit.source.q for unit in units if unit.source is not None and unit.source.q is not None]
        try:
            q = torch.stack(dots) if dots else None
            a = gram.ggt_coefficients(lower, w, b, q, group["eps"], outside, window.noise)
        except LinAlgError:
            a = torch.full_like(b, torch.nan)
        ok = torch.isfinite(a).all(-1)
        # The last resort takes each row by itself: for the newest one, the answer of a window of one row.
        alone = b / (lower.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt() + group["eps"])
        for unit, good in zip(units, ok, strict=True):
            unit.window.counters["solve_failures"].add_((~good).to(torch.int64))
            unit.outside = outside
        return torch.where(ok[:, None], a, alone)

    def curvature_of_rows(self, unit: Unit, rows: Tensor) -> Tensor:
        """``(G_wᵀG_w)^(1/2)``."""
        found = gram.spectrum(unit.window.lower()[None], unit.window.noise, self._decays(unit)[None])
        basis = found.back[0].mT @ rows
        curvature: Tensor = (basis * found.values[0].sqrt()[:, None]).mT @ basis
        return curvature

    def extremes(self, unit: Unit) -> tuple[Tensor, Tensor]:
        """ε, and the largest eigenvalue of ``(G_wᵀG_w)^(1/2)``."""
        found = gram.spectrum(unit.window.lower()[None], unit.window.noise, self._decays(unit)[None])
        largest = found.values[0, -1].sqrt()
        return torch.full_like(largest, unit.group["eps"]), largest

    def bounds(self, unit: Unit) -> Damped | None:
        """ε, and upper bounds of the largest eigenvalue of ``(G_wᵀG_w)^(1/2)``; None if another weight is outside."""
        if unit.group["sgd_weight"] is not None:
            return None
        decay = self._decays(unit)
        full = gram.symmetric(unit.window.lower())
        largest = gram.largest_bound(full * decay[:, None] * decay).sqrt()
        damping = torch.full_like(largest, unit.group["eps"])
        return Damped(unit.name, unit.group, "eps", Extremes(damping, largest=largest + damping, undamped=largest))

    # ------------------------------------------------------------------ the solve in detail
    @staticmethod
    def _decays(unit: Unit) -> Tensor:
        """β₂ to the power of each row's age ``[t]``."""
        window = unit.window
        return gram.decay(unit.group["betas"][1], window.counters["pos"], window.m, window.filled)

    def _solve_key(self, unit: Unit) -> tuple[object, ...]:
        group = unit.group
        return *super()._solve_key(unit), tuple(group["betas"]), group["eps"], group["sgd_weight"], unit.window.noise


def _outside(group: Mapping[str, Any]) -> float:
    return float(1 / group["eps"] if group["sgd_weight"] is None else group["sgd_weight"])
