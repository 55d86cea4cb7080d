r"""A physics-informed network: the Poisson equation ``-Δu = f`` on the unit square, with ``u = 0`` on its boundary.

The problem of Dangel, Müller and Zeinhofer, "Kronecker-factored approximate curvature for physics-informed neural
networks", NeurIPS 2024, and of Müller and Zeinhofer before them: ``f`` is made such that ``u = sin(πx) sin(πy)``, the
points are drawn once, 900 inside and 120 on the boundary, and everything is float64. The loss is
``Σ r² / 2N`` over the N points inside plus ``Σ r² / 2M`` over the M points on the boundary, r being ``-Δu - f`` or u.

Derivatives travel forwards. A point enters as four rows, the value, both first derivatives and the Laplacian, and
leaves each layer as such::

    linear    [h 1] Wᵀ       [∂h 0] Wᵀ        [Δh 0] Wᵀ                      one call of one nn.Linear without a bias
    tanh      t = tanh z     t' ∂z            t' Δz + t'' Σ (∂z)²

so the biases are the last columns of the weights, the model returns what the equation compares rather than u, and a
single call of a layer holds every use of its weight. With derivatives by a second backward pass the hooks of an
optimizer would see the value alone. Here a layer is one that is shared by four positions, and the gradient of a
residual is the sum of their outer products. That makes curvature by layers valid:

* K-FAC and EK-FAC: yes; ``approx="expand"`` is what the paper derives.
* HyLo: with ``approx="expand"`` its rows are exactly the gradients of single points.
* Windows of past gradients (M-FAC, GGT): always, for they see gradients only. All are those of the same points.

The empirical Fisher is curvature times squared residuals, and vanishes with them. So take ``fisher="exact"``, which for
one output costs one backward pass and gives the Gauss-Newton matrix, or ``"mc"``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import Batch, Size, Workload, evaluating, seeded
from secondorder import Likelihood

BOUNDARY_SHARE = 120 / 1020
"""Share of the points that lie on the boundary."""
GRID = 101
"""Points a side of the grid where the solution is compared with the true one."""


class _ForwardLaplacian(nn.Module):
    """A perceptron with tanh whose rows are ``[value, ∂x, ∂y, Laplacian]`` of every unit."""

    constant: Tensor

    def __init__(self, widths: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        # With the column of the bias: nearly the initialisation of torch, whose bound knows one input less.
        self.layers = nn.ModuleList(nn.Linear(d_in + 1, d_out, False, dtype=dtype) for d_in, d_out in pairwise(widths))
        self.register_buffer("constant", torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=dtype)[:, None], persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply ``a u + b Δu`` to the network."""
        points, of_value, of_laplacian = inputs.split((2, 1, 1), 1)
        directions = torch.eye(2, dtype=inputs.dtype, device=inputs.device).expand(len(inputs), 2, 2)
        rows = torch.cat((points[:, None], directions, torch.zeros_like(points)[:, None]), 1)
        for number, layer in enumerate(self.layers):
            if number:
                rows = _tanh(rows)
            rows = layer(torch.cat((rows, self.constant.expand(len(rows), 4, 1)), 2))
        out: Tensor = of_value * rows[:, 0] + of_laplacian * rows[:, 3]
        return out


def _tanh(rows: Tensor) -> Tensor:
    """Send value, first derivatives and Laplacian ``[batch, 4, units]`` through tanh."""
    value, first, laplacian = rows.split((1, 2, 1), 1)
    value = torch.tanh(value)
    slope = 1 - value.square()
    bend = -2 * value * slope
    return torch.cat((value, slope * first, slope * laplacian + bend * first.square().sum(1, keepdim=True)), 1)


@dataclass(frozen=True)
class Poisson(Workload):
    """Squared residuals of the equation inside and on the boundary, of all points on every step."""

    data_dir: Path | None = None
    """Not used: there is no data."""
    batch_size: int = 1020
    """All points; a share of :data:`BOUNDARY_SHARE` of them lie on the boundary, at least one."""
    widths: tuple[int, ...] = (64, 64, 48, 48)
    frequency: int = 1
    """k of the solution ``u = sin(kπx) sin(kπy)``."""
    double: bool = True
    """Whether numbers are float64, not float32."""

    name: ClassVar[str] = "poisson"
    metric: ClassVar[str] = "relative L2 error"
    likelihood: ClassVar[str | Likelihood] = "gaussian"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 300, "paper": 10_000}
    small: ClassVar[dict[str, Any]] = {"batch_size": 68, "widths": (16, 16)}
    # The largest of the paper's networks for this equation.
    published: ClassVar[dict[str, Any]] = {"widths": (256, 256, 128, 128)}

    def __post_init__(self) -> None:
        if self.batch_size < 2:
            raise ValueError(f"batch_size must be at least 2, a point inside and one outside, got {self.batch_size}")
        if self.frequency < 1:
            raise ValueError(f"frequency must be at least 1, got {self.frequency}")

    @property
    def examples(self) -> int:
        """Points: every step takes all of them."""
        return self.batch_size

    def build_model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return _ForwardLaplacian((2, *self.widths, 1), self._dtype)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield the same points for ever, those inside and those on the boundary in random order.

        The rows are scaled, so that the mean of their squared errors is the loss.
        """
        generator = torch.Generator().manual_seed(seed)
        boundary = max(1, round(BOUNDARY_SHARE * self.batch_size))
        inside = self.batch_size - boundary
        points = torch.rand(self.batch_size, 2, dtype=self._dtype, generator=generator)
        side = torch.randint(4, (boundary,), generator=generator)  # left, bottom, right, top
        points[torch.arange(inside, self.batch_size), side % 2] = (side // 2).to(self._dtype)

        coefficients = torch.zeros_like(points)
        coefficients[:inside, 1] = -math.sqrt(self.batch_size / (2 * inside))
        coefficients[inside:, 0] = math.sqrt(self.batch_size / (2 * boundary))
        laplacian = -2 * (self.frequency * math.pi) ** 2 * self._solution(points)
        targets = coefficients[:, 1:] * laplacian  # and u = 0 on the boundary

        order = torch.randperm(self.batch_size, generator=generator)
        batch = torch.cat((points, coefficients), 1)[order], targets[order]
        while True:
            yield batch

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum(1).mean()

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        axis = torch.linspace(0, 1, GRID, dtype=self._dtype)
        points = torch.cartesian_prod(axis, axis)
        true = self._solution(points)
        with evaluating(model):
            found = model(torch.cat((points, torch.ones_like(true), torch.zeros_like(true)), 1))
        return float((found - true).norm() / true.norm())

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    def _solution(self, points: Tensor) -> Tensor:
        """Return u ``[count, 1]`` at points ``[count, 2]``."""
        return torch.sin(self.frequency * math.pi * points).prod(1, keepdim=True)
