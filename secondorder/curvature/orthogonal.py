r"""Directions of a uniform spectrum: the polar factor of a preconditioned matrix.

A matrix ``V = U S Wᵀ`` becomes ``U Wᵀ``, the steepest descent in the spectral norm: every singular direction moves
equally far. It is found by the odd quintic iteration ``X ← aX + (bXXᵀ + c(XXᵀ)²)X``, whose coefficients bring singular
values of ``X/‖X‖`` into about [0.7, 1.2] in five rounds, which is as good as exactly 1 (Jordan et al. 2024, "Muon: an
optimizer for hidden layers in neural networks"). The result is scaled to entries of root mean square 0.2, the usual
size of Adam's steps, so that learning rates carry over (Liu et al. 2025, arXiv 2502.16982).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: a, b, c of the iteration, found by Jordan for the fastest rise of small singular values.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
#: Root mean square of the entries of a step.
RMS = 0.2


def polar(x: Tensor, rounds: int = ROUNDS) -> Tensor:
    """About ``U Wᵀ`` of matrices ``x = U S Wᵀ [..., n, m]``; singular values of 0 stay 0."""
    wide = x.shape[-2] <= x.shape[-1]
    y = x if wide else x.mT
    norm = torch.linalg.matrix_norm(y, keepdim=True)
    y = y / torch.where(norm > 0, norm, torch.ones_like(norm))
    a, b, c = COEFFICIENTS
    for _ in range(rounds):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y if wide else y.mT


def step_of(x: Tensor) -> Tensor:
    """The polar factor of matrices ``x [..., n, m]``, scaled so that each has entries of root mean square 0.2."""
    found = polar(x)
    norm = torch.linalg.matrix_norm(found, keepdim=True)
    size = RMS * (x.shape[-2] * x.shape[-1]) ** 0.5
    return found * torch.where(norm > 0, size / norm, torch.zeros_like(norm))


def flops(n: int, m: int) -> float:
    """Of :func:`polar` on one ``[n, m]`` matrix."""
    short, long = min(n, m), max(n, m)
    return float(ROUNDS * (4 * short**2 * long + 2 * short**3))
