"""Pure functions for the number of directions in the curvature of a layer, and for the error of keeping few rows.

The per-example gradients u_n are scaled so that ``F = Σ u uᵀ``. The kernel ``K_nm = ⟨u_n, u_m⟩`` has the nonzero
eigenvalues of F. The exact update of a gradient V, ``u* = (F + λI)⁻¹ V``, is that of SNGD with all rows (Ren & Goldfarb
2019, arXiv 1906.02353). KID and KIS (Mu et al., HyLo, SC22) keep r rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secondorder.linalg import kernel, selection, woodbury
from secondorder.linalg.dense import anywhere
from secondorder.linalg.kernel import Rows


class System(NamedTuple):
    """The system ``(F + λI) u = V`` of a layer in terms of its rows, in float64.

    Attributes:
        rows: All n rows.
        kernel: K ``[..., n, n]``.
        damping: λ ``[...]``.
        matrix: V, in the shape that matches the rows.
    """

    rows: Rows
    kernel: Tensor
    damping: Tensor
    matrix: Tensor


class Sums(NamedTuple):
    """Sums over the coordinates of an update u and of the exact update u*. The sums of several layers can be added.

    Attributes:
        error: ``‖u − u*‖²``.
        own: ``‖u‖²``.
        exact: ``‖u*‖²``.
        inner: ``⟨u, u*⟩``.
    """

    error: float = 0.0
    own: float = 0.0
    exact: float = 0.0
    inner: float = 0.0

    def plus(self, other: Sums) -> Sums:
        """Return the sums over the coordinates of both."""
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))

    def measures(self) -> dict[str, float]:
        """Return the relative error ``‖u − u*‖ / ‖u*‖`` and the cosine, which are NaN for zero updates."""
        length = math.sqrt(self.own * self.exact)
        return {
            "rel_error": math.sqrt(self.error / self.exact) if self.exact else math.nan,
            "cos": max(-1.0, min(1.0, self.inner / length)) if length else math.nan,
        }


class Kept(NamedTuple):
    """An update from few rows.

    Attributes:
        update: The update.
        measure: Name and value of a measure of how well the rows were chosen.
    """

    update: Tensor
    measure: tuple[str, float]


def in_float64(rows: Rows) -> Rows:
    """Return the rows in float64. Indices do not change."""
    a = rows.a.double() if rows.a is not None and rows.a.is_floating_point() else rows.a
    return rows._replace(a=a, g=rows.g.double())


def spectrum(kernel_: Tensor, damping: Tensor) -> dict[str, Any]:
    """Summarize the eigenvalues of a kernel. Several kernels are treated as blocks of one kernel.

    Args:
        kernel_: K ``[..., n, n]``, which must be finite.
        damping: λ ``[...]``. Several values are averaged.

    Returns:
        ``rank90``, the number of largest eigenvalues that add up to nine tenths of the sum; ``eff_rank``, exp of the
        entropy; ``sigma_max`` and ``sigma_sum``; ``damping_over_sigma1``, λ divided by the largest eigenvalue.
    """
    values = anywhere(torch.linalg.eigvalsh, kernel_).clamp(min=0).flatten()
    largest, total = values.amax(), values.sum()
    found = [
        kernel.rank_of_energy(values).double(), kernel.effective_rank(values), largest, total, damping.mean() / largest
    ]  # fmt: skip
    names = "rank90", "eff_rank", "sigma_max", "sigma_sum", "damping_over_sigma1"
    report: dict[str, Any] = dict(zip(names, torch.stack(found).tolist(), strict=True))
    report["rank90"] = int(report["rank90"])
    return report


def exact(system: System) -> Tensor:
    """Return u*, computed from all rows."""
    inverse, _ = woodbury.damped_inverse(system.kernel, system.damping)
    return woodbury.apply(system.rows, inverse, system.damping, system.matrix)


def interpolated(system: System, rank: int) -> Kept:
    """Return the update of KID from interpolation pivots, and the share of the trace of K that the pivots explain."""
    found = selection.interpolate(system.kernel, rank)
    rows = kernel.pick(system.rows, found.index, found.valid)
    core = selection.core(system.kernel, found, system.damping, "diag")
    inverse, _ = woodbury.interpolated_inverse(core, kernel.gram(rows).to(core))
    trace = system.kernel.diagonal(dim1=-2, dim2=-1).sum()
    return Kept(
        woodbury.apply(rows, inverse, system.damping, system.matrix),
        ("kid_energy", float(found.energy[..., -1].sum() / trace)),
    )


def sampled(system: System, rank: int, sampling: str, generator: torch.Generator) -> Kept:
    """Return the update of KIS from rows drawn by length, and the sample size ``(Σω²)²/Σω⁴``, averaged over blocks."""
    drawn = selection.draw(kernel.norms(system.rows), rank, sampling, generator)
    rows = kernel.pick(system.rows, drawn.index, drawn.weight)
    inverse, _ = woodbury.damped_inverse(kernel.gram(rows), system.damping)
    squares = drawn.weight.square()
    size = (squares.sum(-1).square() / squares.square().sum(-1)).mean()
    return Kept(woodbury.apply(rows, inverse, system.damping, system.matrix), ("kis_ess", float(size)))


def compare(update: Tensor, exact_update: Tensor) -> Sums:
    """Return the sums over all coordinates of an update and of the exact update."""
    u, reference = update.flatten(), exact_update.flatten()
    rest = u - reference
    return Sums(*torch.stack([rest.dot(rest), u.dot(u), reference.dot(reference), u.dot(reference)]).tolist())
