"""Solvers for windows: the directions of M-FAC and GGT from the Gram matrix of past gradients.

For a vector ``x = Gᵀ b + r``, both compute the coefficients ``a`` of the direction ``u = Gᵀ a + c·r`` only from
S = G Gᵀ. ``secondorder/linalg/gram.py`` explains the mathematics. Solvers have no state: results that later steps need
are stored in the :class:`WindowUnit`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from secondorder import options
from secondorder.curvature.damping_watch import Damped
from secondorder.curvature.extremes import Extremes
from secondorder.curvature.window.unit import WindowUnit
from secondorder.curvature.window.window import LAG
from secondorder.linalg import gram
from secondorder.linalg.dense import all_true_on_cpu, anywhere, is_on_host

#: Error of the direction above which ``solver="auto"`` filters the spectrum: the error of a dot times the amplification
#: squared, since the dots have errors too.
_LARGEST_ERROR = 2e-2


class WindowSolver(ABC):
    """The solver of a window method."""

    @abstractmethod
    def momentum_of_gradients(self, group: Mapping[str, Any]) -> float:
        """Return β of the momentum that the method applies to gradients. 0 means no momentum."""

    @abstractmethod
    def coefficients(self, units: Sequence[WindowUnit], lower: Tensor, step: int) -> Tensor:
        """Return the coefficients ``[k, t]`` of the directions of some units, and set ``outside`` of each unit.

        Args:
            units: Units whose windows have the same number of rows.
            lower: Lower triangles ``[k, t, t]`` of their Gram matrices S, which may be overwritten.
            step: Number of steps taken before this one.
        """

    @abstractmethod
    def curvature_of_rows(self, unit: WindowUnit, rows: Tensor) -> Tensor:
        """Return the undamped curvature ``[n, n]`` in float64 for the columns ``rows [t, n]`` of a window."""

    @abstractmethod
    def momentum_after(self, group: Mapping[str, Any]) -> tuple[float, float]:
        """Return the momentum that is applied to the direction, and the factor of the direction before it."""

    @abstractmethod
    def corrects_bias(self, group: Mapping[str, Any]) -> bool:
        """Return whether to divide the momentum on gradients by its total weight."""

    @abstractmethod
    def adam_options(self, group: Mapping[str, Any]) -> tuple[tuple[float, float], float]:
        """Return β₁, β₂ and ε of Adam's rule in a group."""

    def flops(self, m: int) -> float:
        """Return the number of FLOPs of a solve with m rows."""
        return m**3 / 3 + 2 * m**2

    def key(self, unit: WindowUnit, step: int) -> tuple[object, ...]:
        """Return a key; units with equal keys are solved in one batch."""
        window, has_dots = unit.window, unit.source is not None and unit.source.q is None
        return window.filled, window.device, has_dots, window.noise, *self.solve_options(unit, step)

    @abstractmethod
    def solve_options(self, unit: WindowUnit, step: int) -> tuple[object, ...]:
        """Return the properties that must be equal for units that are solved in one batch."""

    @abstractmethod
    def extremes(self, unit: WindowUnit) -> tuple[Tensor, Tensor] | None:
        """λ of a window and the largest eigenvalue of its undamped curvature, 0-dim; None if they are unknown."""

    @abstractmethod
    def bounds(self, unit: WindowUnit) -> Damped | None:
        """The damping of a window, and upper bounds of the largest eigenvalues; never waits for the device."""


class MFACSolver(WindowSolver):
    """``(λI + GᵀG/n)⁻¹``."""

    def momentum_of_gradients(self, group: Mapping[str, Any]) -> float:
        """μ in mode ``"pre"``."""
        return float(group["momentum"]) if group["momentum_mode"] == "pre" else 0.0

    def coefficients(self, units: Sequence[WindowUnit], lower: Tensor, step: int) -> Tensor:
        """``(λI + S/n)⁻¹ (b − q/(nλ))``."""
        n = torch.stack([self._rows_counted(unit) for unit in units])
        squares = lower.diagonal(dim1=-2, dim2=-1).clone()
        damping = torch.cat([
            gram.mfac_damping(part[None], unit.group["damping"], unit.group["damping_mode"], own[None])
            for unit, part, own in zip(units, squares, n, strict=True)
        ])  # fmt: skip
        b, q = _stacked(units)
        rhs = gram.mfac_right_side(b, q, damping, n)
        a, ok = gram.mfac_cholesky_(lower, rhs, damping, n)
        amplification = torch.where(ok, gram.mfac_amplification(squares, a, rhs, damping, n), torch.inf)
        wanted = self._filtering(units, amplification, step)
        if wanted is not None:
            filtered = self._filtered(units, (b, q, damping, n))
            a = torch.where(wanted[:, None], filtered, a)
            ok = torch.where(wanted, torch.isfinite(filtered).all(-1), ok)
        # The last resort takes each row by itself: for the newest one, the answer of a window of one row.
        alone = rhs / (damping[:, None] + squares / n[:, None])
        for unit, good, size, own in zip(units, ok, amplification, damping, strict=True):
            unit.window.counters["solve_failures"].add_((~good).to(torch.int64))
            unit.outside = 1 / own
            self._note(unit, size, step)
        return torch.where(ok[:, None], a, alone)

    def curvature_of_rows(self, unit: WindowUnit, rows: Tensor) -> Tensor:
        """``GᵀG/n``."""
        return rows.mT @ rows / self._rows_counted(unit)

    def extremes(self, unit: WindowUnit) -> tuple[Tensor, Tensor]:
        """λ, and the largest eigenvalue of ``GᵀG/n``."""
        lower, n = unit.window.lower(), self._rows_counted(unit)
        squares = lower.diagonal()[None]
        damping = gram.mfac_damping(squares, unit.group["damping"], unit.group["damping_mode"], n[None])
        return damping[0], anywhere(torch.linalg.eigvalsh, lower)[-1].clamp(min=0) / n

    def bounds(self, unit: WindowUnit) -> Damped:
        """λ of a window, and upper bounds of the largest eigenvalue of ``GᵀG/n``."""
        lower, n = unit.window.lower(), self._rows_counted(unit)
        group = unit.group
        damping = gram.mfac_damping(lower.diagonal()[None], group["damping"], group["damping_mode"], n[None])[0]
        largest = gram.largest_bound(gram.symmetric(lower)) / n
        return Damped(unit.name, group, "damping", Extremes(damping, largest=largest + damping, undamped=largest))

    def _rows_counted(self, unit: WindowUnit) -> Tensor:
        """n, 0-dim float64."""
        count = unit.window.counters["count"].clamp(1, unit.window.m).to(torch.float64)
        return torch.full_like(count, unit.window.m) if unit.group["scale"] == "window" else count

    def _filtered(self, units: Sequence[WindowUnit], problem: tuple[Tensor, Tensor | None, Tensor, Tensor]) -> Tensor:
        """Coefficients without the directions that consist of rounding errors. Not finite if the solve fails."""
        lower = torch.stack([unit.window.lower() for unit in units])
        try:
            return gram.mfac_filtered(lower, *problem, noise=units[0].window.noise)
        except LinAlgError:
            return torch.full_like(problem[0], torch.nan)

    def _filtering(self, units: Sequence[WindowUnit], amplification: Tensor, step: int) -> Tensor | None:
        """Which units drop directions that consist of rounding errors, as flags ``[k]``; None if no unit does."""
        # A CPU uses the amplification of the current step; other devices use that of some steps before.
        solver, on_cpu = units[0].group["solver"], amplification.device.type == "cpu"
        if solver == "eigh":
            return torch.ones_like(amplification, dtype=torch.bool)
        if not on_cpu:
            return torch.ones_like(amplification, dtype=torch.bool) if self._filters(units[0], step) else None
        limit = (_LARGEST_ERROR / units[0].window.noise) ** 0.5
        fine = amplification <= limit if solver == "auto" else torch.isfinite(amplification)
        return None if all_true_on_cpu(fine) else ~fine

    def _filters(self, unit: WindowUnit, step: int) -> bool:
        """Whether a unit filters under ``"auto"`` on a device, based on a measurement of some steps before."""
        if unit.window.device.type == "cpu" or unit.group["solver"] != "auto":
            return False
        arrival = unit.arrivals.pop(step % LAG, None)
        if arrival is not None:
            arrival.synchronize()
        few = unit.window.filled <= LAG  # nothing is measured yet, and eigenvalues of few rows are cheap
        return few or bool(unit.lagged.numpy()[step % LAG] ** 2 * unit.window.noise > _LARGEST_ERROR)

    def _note(self, unit: WindowUnit, amplification: Tensor, step: int) -> None:
        """Start to copy the amplification of this step to the host, which reads it some steps later."""
        i = step % LAG
        unit.lagged[i].copy_(amplification, non_blocking=True)
        if not is_on_host(amplification):
            unit.arrivals[i] = torch.Event(amplification.device)
            unit.arrivals[i].record()

    def solve_options(self, unit: WindowUnit, step: int) -> tuple[object, ...]:
        """Key of the options that determine how the spectrum is filtered."""
        return unit.group["solver"], self._filters(unit, step)

    def corrects_bias(self, group: Mapping[str, Any]) -> bool:
        """Return False."""
        return False

    def adam_options(self, group: Mapping[str, Any]) -> tuple[tuple[float, float], float]:
        """β₁, β₂ and ε of the fallback or the graft."""
        return group["betas"], group["eps"]

    def momentum_after(self, group: Mapping[str, Any]) -> tuple[float, float]:
        """μ, and the factor 1 − μ in mode ``"ema"``; no momentum is applied in mode ``"pre"``."""
        momentum = 0.0 if group["momentum_mode"] == "pre" else group["momentum"]
        return momentum, 1 - momentum if group["momentum_mode"] == "ema" else 1.0


class GGTSolver(WindowSolver):
    """``((G_wᵀG_w)^(1/2) + εI)⁻¹`` for rows weighted by age."""

    def momentum_of_gradients(self, group: Mapping[str, Any]) -> float:
        """β₁."""
        return float(group["betas"][0])

    def corrects_bias(self, group: Mapping[str, Any]) -> bool:
        """The value of the option ``bias_correction``."""
        return bool(group["bias_correction"])

    def adam_options(self, group: Mapping[str, Any]) -> tuple[tuple[float, float], float]:
        """β₁, β₂ and ε of the fallback. ``betas`` and ``eps`` belong to GGT; a β₁ above 0 there applies to a graft."""
        own, betas = group["betas"][0], group["fallback_betas"]
        first = own if own and options.is_adam(group["graft"]) else betas[0]
        return (float(first), betas[1]), group["fallback_eps"]

    def coefficients(self, units: Sequence[WindowUnit], lower: Tensor, step: int) -> Tensor:
        """``φ(G_wᵀG_w) x``, see :func:`secondorder.linalg.gram.ggt_coefficients`."""
        group, window = units[0].group, units[0].window
        outside = float(1 / group["eps"] if group["sgd_weight"] is None else group["sgd_weight"])
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

    def curvature_of_rows(self, unit: WindowUnit, rows: Tensor) -> Tensor:
        """``(G_wᵀG_w)^(1/2)``."""
        found = gram.spectrum(unit.window.lower()[None], unit.window.noise, self._decays(unit)[None])
        basis = found.back[0].mT @ rows
        curvature: Tensor = (basis * found.values[0].sqrt()[:, None]).mT @ basis
        return curvature

    def extremes(self, unit: WindowUnit) -> tuple[Tensor, Tensor]:
        """ε, and the largest eigenvalue of ``(G_wᵀG_w)^(1/2)``."""
        found = gram.spectrum(unit.window.lower()[None], unit.window.noise, self._decays(unit)[None])
        largest = found.values[0, -1].sqrt()
        return torch.full_like(largest, unit.group["eps"]), largest

    def bounds(self, unit: WindowUnit) -> Damped | None:
        """ε, and upper bounds of the largest eigenvalue of ``(G_wᵀG_w)^(1/2)``; None if another weight is outside."""
        if unit.group["sgd_weight"] is not None:
            return None
        decay = self._decays(unit)
        full = gram.symmetric(unit.window.lower())
        largest = gram.largest_bound(full * decay[:, None] * decay).sqrt()
        damping = torch.full_like(largest, unit.group["eps"])
        return Damped(unit.name, unit.group, "eps", Extremes(damping, largest=largest + damping, undamped=largest))

    @staticmethod
    def _decays(unit: WindowUnit) -> Tensor:
        """β₂ to the power of each row's age ``[t]``."""
        window = unit.window
        return gram.decay(unit.group["betas"][1], window.counters["pos"], window.m, window.filled)

    def momentum_after(self, group: Mapping[str, Any]) -> tuple[float, float]:
        """The momentum of the group, which sums directions."""
        return group["momentum"], 1.0

    def solve_options(self, unit: WindowUnit, step: int) -> tuple[object, ...]:
        """All parameters of the function of the spectrum."""
        group = unit.group
        return tuple(group["betas"]), group["eps"], group["sgd_weight"]


def _stacked(units: Sequence[WindowUnit]) -> tuple[Tensor, Tensor | None]:
    sources = [unit.source for unit in units if unit.source is not None]
    dots = [source.q for source in sources if source.q is not None]
    return torch.stack([source.b for source in sources]), torch.stack(dots) if dots else None
