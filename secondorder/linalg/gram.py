r"""The m×m side of a gradient window: pure functions of its Gram matrix S = G Gᵀ.

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
from typing import NamedTuple

import torch
from torch import Tensor

from secondorder.linalg.dense import anywhere


def packed_size(m: int) -> int:
    """Return the number of entries of a packed lower triangle."""
    return m * (m + 1) // 2


def packed_row(slot: Tensor, m: int) -> Tensor:
    """Return the positions ``[m]`` of row and column ``slot`` (0-dim int64) in the packed triangle."""
    i = torch.arange(m, device=slot.device)
    low, high = torch.minimum(i, slot), torch.maximum(i, slot)
    return high * (high + 1) // 2 + low


def unpack_lower(packed: Tensor, t: int) -> Tensor:
    """Return the leading ``[t, t]`` lower triangle, with zeros above its diagonal."""
    lower = packed.new_zeros(t, t)
    below = torch.ones(t, t, dtype=torch.bool, device=packed.device).tril_()
    return lower.masked_scatter_(below, packed[: packed_size(t)])


def pack_lower(full: Tensor) -> Tensor:
    """Return the packed lower triangle of ``[t, t]``."""
    return full[torch.ones_like(full, dtype=torch.bool).tril_()]


def symmetric(lower: Tensor) -> Tensor:
    """Return the full matrix of a lower triangle ``[..., t, t]``."""
    return lower + lower.tril(-1).mT


def largest_bound(full: Tensor) -> Tensor:
    """Return ``(tr S⁸)^(1/8)``, 0-dim, a bound on the largest eigenvalue of a positive semi-definite ``[t, t]``."""
    size = torch.linalg.matrix_norm(full).clamp(min=torch.finfo(full.dtype).tiny)
    power = full / size
    for _ in range(2):
        power = power @ power
    bound: Tensor = size * torch.linalg.matrix_norm(power) ** 0.25
    return bound


def newest(pos: Tensor, m: int) -> Tensor:
    """Return the slot of the newest row, from the slot of the next one."""
    return (pos - 1) % m


def mfac_damping(squares: Tensor, damping: float, mode: str, n: Tensor) -> Tensor:
    """Return λ ``[k]``: ``damping``, or its multiple of the mean squared row norm tr(S)/n."""
    if mode == "absolute":
        return torch.full_like(n, damping)
    # A window of zeros has no scale, and the vectors that it preconditions are zero for every λ.
    return (damping * squares.sum(-1) / n).clamp(min=1e-36)


def mfac_cholesky_(lower: Tensor, rhs: Tensor, damping: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coefficients of M-FAC by Cholesky: ``f(S) b + h(S) q = (λI + S/n)⁻¹ (b − q/(nλ))``, in one solve.

    Args:
        lower: Lower triangles of S ``[k, t, t]``, overwritten.
        rhs: :func:`mfac_right_side` ``[k, t]``.
        damping: λ ``[k]``.
        n: Divisor of the sum over rows ``[k]``.

    Returns:
        Coefficients ``[k, t]`` and whether the factorization succeeded ``[k]``.
    """
    lower.diagonal(dim1=-2, dim2=-1).add_((n * damping)[:, None])
    factor, info = anywhere(torch.linalg.cholesky_ex, lower)  # does not wait for a device
    a = anywhere(torch.cholesky_solve, (rhs * n[:, None])[..., None], factor)[..., 0]
    return a, (info == 0) & torch.isfinite(a).all(-1)


def mfac_right_side(b: Tensor, q: Tensor | None, damping: Tensor, n: Tensor) -> Tensor:
    """Return ``b − q/(nλ)``."""
    return b if q is None else b - q / (n * damping)[:, None]


def mfac_amplification(squares: Tensor, a: Tensor, rhs: Tensor, damping: Tensor, n: Tensor) -> Tensor:
    """Return ``‖D a‖ / √(aᵀSa)`` ``[k]``, with row lengths D: how much larger the terms of ``Gᵀa`` are than their sum.

    The relative error of the direction is about float32's epsilon times the square of this.
    ``S a = n (rhs − λ a)`` saves a product.

    Args:
        squares: Squared lengths of the rows ``[k, t]``, the diagonal of S.
        a: Coefficients ``[k, t]``.
        rhs: Right-hand side that they solve for ``[k, t]``.
        damping: λ ``[k]``.
        n: Divisor of the sum over rows ``[k]``.

    Returns:
        The amplification; 0 for a direction of zeros.
    """
    terms = (a * a * squares).sum(-1)
    gain = (a * rhs).sum(-1)
    together = torch.maximum(n * (gain - damping * (a * a).sum(-1)), torch.finfo(a.dtype).eps * n * gain.abs())
    return torch.where(terms > 0, (terms / together).sqrt(), 0.0)


class Spectrum(NamedTuple):
    """An orthonormal basis B of the rows' span, ``Gᵀ = Bᵀ Mᵀ``, in which ``GᵀG`` is a small diagonal matrix.

    Attributes:
        back: Map from the basis to coefficients on the rows ``[k, t, t]``: ``Bᵀ y = Gᵀ (back y)``.
        into: Map from coefficients to the basis ``[k, t, t]``: ``Gᵀ b = Bᵀ (into b)``.
        values: Eigenvalues θ of ``GᵀG`` in the span ``[k, t]``.
    """

    back: Tensor
    into: Tensor
    values: Tensor

    def apply(self, f: Tensor, f_less_outside: Tensor, b: Tensor, q: Tensor | None) -> Tensor:
        """Return the coefficients ``[k, t]`` of ``φ(GᵀG) x`` inside of the span, for ``x = Gᵀ b + r`` and ``q = G r``.

        Args:
            f: ``φ(θ)`` ``[k, t]``.
            f_less_outside: ``φ(θ)`` minus the factor of the complement of the span ``[k, t]``.
            b: Coefficients of x on the rows ``[k, t]``.
            q: Dots of the rows with r ``[k, t]``, or None.

        Returns:
            Coefficients.
        """
        y = f * (self.into @ b[..., None])[..., 0]
        if q is not None:
            y = y + f_less_outside * (self.back.mT @ q[..., None])[..., 0]
        a: Tensor = (self.back @ y[..., None])[..., 0]
        return a


def spectrum(lower: Tensor, noise: float, w: Tensor | None = None) -> Spectrum:
    """Return the eigenvalues of ``GᵀG`` without the directions that consist of rounding errors.

    Rounding errors are identified for rows scaled to equal length, since dots have errors relative to the lengths of
    their two rows, and one huge gradient must not make the following ones look like noise. With row lengths D,
    ``D⁻¹ S D⁻¹ = V Λ Vᵀ``; the basis is ``B = Λ^(-1/2) Vᵀ D⁻¹ G`` and ``GᵀG = Bᵀ H B``, ``H = Λ^½ Vᵀ D² V Λ^½``.

    Args:
        lower: Lower triangles of S ``[k, t, t]``.
        noise: Relative size of eigenvalues Λ that are rounding.
        w: Weights ``[k, t]`` of the rows in H: then it is that of ``diag(w) G``, in the same basis.

    Returns:
        The spectrum; directions that are left out have zeros in it.
    """
    length = lower.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    inverse = torch.where(length > 0, 1 / length, 0.0)
    small, vectors = anywhere(torch.linalg.eigh, lower * inverse[:, :, None] * inverse[:, None, :])
    keep = small > max(small.shape[-1] * torch.finfo(small.dtype).eps, noise) * small.amax(-1, keepdim=True)
    root = torch.where(keep, small.clamp(min=0), 0.0).sqrt()
    mixed = vectors * root[:, None, :]
    rows = mixed * (length if w is None else length * w)[:, :, None]
    values, rotation = anywhere(torch.linalg.eigh, rows.mT @ rows)
    into = rotation.mT @ (mixed * length[:, :, None]).mT
    back = (vectors * torch.where(keep, 1 / root, 0.0)[:, None, :] * inverse[:, :, None]) @ rotation
    return Spectrum(back, into, values.clamp(min=0))


def mfac_filtered(lower: Tensor, b: Tensor, q: Tensor | None, damping: Tensor, n: Tensor, noise: float) -> Tensor:
    """Return coefficients ``[k, t]`` of M-FAC like :func:`mfac_cholesky_`, without directions of rounding errors."""
    found, damping, n = spectrum(lower, noise), damping[:, None], n[:, None]
    f = 1 / (damping + found.values / n)
    return found.apply(f, -f * found.values / (n * damping), b, q)


def ggt_coefficients(
    lower: Tensor, w: Tensor, b: Tensor, q: Tensor | None, eps: float, outside: float, noise: float
) -> Tensor:
    """Return the coefficients of GGT for the decayed window ``diag(w) G``.

    The decay only enters the eigenvalues: x and u are combinations of the rows without decay, so nothing is
    divided by the weight of an almost forgotten row.

    Args:
        lower: Lower triangles of S ``[k, t, t]``, without decay.
        w: Decay of each row ``[k, t]``, 1 for the newest.
        b: Coefficients of x on the rows ``[k, t]``.
        q: Dots of the rows with the rest of x ``[k, t]``, or None.
        eps: ε.
        outside: c, the factor of the complement of the span; 1/ε is the exact inverse.
        noise: Relative size of eigenvalues that are rounding.

    Returns:
        Coefficients ``[k, t]``.
    """
    found = spectrum(lower, noise, w)
    f = 1 / (found.values.sqrt() + eps)
    return found.apply(f, f - outside, b, q)


def decay(beta: float, pos: Tensor, m: int, t: int) -> Tensor:
    """Return ``β^age`` of the first t slots ``[t]``, where the newest row has age 0."""
    age = (newest(pos, m) - torch.arange(t, device=pos.device)) % m
    if beta == 1.0:
        return torch.ones_like(age, dtype=torch.float64)
    if beta == 0.0:
        return (age == 0).to(torch.float64)
    return torch.exp(age.to(torch.float64) * math.log(beta))


def metrics(lower: Tensor, a: Tensor, slot: Tensor) -> dict[str, Tensor]:
    """Compare a direction ``u = Gᵀa`` with the newest row ``g``, using only the Gram matrix.

    Args:
        lower: Lower triangle of S ``[t, t]``.
        a: Coefficients ``[t]``.
        slot: Slot of the newest row, 0-dim.

    Returns:
        0-dim tensors: ``cos``, ``angle`` in degrees, ``norm_ratio`` ‖u‖/‖g‖, ``gradient_norm``, ``direction_norm``,
        ``coefficient_norm``, ``amplification`` and ``effective_rank`` (the exponential of the entropy of S's spectrum).
    """
    s = symmetric(lower)
    row, eigenvalues = s @ a, anywhere(torch.linalg.eigvalsh, lower).clamp(min=0)
    size, own = (a @ row).clamp(min=0).sqrt(), lower.diagonal().index_select(0, slot.reshape(1))[0].sqrt()
    tiny = torch.finfo(s.dtype).tiny
    cosine = (row.index_select(0, slot.reshape(1))[0] / (size * own).clamp(min=tiny)).clamp(-1, 1)
    share = eigenvalues / eigenvalues.sum().clamp(min=tiny)
    return {
        "cos": cosine,
        "angle": torch.rad2deg(torch.arccos(cosine)),
        "norm_ratio": size / own.clamp(min=tiny),
        "gradient_norm": own,
        "direction_norm": size,
        "coefficient_norm": a.norm(),
        "amplification": (a * s.diagonal().sqrt()).norm() / size.clamp(min=tiny),
        "effective_rank": torch.exp(-torch.special.xlogy(share, share).sum()),
    }
