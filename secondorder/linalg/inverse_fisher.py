"""Products with the inverse of an empirical Fisher matrix, computed from its gradients (static M-FAC).

With m gradients as the rows of ``G [m, d]`` and the damping λ::

    F = λI + (1/m) Σ_i g_i g_iᵀ = λI + GᵀG/m
    F⁻¹ = (I − Gᵀ (mλI + GGᵀ)⁻¹ G) / λ                                       (Woodbury)

This needs one m×m factorization and never a d×d matrix. If d ≤ m, F itself is smaller and is inverted directly. The
static algorithm of M-FAC computes the same by a recursion over the gradients (Frantar, Kurtic, Alistarh 2021, arXiv
2107.03356). It is used for pruning, where the saliency of a weight is ``w_i² / (2 [F⁻¹]_ii)``.

Everything is computed in float64, tile of columns by tile of columns. For an x that the gradients span, the difference
above cancels where λ is small: the relative error is then about 1e-16 · (largest eigenvalue of F) / λ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from secondorder.linalg.dense import anywhere

#: Elements of a float64 tile (16 MiB), which bounds every temporary that grows with d.
_TILE = 1 << 21


@torch.no_grad()
def inverse_fisher_vector_product(grads: Tensor, x: Tensor, damping: float) -> Tensor:
    """Return ``F⁻¹ x`` with ``F = damping·I + gradsᵀ grads / m``, for one vector or several.

    Costs three passes over ``grads``, 2m²d + 4mdk flops and an m×m factorization. F is never formed unless d ≤ m.

    Args:
        grads: Gradients ``[m, d]``, one in each row, of a real floating dtype.
        x: Vector ``[d]`` or vectors ``[k, d]``, of a real floating dtype, on the same device.
        damping: λ > 0.

    Returns:
        ``F⁻¹ x`` with the shape and dtype of ``x``; computed in float64, then rounded.

    Raises:
        ValueError: If the shapes do not fit, ``damping`` is not positive, or an entry is not finite.
        TypeError: If an argument is of the wrong kind.
        RuntimeError: If the matrix cannot be factorized.
    """
    _check_grads(grads)
    _check_damping(damping)
    _check_vectors(x, grads)
    vectors, (m, d) = x if x.dim() == 2 else x[None], grads.shape
    if d <= m:
        root = _inverse_root(_gram(grads.T), m * damping)
        _check_finite("x", vectors)
        return (m * (vectors.double() @ root.T @ root)).to(x.dtype).reshape(x.shape)
    root = _inverse_root(_gram(grads), m * damping)
    dots = _dots(grads, vectors)
    _check_finite("x", dots)  # every entry of x affects them, and they are fewer
    weights = root.T @ (root @ dots)  # [m, k]
    result = torch.empty_like(vectors)
    for columns in _column_tiles(grads, len(vectors)):
        inside = weights.T @ grads[:, columns].double()
        result[:, columns] = ((vectors[:, columns].double() - inside) / damping).to(x.dtype)
    return result.reshape(x.shape)


@torch.no_grad()
def inverse_fisher_diagonal(grads: Tensor, damping: float) -> Tensor:
    """Return the diagonal of ``F⁻¹`` with ``F = damping·I + gradsᵀ grads / m``.

    Costs two passes over ``grads``, 4m²d flops and an m×m factorization. F is never formed unless d ≤ m.

    Args:
        grads: Gradients ``[m, d]``, one in each row, of a real floating dtype.
        damping: λ > 0.

    Returns:
        The diagonal ``[d]`` in the dtype of ``grads``; computed in float64, then rounded.

    Raises:
        ValueError: If ``grads`` is not a matrix with rows, ``damping`` is not positive, or an entry is not finite.
        TypeError: If an argument is of the wrong kind.
        RuntimeError: If the matrix cannot be factorized.
    """
    _check_grads(grads)
    _check_damping(damping)
    m, d = grads.shape
    if d <= m:
        root = _inverse_root(_gram(grads.T), m * damping)
        return (m * root.square().sum(0)).to(grads.dtype)
    root = _inverse_root(_gram(grads), m * damping)
    result = torch.empty_like(grads[0])
    for columns in _column_tiles(grads, m):
        tile = grads[:, columns].double()
        diagonal = (1 - torch.linalg.vector_norm(root @ tile, dim=0).square()) / damping
        # [F⁻¹]_ii ≥ 1 / F_ii holds for every positive definite F, which bounds what the difference may lose.
        bound = 1 / (damping + torch.linalg.vector_norm(tile, dim=0).square() / m)
        result[columns] = diagonal.maximum(bound).to(grads.dtype)
    return result


def _check_dense_floats(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must have a real floating dtype, got {x.dtype}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be dense, got {x.layout}: call .to_dense() first")


def _check_grads(grads: Tensor) -> None:
    _check_dense_floats("grads", grads)
    if grads.dim() != 2 or grads.shape[0] == 0:
        raise ValueError(f"grads must have shape [m, d] with at least one row, got {list(grads.shape)}")


def _check_damping(damping: float) -> None:
    if not isinstance(damping, (int, float)) or isinstance(damping, bool):
        raise TypeError(f"damping must be a number, got {damping!r}")
    if not (math.isfinite(damping) and damping > 0):
        raise ValueError(f"damping must be finite and > 0, got {damping}")


def _check_vectors(x: Tensor, grads: Tensor) -> None:
    _check_dense_floats("x", x)
    d = grads.shape[1]
    if x.dim() not in {1, 2} or x.shape[-1] != d:
        raise ValueError(f"x must have shape [{d}] or [k, {d}] for grads {list(grads.shape)}, got {list(x.shape)}")
    if x.device != grads.device:
        raise ValueError(f"x is on {x.device} and grads on {grads.device}; move one of them")


def _check_finite(name: str, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name} must be finite, and so must its products in float64")


def _column_tiles(rows: Tensor, further: int = 0) -> Iterator[slice]:
    """Yield slices of columns such that a tile of ``rows``, with ``further`` rows computed from it, stays small."""
    n, width = rows.shape
    step = max(1, _TILE // max(1, n + further))
    return (slice(start, min(start + step, width)) for start in range(0, width, step))


def _gram(rows: Tensor) -> Tensor:
    """Return ``rows rowsᵀ [n, n]`` in float64."""
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for columns in _column_tiles(rows):
        tile = rows[:, columns].double()
        gram.addmm_(tile, tile.T)
    _check_finite("grads", gram)
    return gram


def _dots(rows: Tensor, vectors: Tensor) -> Tensor:
    """Return ``rows vectorsᵀ [n, k]`` in float64."""
    dots = torch.zeros(len(rows), len(vectors), dtype=torch.float64, device=rows.device)
    for columns in _column_tiles(rows, len(vectors)):
        dots.addmm_(rows[:, columns].double(), vectors[:, columns].double().T)
    return dots


def _inverse_root(gram: Tensor, shift: float) -> Tensor:
    """Return ``R [n, n]`` with ``RᵀR = (S + shift·I)⁻¹`` from the Gram matrix S ``[n, n]``, which is overwritten."""
    n = len(gram)
    gram.diagonal().add_(shift)
    lower, info = anywhere(torch.linalg.cholesky_ex, gram)
    if int(info) == 0:
        inverse: Tensor = anywhere(torch.linalg.solve_triangular, lower, torch.eye(n).to(gram), upper=False)
        return inverse
    try:  # a shift below the rounding of S: the factorization stumbles over an eigenvalue that should be the shift
        values, basis = anywhere(torch.linalg.eigh, gram)
    except LinAlgError as error:
        raise RuntimeError(f"the Gram matrix [{n}, {n}] of grads cannot be factorized: raise damping") from error
    scaled: Tensor = basis * values.clamp_(min=shift).rsqrt()
    return scaled.T
