r"""A physics-informed network: the Poisson equation ``-Δu = f`` on the unit square, with ``u = 0`` on its boundary.

This is the problem of Dangel, Müller and Zeinhofer, "Kronecker-factored approximate curvature for physics-informed
neural networks", NeurIPS 2024, and earlier of Müller and Zeinhofer: ``f`` is chosen such that ``u = sin(πx) sin(πy)``,
the points are drawn once, 900 inside and 120 on the boundary, and all numbers are float64. The loss is ``Σ r² / 2N``
over the N points inside plus ``Σ r² / 2M`` over the M points on the boundary, where r is ``-Δu - f`` or u.

Derivatives are computed in forward mode. Each layer maps four rows per point to four rows: the value, both first
derivatives and the Laplacian::

    linear    [h 1] Wᵀ       [∂h 0] Wᵀ        [Δh 0] Wᵀ                      one call of one nn.Linear without a bias
    tanh      t = tanh z     t' ∂z            t' Δz + t'' Σ (∂z)²

The biases are the last columns of the weights, and the model returns the left-hand side of the equation instead of u.
A single call of a layer contains every use of its weight. If a second backward pass computed the derivatives, the hooks
of an optimizer would see only the value. Here, a layer is shared by four positions, and the gradient of a residual is
the sum of their outer products. This makes the curvature of layers valid:

* K-FAC and EK-FAC approximate it. ``approx="expand"`` is the approximation that the paper derives.
* The rows of HyLo with ``approx="expand"`` are exactly the gradients of single points.
* Windows of past gradients (M-FAC, GGT) are always valid, because they use only gradients.

The empirical Fisher is the curvature times squared residuals, and vanishes with them. Use ``fisher="exact"``, which
costs one backward pass for one output and gives the Gauss-Newton matrix, or ``"mc"``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import Batch, Size, Workload, evaluating
from secondorder import Likelihood

BOUNDARY_SHARE = 120 / 1020  # share of the points that are on the boundary
GRID = 101  # points per side of the grid on which the solution is compared with the true one


class _ForwardLaplacian(nn.Module):
    """A multilayer perceptron with tanh that maps rows ``[value, ∂x, ∂y, Laplacian]`` of every unit."""

    constant: Tensor

    def __init__(self, widths: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        # The column of the bias is one more input, which slightly changes the bound of torch's initialization.
        self.layers = nn.ModuleList(nn.Linear(d_in + 1, d_out, False, dtype=dtype) for d_in, d_out in pairwise(widths))
        self.register_buffer("constant", torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=dtype)[:, None], persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``a u + b Δu`` of the network ``u``, where a and b are columns of the inputs."""
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
    """Apply tanh to a value, its first derivatives and its Laplacian ``[batch, 4, units]``."""
    value, first, laplacian = rows.split((1, 2, 1), 1)
    value = torch.tanh(value)
    slope = 1 - value.square()
    bend = -2 * value * slope
    return torch.cat((value, slope * first, slope * laplacian + bend * first.square().sum(1, keepdim=True)), 1)


@dataclass(frozen=True)
class Poisson(Workload):
    """Squared residuals of the equation inside and on the boundary. Every step uses all points."""

    data_dir: Path | None = None  # unused, because there is no data
    batch_size: int = 1020
    """Number of points. A share of :data:`BOUNDARY_SHARE` of them is on the boundary, and at least one."""
    widths: tuple[int, ...] = (64, 64, 48, 48)
    frequency: int = 1  # k of the solution `u = sin(kπx) sin(kπy)`
    double: bool = True  # whether to use float64 instead of float32

    name: ClassVar[str] = "poisson"
    metric: ClassVar[str] = "relative L2 error"
    likelihood: ClassVar[str | Likelihood] = "gaussian"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 300, "paper": 10_000}
    small: ClassVar[dict[str, Any]] = {"batch_size": 68, "widths": (16, 16)}
    # The paper's largest network for this equation.
    published: ClassVar[dict[str, Any]] = {"widths": (256, 256, 128, 128)}

    def __post_init__(self) -> None:
        if self.batch_size < 2:
            raise ValueError(f"batch_size must be at least 2, one of them on the boundary, got {self.batch_size}")
        if self.frequency < 1:
            raise ValueError(f"frequency must be at least 1, got {self.frequency}")

    @property
    def examples(self) -> int:
        """Number of points, all of which are used in every step."""
        return self.batch_size

    def network(self) -> nn.Module:
        return _ForwardLaplacian((2, *self.widths, 1), self._dtype)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield the same points forever, with those inside and those on the boundary in random order.

        The rows are scaled so that the loss is the mean of their squared errors.
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
        yield from repeat((torch.cat((points, coefficients), 1)[order], targets[order]))

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
