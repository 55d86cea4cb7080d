"""Products with the inverse of an empirical Fisher matrix, from the gradients that make it: static M-FAC.

With m gradients as the rows of ``G [m, d]`` and the damping λ::

    F = λI + (1/m) Σ_i g_i g_iᵀ = λI + GᵀG/m
    F⁻¹ = (I − Gᵀ (mλI + GGᵀ)⁻¹ G) / λ                                       (Woodbury)

which needs one m×m factorisation and never a d×d matrix. This is what the static algorithm of M-FAC computes by a
recursion over the gradients (Frantar, Kurtic, Alistarh 2021, arXiv 2107.03356, section 3.1); used for pruning, where
the saliency of a weight is ``w_i² / (2 [F⁻¹]_ii)``.

Everything is computed in float64, tile of columns by tile of columns. The difference above cancels where λ is small:
expect a relative error of about 1e-16 · (largest eigenvalue of F) / λ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

#: Elements of a float64 tile (16 MiB), which bounds every temporary that grows with d.
_TILE = 1 << 21


@torch.no_grad()
def inverse_fisher_vector_product(grads: Tensor, x: Tensor, damping: float) -> Tensor:
    """``F⁻¹ x`` with ``F = damping·I + gradsᵀ grads / m``, one vector or several.

    Costs two passes over ``grads``, m²d + 4mdk flops and an m×m factorisation; F itself is never formed.

    Args:
        grads: Gradients ``[m, d]``, one in each row, of a real floating dtype.
        x: Vector ``[d]`` or vectors ``[k, d]``, of a real floating dtype, on the same device.
        damping: λ > 0.

    Returns:
        ``F⁻¹ x`` with the shape and dtype of ``x``; computed in float64, then rounded.

    Raises:
        ValueError: If the shapes do not fit, ``damping`` is not positive, or an entry is not finite.
        TypeError: If an argument is of the wrong kind.
        RuntimeError: If the m×m matrix cannot be factorised.
    """
    _check_grads(grads)
    _check_damping(damping)
    _check_vectors(x, grads)
    vectors = x.reshape(-1, x.shape[-1])
    gram, dots = _gram_and_dots(grads, vectors)
    root = _inverse_root(gram, damping)
    weights = root.T @ (root @ dots)  # [m, k]
    result = torch.empty_like(vectors)
    for columns in _column_tiles(grads, len(vectors)):
        inside = weights.T @ grads[:, columns].double()
        result[:, columns] = ((vectors[:, columns].double() - inside) / damping).to(x.dtype)
    return result.reshape(x.shape)


@torch.no_grad()
def inverse_fisher_diagonal(grads: Tensor, damping: float) -> Tensor:
    """The diagonal of ``F⁻¹`` with ``F = damping·I + gradsᵀ grads / m``.

    Costs two passes over ``grads``, 3m²d flops and an m×m factorisation; F itself is never formed.

    Args:
        grads: Gradients ``[m, d]``, one in each row, of a real floating dtype.
        damping: λ > 0.

    Returns:
        The diagonal ``[d]`` in the dtype of ``grads``; computed in float64, then rounded.

    Raises:
        ValueError: If ``grads`` is not a matrix with rows, ``damping`` is not positive, or an entry is not finite.
        TypeError: If an argument is of the wrong kind.
        RuntimeError: If the m×m matrix cannot be factorised.
    """
    _check_grads(grads)
    _check_damping(damping)
    m, d = grads.shape
    gram, _ = _gram_and_dots(grads, grads.new_empty(0, d))
    root = _inverse_root(gram, damping)
    result = torch.empty_like(grads[0])
    for columns in _column_tiles(grads, m):
        tile = grads[:, columns].double()
        diagonal = (1 - (root @ tile).square_().sum(0)) / damping
        # [F⁻¹]_ii ≥ 1 / F_ii for every positive definite F: a bound on what the difference may lose.
        result[columns] = diagonal.maximum(1 / (damping + tile.square().sum(0) / m)).to(grads.dtype)
    return result


def _check_matrix_of_numbers(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must have a real floating dtype, got {x.dtype}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be dense, got {x.layout}: call .to_dense() first")


def _check_grads(grads: Tensor) -> None:
    _check_matrix_of_numbers("grads", grads)
    if grads.dim() != 2 or grads.shape[0] == 0:
        raise ValueError(f"grads must have shape [m, d] with at least one row, got {list(grads.shape)}")


def _check_damping(damping: float) -> None:
    if not isinstance(damping, (int, float)) or isinstance(damping, bool):
        raise TypeError(f"damping must be a number, got {damping!r}")
    if not (math.isfinite(damping) and damping > 0):
        raise ValueError(f"damping must be finite and > 0, got {damping}")


def _check_vectors(x: Tensor, grads: Tensor) -> None:
    _check_matrix_of_numbers("x", x)
    d = grads.shape[1]
    if x.dim() not in {1, 2} or x.shape[-1] != d:
        raise ValueError(f"x must have shape [{d}] or [k, {d}] for grads {list(grads.shape)}, got {list(x.shape)}")
    if x.device != grads.device:
        raise ValueError(f"x is on {x.device} and grads on {grads.device}; move one of them")


def _column_tiles(grads: Tensor, further_rows: int) -> Iterator[slice]:
    """Slices of columns so narrow that a tile of ``grads`` and of what is computed with it stays small."""
    m, d = grads.shape
    width = max(1, _TILE // (m + further_rows))
    return (slice(start, min(start + width, d)) for start in range(0, d, width))


def _gram_and_dots(grads: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """``G Gᵀ [m, m]`` and ``G Xᵀ [m, k]`` in float64."""
    m, k = len(grads), len(vectors)
    gram = torch.zeros(m, m, dtype=torch.float64, device=grads.device)
    dots = torch.zeros(m, k, dtype=torch.float64, device=grads.device)
    for columns in _column_tiles(grads, k):
        tile = grads[:, columns].double()
        gram.addmm_(tile, tile.T)
        dots.addmm_(tile, vectors[:, columns].double().T)
    for name, part in (("grads", gram), ("x", dots)):
        if not bool(part.isfinite().all()):
            raise ValueError(f"{name} must be finite, and so must its products in float64")
    return gram, dots


def _inverse_root(gram: Tensor, damping: float) -> Tensor:
    """``R [m, m]`` with ``RᵀR = (mλI + S)⁻¹`` from the Gram matrix S ``[m, m]``, which is overwritten."""
    m = len(gram)
    shift = m * damping
    gram.diagonal().add_(shift)
    lower, info = torch.linalg.cholesky_ex(gram)
    if int(info) == 0:
        return torch.linalg.solve_triangular(lower, torch.eye(m, dtype=gram.dtype, device=gram.device), upper=False)
    try:  # λ below the rounding of S: the factorisation stumbles over an eigenvalue that should be mλ
        values, basis = torch.linalg.eigh(gram)
    except LinAlgError as error:
        raise RuntimeError(f"the Gram matrix of {m} gradients cannot be factorised: raise damping={damping}") from error
    return (basis * values.clamp_(min=shift).rsqrt()).T
