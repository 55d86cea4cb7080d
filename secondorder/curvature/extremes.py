"""The current damping and the extreme eigenvalues of damped curvature, as an optimizer reports them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from secondorder.linalg.dense import anywhere


class Extremes(NamedTuple):
    """Damping and extreme eigenvalues of the curvature of one layer, whose Γ blocks are the leading dimensions.

    Attributes:
        damping: λ ``[...]``.
        smallest: Smallest eigenvalue of the damped curvature ``[...]``; None if only a factorization could compute it.
        largest: Largest eigenvalue of the damped curvature.
        undamped: The largest eigenvalue without the damping.
    """

    damping: Tensor
    smallest: Tensor | None = None
    largest: Tensor | None = None
    undamped: Tensor | None = None

    @property
    def condition(self) -> Tensor:
        """Largest over smallest eigenvalue of the worst block, 0-dim; NaN if they are not known."""
        if self.smallest is None or self.largest is None:
            return torch.full((), torch.nan, device=self.damping.device)
        return (self.largest / self.smallest).amax()


def bounds_where(chosen: Tensor, first: Extremes, second: Extremes) -> Extremes:
    """The bounds of one or the other, selected by a 0-dim flag that stays on the device."""
    (large, undamped), (other_large, other_undamped) = ((e.largest, e.undamped) for e in (first, second))
    assert large is not None
    assert undamped is not None
    assert other_large is not None
    assert other_undamped is not None
    return first._replace(
        largest=torch.where(chosen, large, other_large), undamped=torch.where(chosen, undamped, other_undamped)
    )


def of_product(values_a: Tensor, values_g: Tensor, damping: Tensor) -> Extremes:
    """Extremes of ``G ⊗ A + λI``, from the eigenvalues ``[..., n]`` of both factors."""
    small, large = values_a.amin(-1) * values_g.amin(-1), values_a.amax(-1) * values_g.amax(-1)
    return of_values(small, large, damping)


def of_values(small: Tensor, large: Tensor, damping: Tensor) -> Extremes:
    """Extremes of a curvature with these extreme eigenvalues, damped at least by the rounding error of the largest."""
    floor = torch.maximum(damping.to(large.dtype), torch.finfo(large.dtype).eps * large)
    return Extremes(damping, small + floor, large + floor, large)


def bound_of_rows(inverse: Tensor, kernel: Tensor | None, damping: Tensor) -> Extremes:
    """Upper bounds for ``F̂ + λI`` computed only from products; :func:`of_rows` describes the arguments.

    ``B = M K̂`` has the eigenvalues σ/(σ + λ), and the eighth root of ``tr B⁸`` is at least the largest of them and at
    most ``R^(1/8)`` times as large.

    Returns:
        λ and the bounds, without the smallest eigenvalue.
    """
    identity = torch.eye(inverse.shape[-1], dtype=inverse.dtype, device=inverse.device)
    damping = damping.to(inverse.dtype)
    share = identity - damping[..., None, None] * inverse if kernel is None else inverse @ kernel.to(inverse.dtype)
    size = torch.linalg.matrix_norm(share).clamp(min=torch.finfo(share.dtype).tiny)
    power = share / size[..., None, None]
    for _ in range(2):
        power = power @ power
    largest = size * (power * power.mT).sum((-2, -1)).clamp(min=0) ** 0.125
    largest = largest.clamp(max=1 - torch.finfo(largest.dtype).eps)
    return Extremes(damping, largest=damping / (1 - largest), undamped=damping * largest / (1 - largest))


def of_rows(inverse: Tensor, kernel: Tensor | None, damping: Tensor, n: int) -> Extremes:
    """Extremes of ``F̂ + λI`` with ``(F̂ + λI)⁻¹ = (I − Ûᵀ M Û)/λ``, see :mod:`secondorder.linalg.woodbury`.

    Args:
        inverse: M ``[..., R, R]``.
        kernel: K̂ of the kept rows if they interpolate others; None if ``M = (K + λI)⁻¹``.
        damping: λ ``[...]``.
        n: Number of parameters.

    Returns:
        The extremes. Directions that no row reaches have the eigenvalue λ.
    """
    damping = damping.double()
    if kernel is None:
        # The order is from the largest σ + λ to the smallest, since the inverse reverses the order.
        values = 1 / anywhere(torch.linalg.eigvalsh, inverse.double()).clamp(min=torch.finfo(torch.float64).tiny)
    else:
        # σ/(σ + λ) are the eigenvalues of M K̂, and of a symmetric matrix that has the same.
        squares, vectors = anywhere(torch.linalg.eigh, inverse.double())
        root = vectors * squares.clamp(min=0).sqrt()[..., None, :]
        share = anywhere(torch.linalg.eigvalsh, root.mT @ kernel.double() @ root).flip(-1)
        values = damping[..., None] / (1 - share)
    few = values.shape[-1] < n
    return Extremes(damping, damping if few else values[..., n - 1], values[..., 0])


def numbers(found: Mapping[str, Extremes]) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Return λ and the condition number by layer, with None for nonfinite values. Waits for the device once."""
    if not found:
        return {}, {}
    rows = [torch.stack([e.damping.double().mean(), e.condition.double()]) for e in found.values()]
    told = torch.stack([row.to(rows[0].device) for row in rows]).tolist()
    pairs = dict(zip(found, told, strict=True))
    damping = {name: _finite(pair[0]) for name, pair in pairs.items()}
    return damping, {name: _finite(pairs[name][1]) for name, e in found.items() if e.smallest is not None}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
