r"""The local quadratic model of the loss, which determines the size of a step, judges it and adapts the damping.

.. math::
    q(\delta) = \nabla^\top \delta + \tfrac12\, \delta^\top (C + \lambda I)\, \delta, \qquad \delta = \sum_i x_i d_i

Along one or two directions ``d_i``, the model is a quadratic in ``x [k]``. Its terms are kept separately, so damping
and decay can be left out, or changed, without another product with C.

Levenberg-Marquardt: ``ρ = (L(θ+δ) − L(θ)) / (q(δ) − q(0))`` is the actual change divided by the predicted change. λ
decreases if the model is trustworthy (ρ > 3/4) and increases if it is not (ρ < 1/4). Martens & Grosse 2015 (arXiv
1503.05671), sections 6.4 to 7.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

#: λ changes by this factor per step of the interval.
DECAY = 0.95
#: λ does not change if the ratio is between these bounds.
LOWER, UPPER = 0.25, 0.75


@dataclass(frozen=True)
class QuadraticModel:
    """The terms of the model along k directions ``d_i``. Decay is that of the objective ``L + ½ Σ w θ²``.

    Attributes:
        gradient: ``⟨∇, d_i⟩ [k]``.
        curvature: ``⟨d_i, C d_j⟩ [k, k]``.
        damping: ``⟨d_i, λ d_j⟩ [k, k]``.
        decay_gradient: ``⟨w θ, d_i⟩ [k]``.
        decay: ``⟨d_i, w d_j⟩ [k, k]``.
    """

    gradient: Tensor
    curvature: Tensor
    damping: Tensor
    decay_gradient: Tensor
    decay: Tensor

    def minimum(self, tolerance: float) -> Tensor:
        """Return the coefficients ``x [k]`` of the minimum of the damped model with decay, see :func:`minimize`."""
        matrix = self.curvature + self.damping + self.decay
        return minimise(matrix, self.gradient + self.decay_gradient, tolerance)

    def change(self, x: Tensor, *, damped: bool) -> Tensor:
        """Return ``q(δ) − q(0)`` of the loss without decay.

        Args:
            x: Coefficients ``[k]``.
            damped: Whether ``½ λ ‖δ‖²`` counts.

        Returns:
            The predicted change, 0-dim.
        """
        matrix = self.curvature + self.damping if damped else self.curvature
        return torch.dot(self.gradient, x) + 0.5 * torch.dot(x, matrix @ x)


def minimise(matrix: Tensor, linear: Tensor, tolerance: float) -> Tensor:
    """Return ``x = −M⁻¹ c`` for one or two directions, without waiting for the device.

    The second direction is dropped if M is close to singular (it adds nothing to the first) or not positive. If the
    first one has no positive curvature either, ``x = −1``, which does not scale the step.

    Args:
        matrix: M ``[k, k]``, k = 1 or 2.
        linear: c ``[k]``.
        tolerance: Smallest ``1 − cos²`` of the angle between two directions, in the metric M, that are solved for.

    Returns:
        x ``[k]``.
    """
    first = -linear[0] / matrix[0, 0]
    usable = (matrix[0, 0] > 0) & torch.isfinite(matrix[0, 0]) & torch.isfinite(first)
    first = torch.where(usable, first, -torch.ones_like(first))
    if len(linear) == 1:
        return first[None]
    # Each direction is measured by its own length, so a vanishing previous step is not dropped for this reason.
    length = matrix.diagonal().clamp(min=0).sqrt()
    cosine, (c1, c2) = matrix[0, 1] / (length[0] * length[1]), (linear / length).unbind()
    sine = 1 - cosine * cosine
    both = torch.stack([cosine * c2 - c1, cosine * c1 - c2]) / (sine * length)
    good = usable & (matrix[1, 1] > 0) & (sine > tolerance) & torch.isfinite(both).all()
    return torch.where(good, both, torch.stack([first, torch.zeros_like(first)]))


def reduction_ratio(actual: float, predicted: float) -> float:
    """Return ρ, the change of the loss divided by the predicted one; NaN if no change was predicted."""
    return actual / predicted if predicted else math.nan


def damping_factor(actual: float, predicted: float, interval: int) -> float:
    """Return the factor by which the ratio of a step changes λ.

    Args:
        actual: ``L(θ+δ) − L(θ)``.
        predicted: ``q(δ) − q(0)``.
        interval: T, number of steps between two judgments.

    Returns:
        ``ω = 0.95^T`` if the model is trusted, or is too pessimistic (the loss fell against a predicted rise); ``1/ω``
        if it is not trusted, or ρ is not finite; otherwise 1.
    """
    omega, ratio = DECAY**interval, reduction_ratio(actual, predicted)
    if not math.isfinite(ratio):
        return 1 / omega
    if ratio > UPPER or actual < 0 < predicted:
        return omega
    return 1 / omega if ratio < LOWER else 1.0


def bounded(damping: float, factor: float, low: float, high: float) -> float:
    """Return ``factor·λ`` in ``[low, high]``, which is always finite."""
    return min(max(damping * factor, low), high, sys.float_info.max)


def is_rounding(loss: float, actual: float, predicted: float, epsilon: float) -> bool:
    """Whether both changes are lost in the rounding of the loss, so that their ratio is noise.

    Args:
        loss: ``L(θ)``.
        actual: Change of the loss.
        predicted: Predicted change.
        epsilon: Spacing of floating-point numbers at 1 in the precision of the loss.

    Returns:
        True if neither can be distinguished from zero.
    """
    bound = 10 * epsilon * abs(loss)
    return abs(actual) <= bound and abs(predicted) <= bound < math.inf
