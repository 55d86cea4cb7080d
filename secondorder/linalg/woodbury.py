"""The Woodbury identity for few rows, which are used directly or interpolate others.

With R rows u, ``F = Σ u uᵀ`` and the kernel ``K = [⟨u, u'⟩]``, the direction is ``(F + λI)⁻¹ V = (V − Σ_n z_n u_n)/λ``
where ``z = M ⟨u, V⟩``::

    direct use          M = (K + λI)⁻¹
    interpolation       M = (S⁻¹ + K)⁻¹ = C (I + Cᵀ K C)⁻¹ Cᵀ,  S = C Cᵀ

Ren & Goldfarb 2019 (arXiv 1906.02353), section 3; Mu et al., HyLo, SC22, with the interpolation corrected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from secondorder.linalg.dense import all_true_on_cpu, anywhere, mirror_upper_, solve_each
from secondorder.linalg.kernel import Rows, add_combination_, gram, project, whole

#: The rungs of the ladder for failed Cholesky factorizations, in multiples of the mean diagonal.
_JITTERS = (1e-6, 1e-4, 1e-2)


def damped_inverse(kernel: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``M = (K + λI)⁻¹`` by Cholesky (SNGD, KIS).

    To a matrix that fails, 1e-6, then 1e-4, then 1e-2 of its mean diagonal is added.

    Args:
        kernel: K, symmetric ``[..., R, R]``, best in float64.
        damping: λ > 0, ``[...]``.

    Returns:
        M ``[..., R, R]``, symmetric bit for bit, and zeros if nothing helped (the direction is V/λ then); and whether
        there is an inverse ``[...]``.
    """
    damped = kernel.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping.to(kernel.dtype)[..., None])
    lower, ok = _cholesky(damped)
    return _checked(anywhere(torch.cholesky_inverse, lower), ok)


def interpolated_inverse(core: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``M = (S⁻¹ + K̂)⁻¹ = C (I + Cᵀ K̂ C)⁻¹ Cᵀ`` with ``S = C Cᵀ``, inverting nothing undamped (HyLo, KID).

    Args:
        core: S, symmetric positive definite ``[..., R, R]``.
        kernel: K̂ of the kept rows, symmetric ``[..., R, R]``, of the dtype of ``core``.

    Returns:
        M and whether there is one, as :func:`damped_inverse` returns them, with the same ladder.
    """
    root, ok_core = _cholesky(core)
    inner = mirror_upper_(root.mT @ kernel @ root)
    inner.diagonal(dim1=-2, dim2=-1).add_(1)
    lower, ok = _cholesky(inner)
    half = anywhere(torch.linalg.solve_triangular, lower, root.mT, upper=False)
    return _checked(half.mT @ half, ok & ok_core)


def block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """Return the block diagonal matrix ``[..., Σr_p, Σr_p]`` of square blocks ``[..., r_p, r_p]``."""
    if len(blocks) == 1:
        return blocks[0]
    sizes = [block.shape[-1] for block in blocks]
    out = blocks[0].new_zeros(*blocks[0].shape[:-2], sum(sizes), sum(sizes))
    start = 0
    for block, size in zip(blocks, sizes, strict=True):
        out[..., start : start + size, start : start + size] = block
        start += size
    return out


def apply(rows: Rows, inverse: Tensor, damping: Tensor, matrix: Tensor) -> Tensor:
    """Return ``(V − Σ_n z_n u_n)/λ`` with ``z = M ⟨u, V⟩``, by Woodbury: the direction of SNGD, KIS and KID.

    This costs ``4 R S d_i d_o`` flops; only the result is as large as V. For a V that the rows span, the difference
    cancels: the relative error is then that of the working precision times the largest eigenvalue of F over λ.

    Args:
        rows: The R kept rows, finite even where M is 0.
        inverse: M ``[..., R, R]``, used in its own precision.
        damping: λ ``[...]``, the one that is in M.
        matrix: V ``[..., d_o, n_a]``.

    Returns:
        The direction, in the shape of V and in separate memory.
    """
    dots = project(rows, matrix).to(inverse.dtype)
    z = (inverse @ dots[..., None]).squeeze(-1) / damping.to(inverse.dtype)[..., None]
    out = matrix / damping.to(matrix.dtype)[..., None, None]
    add_combination_(out, rows, z.neg_())
    return out


def exact_update(rows: Rows, damping: Tensor, matrix: Tensor) -> Tensor:
    """Return ``(F + λI)⁻¹ V [..., d_o, n_a]`` from all rows, ``λ > 0 [...]``: SNGD, inverting in float64."""
    return apply(rows, damped_inverse(gram(rows).double(), damping)[0], damping, matrix)


def curvature(rows: Rows, inverse: Tensor, damping: Tensor) -> Tensor:
    """Return the matrix F̂ in ``(F̂ + λI)⁻¹ = (I − Û M Ûᵀ)/λ`` of :func:`apply`: ``F̂ = λ Û M (I − K̂M)⁻¹ Ûᵀ``.

    Costs the square of the number of parameters in memory and makes a device wait: for analysis of small layers.

    Args:
        rows: The R kept rows.
        inverse: M ``[..., R, R]``, singular or not.
        damping: λ ``[...]``.

    Returns:
        F̂ ``[..., d_o·n_a, d_o·n_a]`` over row-major parameters, float64, symmetric.
    """
    u, inverse = _vectors(rows), inverse.double()
    rest = torch.eye(rows.n, dtype=u.dtype, device=u.device) - u @ u.mT @ inverse
    found = u.mT @ solve_each(rest, inverse) @ u
    return found.add(found.mT) * (damping.double() / 2)[..., None, None]


def second_moment(rows: Rows) -> Tensor:
    """Return ``Σ_n u_n u_nᵀ [..., d_o·n_a, d_o·n_a]`` over row-major parameters in float64, for small layers."""
    u = _vectors(rows)
    return u.mT @ u


def _vectors(rows: Rows) -> Tensor:
    """Return per-example gradients ``[..., n, d_o·n_a]`` in float64, row-major."""
    a = rows.a
    if a is not None:
        a = F.one_hot(a, rows.columns).double() if not a.is_floating_point() else a.double()
    return whole(Rows(a, rows.g.double(), rows.homogeneous)).g.squeeze(-2)


def _cholesky(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return lower factors of ``[..., n, n]``, using a ladder of jitters; the identity and False if all fail."""
    lower, ok = _attempt(x)
    mean = x.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    for jitter in _JITTERS:
        if x.device.type == "cpu" and all_true_on_cpu(ok):
            break  # a device is not read: it climbs the whole ladder
        jittered = x.clone()
        jittered.diagonal(dim1=-2, dim2=-1).add_(jitter * mean)
        again, found = _attempt(jittered)
        lower = torch.where((found & ~ok)[..., None, None], again, lower)
        ok = ok | found
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.where(ok[..., None, None], lower, identity), ok


def _attempt(x: Tensor) -> tuple[Tensor, Tensor]:
    lower, info = anywhere(torch.linalg.cholesky_ex, x)
    return lower, (info == 0) & torch.isfinite(lower.diagonal(dim1=-2, dim2=-1).sum(-1))


def _checked(inverse: Tensor, ok: Tensor) -> tuple[Tensor, Tensor]:
    """Make the inverse symmetric bit for bit, and zero where it is not usable."""
    inverse = mirror_upper_(inverse.mT if inverse.mT.is_contiguous() else inverse)
    ok = ok & torch.isfinite(inverse.diagonal(dim1=-2, dim2=-1).sum(-1))
    return torch.where(ok[..., None, None], inverse, torch.zeros_like(inverse)), ok
