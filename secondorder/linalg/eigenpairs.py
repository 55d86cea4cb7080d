r"""Leading eigenvectors of symmetric matrices, and products with matrices of which only these are known.

A symmetric matrix ``X [n, n]`` is approximated by its r leading eigenpairs and one number for all others,

.. math::
    X \approx U \operatorname{diag}(d)\, U^\top + \bar d\, (I - U U^\top), \qquad
    \bar d = \frac{\operatorname{tr} X - \sum_i d_i}{n - r},

which has the trace of X and stays positive semi-definite. Eigenvalues ``[1 + r]`` start with the mean d̄ of the others.
The pairs are found by randomized subspace iteration (Halko, Martinsson & Tropp 2011, arXiv 0909.4061, algorithm 4.4),
as Puiu 2022 (arXiv 2206.15397) does for K-FAC.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from secondorder.linalg.dense import Workspace, anywhere, eigh_psd, product

#: Columns that the iteration carries beyond those that are kept, and its number of products with the matrix.
OVERSAMPLING, PASSES = 8, 4


def leading_eigh(x: Tensor, rank: int, host_checks: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading eigenpairs of positive semi-definite matrices; equal matrices give equal results.

    Args:
        x: Symmetric matrices ``[k, n, n]``, float32 or float64.
        rank: r, the number of pairs, less than n.
        host_checks: As in :func:`secondorder.linalg.dense.eigh_psd`.

    Returns:
        Eigenvalues ``[k, 1 + r]`` in ascending order, after the mean of the n - r others; eigenvectors ``[k, n, r]`` in
        columns; and whether each matrix came out well, ``[k]``.
    """
    n = x.shape[-1]
    width = min(n, rank + OVERSAMPLING)
    trace = x.diagonal(dim1=-2, dim2=-1).sum(-1)
    unit = torch.where(trace > 0, trace / n, torch.ones_like(trace))[:, None, None]  # no square under- or overflows
    scaled = x / unit
    basis = scaled @ _start(n, width, x.dtype, x.device)
    for _ in range(PASSES - 2):
        basis = scaled @ anywhere(torch.linalg.qr, basis)[0]
    basis = anywhere(torch.linalg.qr, basis)[0]
    image = scaled @ basis
    small = basis.mT @ image
    values, vectors, ok = eigh_psd((small + small.mT) / 2, host_checks)
    values, basis = values[:, -rank:] * unit[..., 0], basis @ vectors[..., -rank:]
    rest = (trace - values.sum(-1)).clamp(min=0) / (n - rank)
    values = torch.cat([rest[:, None], values], -1)
    return values, basis, ok & torch.isfinite(values).all(-1) & torch.isfinite(basis).all((-2, -1))


@lru_cache
def _start(n: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random vectors ``[n, width]``, which are the same on all ranks and in every run."""
    found = torch.randn(n, width, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return found.to(device, dtype)  # only the first refresh of a size waits for the device


def mean_value(values: Tensor, n: int) -> Tensor:
    """Return the mean eigenvalue ``[...]`` of matrices ``[n, n]`` from eigenvalues ``[..., 1 + r]``."""
    leading = values[..., 1:]
    return (leading.sum(-1) + (n - leading.shape[-1]) * values[..., 0]) / n


def multiply_left(x: Tensor, basis: Tensor, weights: Tensor, workspace: Workspace) -> Tensor:
    """Multiply each column of a matrix by a matrix of its own with common leading eigenvectors.

    Args:
        x: ``[..., n, m]``.
        basis: U ``[..., n, r]``.
        weights: Eigenvalues of the matrix of each column, ``[..., 1 + r, m]``; the first row is for the complement.
        workspace: Memory for temporaries.

    Returns:
        ``w₀ ∘ X + U [(w − w₀) ∘ UᵀX]``, of the shape of ``x``, in memory of its own.
    """
    rest, leading = weights[..., :1, :], weights[..., 1:, :]
    inside = product(basis.mT, x, workspace)
    return (x * rest).add_(basis @ inside.mul_(leading - rest))


def multiply_right(x: Tensor, basis: Tensor, weights: Tensor, workspace: Workspace) -> Tensor:
    """Multiply each row of a matrix as :func:`multiply_left` does columns: ``w₀ ∘ X + [XU ∘ (w − w₀)] Uᵀ``."""
    rest, leading = weights[..., :1], weights[..., 1:]
    inside = product(x, basis, workspace)
    return (x * rest).add_(inside.mul_(leading - rest) @ basis.mT)


def multiply_both(x: Tensor, basis_g: Tensor, basis_a: Tensor, weights: Tensor, workspace: Workspace) -> Tensor:
    """Multiply a matrix by a function of ``G ⊗ A`` of which the leading eigenvectors of both factors are known.

    With ``R = U_Gᵀ X``, ``L = X U_A`` and ``K = U_Gᵀ X U_A``, the product is
    ``w₀₀ X + [L ∘ (w₀ⱼ − w₀₀)] U_Aᵀ + U_G [R ∘ (wᵢ₀ − w₀₀) + (K ∘ (wᵢⱼ − wᵢ₀ − w₀ⱼ + w₀₀)) U_Aᵀ]``.

    Args:
        x: X ``[..., n_g, n_a]``.
        basis_g: U_G ``[..., n_g, r_g]``.
        basis_a: U_A ``[..., n_a, r_a]``.
        weights: w ``[..., 1 + r_g, 1 + r_a]``, the function of the products of eigenvalues.
        workspace: Memory for temporaries.

    Returns:
        The product, of the shape of ``x``, in memory of its own.
    """
    corner, top, left = weights[..., :1, :1], weights[..., :1, 1:], weights[..., 1:, :1]
    n_g, n_a, r_g, r_a = *x.shape[-2:], basis_g.shape[-1], basis_a.shape[-1]
    lead = x.shape[:-2]
    outer, inner = workspace.empty((*lead, n_g, r_a + r_g), x), workspace.empty((*lead, r_a + r_g, n_a), x)
    right = product(basis_g.mT, x, workspace)
    both = product(right, basis_a).mul_(weights[..., 1:, 1:] - left - top + corner)
    torch.mul(product(x, basis_a, workspace), top - corner, out=outer[..., :r_a])
    outer[..., r_a:] = basis_g
    inner[..., :r_a, :] = basis_a.mT
    torch.add(right.mul_(left - corner), both @ basis_a.mT, out=inner[..., r_a:, :])
    found = x * corner  # one product for both sums, as the matrix is the largest operand
    if x.dim() == 2:
        return found.addmm_(outer, inner)
    found.flatten(0, -3).baddbmm_(outer.flatten(0, -3), inner.flatten(0, -3))
    return found
