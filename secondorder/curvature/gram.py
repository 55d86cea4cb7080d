r"""The m×m side of a gradient window: pure mathematics on its Gram matrix S = G Gᵀ.

Everything a window method computes is ``u = Gᵀ a + c·r`` for a vector ``x = Gᵀ b + r`` that is given by coefficients
``b`` on the rows (``e_j`` when x is the newest row) and a rest ``r`` outside, of which only the dots ``q = G r`` are
needed here. With ``φ(GᵀG) Gᵀ = Gᵀ φ(G Gᵀ)`` ("push-through"),

.. math::
    u = φ(GᵀG)\,x = Gᵀ\,[f(S)\,b + h(S)\,q] + f(0)\,r, \qquad h(s) = (f(s) − f(0)) / s .

The part inside the span never meets ``x/λ``, so it suffers no cancellation however small λ is.

M-FAC: ``f(s) = 1/(λ + s/n)`` (Frantar et al. 2021, arXiv 2107.03356). GGT: ``f(s) = 1/(√s + ε)`` (Agarwal et al. 2018,
arXiv 1806.02958). All matrices are float64, the lower triangle of S packed row by row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

#: Relative error of a dot, by the precision in which rows are multiplied: eigenvalues of S below this are noise.
NOISE = {torch.float32: 2e-7, torch.float64: 1e-13}
#: Largest b/w for which GGT divides by the decay w of a row instead of treating the row as outside of the span.
_LARGEST_RATIO = 1e4


def packed_size(m: int) -> int:
    """Entries of a packed lower triangle."""
    return m * (m + 1) // 2


def packed_row(slot: Tensor, m: int) -> Tensor:
    """Positions ``[m]`` of row and column ``slot`` (0-dim int64) in the packed triangle."""
    i = torch.arange(m, device=slot.device)
    low, high = torch.minimum(i, slot), torch.maximum(i, slot)
    return high * (high + 1) // 2 + low


def unpack_lower(packed: Tensor, t: int) -> Tensor:
    """The leading ``[t, t]`` lower triangle, zeros above its diagonal."""
    lower = packed.new_zeros(t, t)
    below = torch.ones(t, t, dtype=torch.bool, device=packed.device).tril_()
    return lower.masked_scatter_(below, packed[: packed_size(t)])


def pack_lower(full: Tensor) -> Tensor:
    """The packed lower triangle of ``[t, t]``."""
    return full[torch.ones_like(full, dtype=torch.bool).tril_()]


def symmetric(lower: Tensor) -> Tensor:
    """The full matrix of a lower triangle ``[..., t, t]``."""
    return lower + lower.tril(-1).mT


def newest(pos: Tensor, m: int) -> Tensor:
    """Slot of the newest row, from the slot of the next one."""
    return (pos - 1) % m


def mfac_damping(lower: Tensor, damping: float, mode: str, n: Tensor) -> Tensor:
    """λ ``[k]``: ``damping``, or its multiple of the mean squared row norm tr(S)/n."""
    if mode == "absolute":
        return torch.full_like(n, damping)
    # A window of zeros has no scale of its own; what it preconditions is zero whatever λ is.
    return (damping * trace(lower) / n).clamp(min=1e-30)


def trace(lower: Tensor) -> Tensor:
    """``tr S`` of ``[..., t, t]``."""
    return lower.diagonal(dim1=-2, dim2=-1).sum(-1)


def mfac_cholesky(lower: Tensor, b: Tensor, q: Tensor | None, damping: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients of M-FAC by Cholesky.

    ``f(S) b + h(S) q = (λI + S/n)⁻¹ (b − q/(nλ))``: one solve for both parts.

    Args:
        lower: Lower triangles of S ``[k, t, t]``.
        b: Coefficients of x on the rows ``[k, t]``.
        q: Dots of the rows with the rest of x ``[k, t]``, or None.
        damping: λ ``[k]``.
        n: Number that the sum over rows is divided by ``[k]``.

    Returns:
        Coefficients ``[k, t]`` and whether the factorisation succeeded ``[k]``.
    """
    rhs = mfac_right_side(b, q, damping, n)
    matrix = lower / n[:, None, None]
    matrix.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
    factor, info = torch.linalg.cholesky_ex(matrix)
    a = torch.cholesky_solve(rhs[..., None], factor)[..., 0]
    return a, (info == 0) & torch.isfinite(a).all(-1)


def mfac_right_side(b: Tensor, q: Tensor | None, damping: Tensor, n: Tensor) -> Tensor:
    """``b − q/(nλ)``."""
    return b if q is None else b - q / (n * damping)[:, None]


def mfac_eigh(
    lower: Tensor, b: Tensor, q: Tensor | None, damping: Tensor, n: Tensor, noise: float
) -> tuple[Tensor, Tensor]:
    """Coefficients of M-FAC by eigendecomposition, without the eigenvalues that are noise.

    Returns:
        Coefficients ``[k, t]``, and those that nothing was left out of, which tell whether filtering was needed.
    """
    rhs = mfac_right_side(b, q, damping, n)
    values, vectors = torch.linalg.eigh(lower)
    keep = values > tolerance(values, noise)
    inside = (vectors.mT @ rhs[..., None])[..., 0] / (damping[:, None] + values.clamp(min=0) / n[:, None])
    both = torch.stack([inside * keep, inside], -1)
    a, unfiltered = (vectors @ both).unbind(-1)
    return a, unfiltered


def tolerance(values: Tensor, noise: float) -> Tensor:
    """Eigenvalues at or below this are rounding ``[..., 1]``."""
    relative = max(values.shape[-1] * torch.finfo(values.dtype).eps, noise)
    return relative * values.amax(-1, keepdim=True).clamp(min=0)


def mfac_amplification(a: Tensor, rhs: Tensor, damping: Tensor, n: Tensor, trace_s: Tensor) -> Tensor:
    """``‖a‖ √tr S / √(aᵀSa)`` ``[k]``: how much larger the coefficients are than what they combine to.

    The relative error of the direction is about float32's epsilon times this. ``S a = n (rhs − λ a)`` saves a product,
    and the trace stands for the largest eigenvalue, which it exceeds by at most the rank.

    Returns:
        The amplification, 0 for a window of zeros.
    """
    square = (a * a).sum(-1)
    along = n * ((a * rhs).sum(-1) - damping * square)
    floor = torch.finfo(a.dtype).eps * n * (a * rhs).sum(-1).abs()
    return torch.where(trace_s > 0, (square * trace_s / torch.maximum(along, floor)).sqrt(), 0.0)


def ggt_coefficients(
    lower: Tensor, w: Tensor, b: Tensor, q: Tensor | None, eps: float, outside: float, noise: float
) -> Tensor:
    """Coefficients of GGT for the decayed window ``diag(w) G``.

    Args:
        lower: Lower triangles of S ``[k, t, t]``, without decay.
        w: Decay of each row ``[k, t]``, 1 for the newest.
        b: Coefficients of x on the rows ``[k, t]``.
        q: Dots of the rows with the rest of x ``[k, t]``, or None.
        eps: ε.
        outside: c, what the complement of the span is multiplied with; 1/ε is the exact inverse.
        noise: Relative size of eigenvalues that are rounding.

    Returns:
        Coefficients ``[k, t]``.
    """
    values, vectors = torch.linalg.eigh(lower * w[:, :, None] * w[:, None, :])
    keep = values > tolerance(values, noise)
    root = values.clamp(min=0).sqrt()
    f = keep / (root + eps)
    h = torch.where(keep, (1 / (root + eps) - outside) / torch.where(keep, values, 1.0), 0.0)

    def apply(function: Tensor, x: Tensor) -> Any:
        return (vectors @ (function * (vectors.mT @ x[..., None])[..., 0])[..., None])[..., 0]

    # A row that is almost forgotten is no basis for x any more: that part of x counts as outside of the span.
    basis = b.abs() <= _LARGEST_RATIO * w
    inside = torch.where(basis, b / torch.where(basis & (w > 0), w, 1.0), 0.0)
    a = w * apply(f, inside)
    rest = torch.where(basis, 0.0, b)
    dots = (symmetric(lower) @ rest[..., None])[..., 0]
    if q is not None:
        dots = dots + q
    total: Tensor = a + w * apply(h, w * dots) + outside * rest
    return total


def decay(beta: float, pos: Tensor, m: int, t: int) -> Tensor:
    """``β^age`` of the first t slots ``[t]``, the newest row being of age 0."""
    age = (newest(pos, m) - torch.arange(t, device=pos.device)) % m
    if beta == 1.0:
        return torch.ones_like(age, dtype=torch.float64)
    if beta == 0.0:
        return (age == 0).to(torch.float64)
    return torch.exp(age.to(torch.float64) * math.log(beta))


def metrics(lower: Tensor, a: Tensor, slot: Tensor) -> dict[str, Tensor]:
    """How a direction ``u = Gᵀa`` relates to the newest row ``g``, from the Gram matrix alone.

    Args:
        lower: Lower triangle of S ``[t, t]``.
        a: Coefficients ``[t]``.
        slot: Slot of the newest row, 0-dim.

    Returns:
        0-dim tensors: ``cos``, ``angle`` in degrees, ``norm_ratio`` ‖u‖/‖g‖, ``gradient_norm``, ``direction_norm``,
        ``coefficient_norm``, ``amplification`` and ``effective_rank`` (the exponential of the entropy of S's spectrum).
    """
    s = symmetric(lower)
    row, spectrum = s @ a, torch.linalg.eigvalsh(lower).clamp(min=0)
    size, own = (a @ row).clamp(min=0).sqrt(), lower.diagonal().index_select(0, slot.reshape(1))[0].sqrt()
    tiny = torch.finfo(s.dtype).tiny
    cosine = (row.index_select(0, slot.reshape(1))[0] / (size * own).clamp(min=tiny)).clamp(-1, 1)
    share = spectrum / spectrum.sum().clamp(min=tiny)
    return {
        "cos": cosine,
        "angle": torch.rad2deg(torch.arccos(cosine)),
        "norm_ratio": size / own.clamp(min=tiny),
        "gradient_norm": own,
        "direction_norm": size,
        "coefficient_norm": a.norm(),
        "amplification": a.norm() * spectrum[-1].sqrt() / size.clamp(min=tiny),
        "effective_rank": torch.exp(-torch.special.xlogy(share, share).sum()),
    }
