r"""A Kronecker eigenbasis and the second moments of gradients in it: the mathematics of EK-FAC.

Let ``G_n = Σ_s g_{n,s} a_{n,s}ᵀ`` be the gradient of example n, summed over positions *before* it is squared, and
``Q_A``, ``Q_G`` orthogonal bases of the two factors::

    s     = (1/N) Σ_n (Q_Gᵀ G_n Q_A)²                         elementwise square, [n_g, n_a]
    F_EK  = (Q_G ⊗ Q_A) diag(vec s) (Q_G ⊗ Q_A)ᵀ              over row-major vec([W | b])
    V     = Q_G [(Q_Gᵀ ∇ Q_A) ⊘ (s + λ)^p] Q_Aᵀ               p = 1: (F_EK + λI)⁻¹ ∇

s is the diagonal of the exact block in this basis, so ``F_EK`` is the closest of all operators that are diagonal there
(George et al. 2018, arXiv 1806.03884). :mod:`secondorder.linalg.gradient_squares` computes the sum. The refresh by QR
is that of SOAP (Vyas et al. 2024, arXiv 2409.11321).

Where a factor is singular, as after a batch with fewer rows than columns, any basis of its null space consists of
eigenvectors, and rounding decides which one a factorization returns. s is therefore averaged over the null space
(:func:`pool`): ``F_EK`` then depends on the space and not on the basis, and is the closest of all such operators.

Every tensor may lead with a group dimension ``[Γ, ...]``. A basis may be None, which means the identity (a diagonal
factor). Products belong in :func:`secondorder.linalg.dense.full_precision`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from secondorder.linalg.dense import Workspace, aligned, anywhere, empty_aligned, product

#: This jitter makes the orthonormal completion of a null space reproducible; it is a multiple of the mean eigenvalue.
_JITTER = 1e-6
#: An eigenvalue counts as 0 below this many times ``√n ε`` of the largest. At widths of 256 to 1024, rounding gives up
#: to a tenth of this instead of 0, and the smallest nonzero eigenvalues were at least five times as large.
_NULL = 2.0
#: Bounds of the error of a rotated gradient, as multiples of ε: of each coordinate relative to the gradient's norm, and
#: of the angle ``ε s_max / s_j`` by which rounding turns a null space towards an eigenvector of another eigenvalue s_j.
#: At the same widths, rounding gives up to a twentieth of each.
_ROTATION, _TURN = 8.0, 4.0
#: Largest accepted error of ``Q Qᵀ v = v`` for a probe vector of unit entries, as for eigenvectors.
_ORTHOGONALITY = 1e-4


def rotate(x: Tensor, basis_a: Tensor | None, basis_g: Tensor | None, workspace: Workspace | None = None) -> Tensor:
    """Return ``Q_Gᵀ X Q_A [..., n_g, n_a]``, the coordinates in the eigenbasis; X itself if both bases are None."""
    basis_a, basis_g = _aligned(basis_a, workspace), _aligned(basis_g, workspace)
    if basis_g is not None:
        x = product(basis_g.mT, x, workspace)
    return x if basis_a is None else product(x, basis_a, workspace)


def rotate_back(
    x: Tensor, basis_a: Tensor | None, basis_g: Tensor | None, workspace: Workspace | None = None
) -> Tensor:
    """Return ``Q_G X Q_Aᵀ [..., n_g, n_a]``, the inverse of :func:`rotate`, in memory outside of the workspace."""
    basis_a, basis_g = _aligned(basis_a, workspace), _aligned(basis_g, workspace)
    if basis_g is not None:
        x = product(basis_g, x, None if basis_a is None else workspace)
    return x if basis_a is None else product(x, basis_a.mT)


def precondition(
    grad: Tensor,
    basis_a: Tensor | None,
    basis_g: Tensor | None,
    scale: Tensor,
    damping: Tensor | None,
    power: float = 1.0,
    workspace: Workspace | None = None,
    damp_root: bool = False,
    is_rotated: bool = False,
    silent: Tensor | None = None,
) -> Tensor:
    """Return ``Q_G [(Q_Gᵀ ∇ Q_A) ⊘ (s + λ)^p] Q_Aᵀ``; for p = 1 it solves ``(F_EK + λI) vec(V) = vec(∇)``.

    Args:
        grad: Gradient matrix ``[..., n_g, n_a]``.
        basis_a: ``Q_A [..., n_a, n_a]`` or None.
        basis_g: ``Q_G [..., n_g, n_g]`` or None.
        scale: s ``[..., n_g, n_a]``.
        damping: λ ``[...]``, used no smaller than the rounding error of the largest entry of s; None if s contains it.
        power: p, 1 for the natural gradient, 0.5 to whiten.
        workspace: Memory for temporaries.
        is_rotated: Whether ``grad`` is in the basis already.
        damp_root: Whether to divide by ``s^p + λ`` instead, as Adam does for p = 0.5, with λ unchanged.
        silent: Coordinates ``[..., n_g, n_a]`` in the basis along which V is 0.

    Returns:
        V, in the shape of ``grad`` and in separate memory.
    """
    rotated = grad if is_rotated else rotate(grad, basis_a, basis_g, workspace)
    # Without a basis the quotient is the result, which must outlive the workspace.
    memory = None if basis_a is None and basis_g is None else workspace
    divisor = empty_aligned(scale.shape, scale, memory)
    if damping is None:
        _power_(divisor.copy_(scale), power)
    elif damp_root:
        _power_(divisor.copy_(scale), power).add_(damping[..., None, None])
    else:
        # Below rounding of the largest entry there is no curvature to divide by, only noise.
        floor = torch.maximum(damping, torch.finfo(scale.dtype).eps * scale.amax((-2, -1)))
        _power_(torch.add(scale, floor[..., None, None], out=divisor), power)
    if silent is not None:
        divisor.masked_fill_(silent, torch.inf)
    return rotate_back(torch.div(rotated, divisor, out=divisor), basis_a, basis_g, workspace)


def dense(scale: Tensor, basis_a: Tensor | None, basis_g: Tensor | None) -> Tensor:
    """Return ``(Q_G ⊗ Q_A) diag(vec s) (Q_G ⊗ Q_A)ᵀ [..., n_g·n_a, n_g·n_a]`` from s ``[..., n_g, n_a]``."""
    n_g, n_a = scale.shape[-2:]
    q_a = scale.new_ones(n_a).diag() if basis_a is None else basis_a
    q_g = scale.new_ones(n_g).diag() if basis_g is None else basis_g
    vectors = (q_g[..., :, None, :, None] * q_a[..., None, :, None, :]).flatten(-2).flatten(-3, -2)
    return (vectors * scale.flatten(-2)[..., None, :]) @ vectors.mT


def overlap(old_basis: Tensor | None, new_basis: Tensor | None) -> Tensor | None:
    """Return ``R = Q'ᵀ Q [..., n, n]``, which maps coordinates from the old to the new basis; None is the identity."""
    if old_basis is None:
        return None if new_basis is None else new_basis.mT
    return old_basis if new_basis is None else new_basis.mT @ old_basis


def transport(scale: Tensor, r_a: Tensor | None, r_g: Tensor | None) -> Tensor:
    """Return ``(R_G ∘ R_G) s (R_A ∘ R_A)ᵀ``, the diagonal of the old operator in the new basis.

    Rows and columns of ``R ∘ R`` sum to 1, so the entries stay nonnegative and keep their sum.

    Args:
        scale: s ``[..., n_g, n_a]`` in the old basis.
        r_a: :func:`overlap` of the bases of A ``[..., n_a, n_a]``; None if it did not change.
        r_g: The same for G ``[..., n_g, n_g]``.

    Returns:
        s in the new basis; ``scale`` itself if both are None.
    """
    if r_g is not None:
        scale = product(r_g.square(), scale)
    return scale if r_a is None else product(scale, r_a.square().mT)


def without_rounding(values: Tensor, kept: torch.dtype) -> Tensor:
    """Return eigenvalues ``[..., n]`` with 0 in place of those that cannot be distinguished from 0.

    Args:
        values: Eigenvalues of a positive semi-definite matrix.
        kept: The dtype in which the matrix is kept.

    Returns:
        The eigenvalues, in a new tensor.
    """
    tolerance = max(_NULL * values.shape[-1] ** 0.5 * torch.finfo(values.dtype).eps, _error_of(kept, values.dtype))
    return torch.where(values > tolerance * values.amax(-1, keepdim=True), values, 0.0)


def pool(scale: Tensor, null_a: Tensor | None, null_g: Tensor | None) -> Tensor:
    """Return scales averaged over the null spaces of both factors, which no rotation of their bases changes.

    Args:
        scale: s ``[..., n_g, n_a]``.
        null_a: Which eigenvectors of A span its null space, ``[..., n_a]`` of bool; None for none.
        null_g: The same for G, ``[..., n_g]``.

    s with the mean of each row over the null space of A in all its columns, and in the same way for the rows of the
    null space of G; ``scale`` itself if both are None. The sum does not change.
    """
    for inside, axis in ((_across(null_a, -1), -1), (_across(null_g, -2), -2)):
        if inside is not None:
            total = torch.where(inside, scale, 0.0).sum(axis, keepdim=True)
            scale = torch.where(inside, total / inside.sum(axis, keepdim=True).clamp(min=1), scale)
    return scale


def is_rounding(
    scale: Tensor, values_a: Tensor | None, values_g: Tensor | None, kept: tuple[torch.dtype, torch.dtype]
) -> Tensor | None:
    """Return a mask of squares of a rotated gradient that are rounding errors of 0, which a root must not amplify.

    Along a null space, the gradient of the batches that a factor was estimated from is 0. The numbers there are errors
    of the rotation, and parts of other coordinates that the rounded eigenvectors let through.

    Args:
        scale: Means of the squares ``[..., n_g, n_a]``, pooled.
        values_a: Eigenvalues of A ``[..., n_a]``, 0 in its null space; None without one.
        values_g: The same for G ``[..., n_g]``.
        kept: The dtypes in which factors and bases are kept.

    Returns:
        Coordinates in a null space with a square within these errors, ``[..., n_g, n_a]`` of bool; None without one.
    """
    error = _ROTATION * torch.finfo(scale.dtype).eps + _error_of(kept[1], scale.dtype) / min(scale.shape[-2:]) ** 0.5
    bound, found = error**2 * scale.sum((-2, -1), keepdim=True), None
    for values, axis in ((values_a, -1), (values_g, -2)):
        if values is None:
            continue
        turn = _TURN * torch.finfo(scale.dtype).eps + _error_of(kept[0], scale.dtype)
        angle = torch.where(values > 0, turn * values.amax(-1, keepdim=True) / values, 0.0).clamp(max=1)
        let_through = (scale * _across(angle.square(), axis)).sum(axis, keepdim=True)
        small = (scale <= bound + let_through) & _across(values == 0, axis)
        found = small if found is None else found | small
    return found


def _error_of(kept: torch.dtype, dtype: torch.dtype) -> float:
    """Return the relative error of numbers that are kept in fewer bits than those of ``dtype``."""
    return torch.finfo(kept).eps / 2 if torch.finfo(kept).eps > torch.finfo(dtype).eps else 0.0


def _across(x: Any, axis: int) -> Any:
    """Reshape ``[..., n]`` to ``[..., 1, n]`` or, along axis -2, to ``[..., n, 1]``; None stays None."""
    return None if x is None else x[..., None, :] if axis == -1 else x[..., :, None]


def qr_refresh(factor: Tensor, basis: Tensor, sweeps: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Bring a basis closer to the eigenvectors of a matrix that changed a little: ``Q ← qr(X Q)``, repeated.

    Columns come out in ascending order of the Rayleigh quotients that they had before, the order of ``linalg.eigh``, so
    that both kinds of refresh can take turns. Inside they are iterated in descending order: each column is cleared of
    those before it, and would otherwise turn towards larger eigenvalues. Nothing waits for a device.

    Args:
        factor: X, symmetric positive semi-definite ``[k, n, n]``, float32 or float64.
        basis: Q, orthogonal ``[k, n, n]``.
        sweeps: Number of iterations, at least 1.

    Returns:
        Rayleigh quotients ``diag(QᵀXQ) [k, n]`` of the new basis, clamped at 0; the new basis ``[k, n, n]``; the column
        of the old basis that each new one continues ``[k, n]``; ``‖X̃ − diag X̃‖/‖X̃‖ [k]`` with ``X̃ = QᵀXQ`` of the new
        basis; and whether that is finite and orthogonal ``[k]``.
    """
    mean = factor.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None]
    unit = torch.where(mean > 0, mean, torch.ones_like(mean))  # in this unit no square under- or overflows
    x = (factor + factor.mT) / (2 * unit[..., None])
    x.diagonal(dim1=-2, dim2=-1).add_(_JITTER)
    image = x @ basis
    permutation = (basis * image).sum(-2).argsort(dim=-1, stable=True)
    descending = permutation.flip(-1)[:, None, :].expand_as(basis)
    image = image.gather(-1, descending)
    for _ in range(sweeps):
        q, r = anywhere(torch.linalg.qr, image)
        # A positive diagonal of R makes the result unique, and each column continues its predecessor.
        q = torch.where(r.diagonal(dim1=-2, dim2=-1)[:, None, :] < 0, -q, q)
        image = x @ q
    q, image = q.flip(-1), image.flip(-1)
    values = (q * image).sum(-2)
    # ‖XQ − Q diag‖ is ‖QᵀXQ − diag‖, without another product and without cancellation.
    offdiag = torch.linalg.vector_norm(image - q * values[:, None, :], dim=(-2, -1))
    probe = torch.ones_like(q[..., :1])
    error = (q @ (q.mT @ probe) - probe).abs().amax((-2, -1))
    ok = (error < _ORTHOGONALITY * max(1.0, q.shape[-1] / 1000)) & torch.isfinite(values).all(-1)
    values = (values - _JITTER).clamp_(min=0) * unit
    return values, q, permutation, offdiag / torch.linalg.vector_norm(image, dim=(-2, -1)), ok


def _aligned(basis: Tensor | None, workspace: Workspace | None) -> Tensor | None:
    return basis if basis is None or workspace is None else aligned(basis, workspace)


def _power_(x: Tensor, power: float) -> Tensor:
    """Compute ``x^power`` in place; the two powers in use need no logarithm."""
    return x if power == 1 else x.sqrt_() if power == 0.5 else x.pow_(power)
