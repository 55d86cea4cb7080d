r"""Directions with a uniform spectrum: the polar factor of a preconditioned matrix.

A matrix ``V = U S Wᵀ`` becomes ``U Wᵀ``, the steepest descent in the spectral norm: every singular direction moves
equally far. It is computed by the odd quintic iteration ``X ← aX + (bXXᵀ + c(XXᵀ)²)X``. In five rounds, its
coefficients bring singular values of ``X/‖X‖`` above about a thousandth into [0.7, 1.2], which is as good as exactly 1.
Smaller ones stay small (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"). The result is
multiplied by ``0.2 √max(n, m)``, which gives the entries of a full-rank matrix a root mean square of 0.2, the usual
size of Adam's steps, so that learning rates carry over (Liu et al. 2025, arXiv 2502.16982).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: a, b, c of the iteration, which Jordan found for the fastest growth of small singular values.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
#: Root mean square of the entries of a step of full rank.
RMS = 0.2
#: Length of the shorter side from which products in bfloat16 are faster than in float32 on a processor with units for
#: it; below it, a call costs more.
_LARGE = 128


def polar(x: Tensor, rounds: int = ROUNDS, dtype: torch.dtype | None = None) -> Tensor:
    """Return the polar factor of matrices, by iteration.

    Args:
        x: Matrices ``U S Wᵀ [..., n, m]``.
        rounds: Number of iterations.
        dtype: Dtype of the products; None for that of ``x``. bfloat16 is used for large float32 matrices only. Its
            rounding is noise in all directions, which the rounds amplify as they amplify small singular values: 1 to 4
            % of the result if ``x`` has full rank, a fifth to a third at a sixteenth of it, and most of it at rank 1.

    Returns:
        About ``U Wᵀ``, in the dtype of ``x``; singular values of 0 stay 0 but for that noise.
    """
    wide = x.shape[-2] <= x.shape[-1]
    y = _divided(x if wide else x.mT, x.abs().amax((-2, -1), keepdim=True))  # squares of huge numbers would be infinite
    y = _divided(y, torch.linalg.matrix_norm(y, keepdim=True))
    if dtype is not None and x.dtype == torch.float32 and min(x.shape[-2:]) >= _LARGE:
        y = y.to(dtype)
    add, y = (torch.baddbmm, y.flatten(0, -3)) if y.ndim > 2 else (torch.addmm, y)
    a, b, c = COEFFICIENTS
    for _ in range(rounds):
        gram = y @ y.mT
        y = add(y, add(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y if wide else y.mT).to(x.dtype).reshape(x.shape)


def step_of(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the polar factor of matrices ``x [..., n, m]`` times ``0.2 √max(n, m)``."""
    return polar(x, dtype=dtype).mul_(RMS * max(x.shape[-2:]) ** 0.5)


def _divided(x: Tensor, size: Tensor) -> Tensor:
    return x / torch.where(size > 0, size, torch.ones_like(size))


def flops(n: int, m: int) -> float:
    """Return the FLOPs of :func:`polar` on one ``[n, m]`` matrix."""
    short, long = min(n, m), max(n, m)
    return float(ROUNDS * (4 * short**2 * long + 2 * short**3))
