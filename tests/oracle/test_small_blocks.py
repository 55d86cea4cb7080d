"""Norm layers that precondition together solve the equations of each of their units.

Other layers are in `test_truncated.py` and `tests/curvature/test_block_stacks.py`.
"""

import pytest
import torch
from torch import nn

from tests.support.kfac import plain_kfac

N, WIDTH, DAMPING = 20, 6, 0.3


@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_each_norm_is_damped_by_the_curvature_of_its_own_units(mode):
    """Units of a norm are blocks of a scale and a shift; the steepest unit of a norm determines its λ."""
    torch.manual_seed(0)
    norms, scales = nn.ModuleList(nn.LayerNorm(WIDTH).double() for _ in range(3)), (1.0, 30.0, 0.1)
    inputs = [torch.randn(N, WIDTH).double() for _ in norms]
    targets = [torch.randn(N, WIDTH).double() * torch.linspace(0.5, 2.0, WIDTH).double() for _ in norms]
    optimizer, expected, loss = plain_kfac(norms, damping=DAMPING, damping_mode=mode), [], 0.0
    for norm, x, y, s in zip(norms, inputs, targets, scales, strict=True):
        loss = loss + s * (norm(x) - y).square().sum(1).mean()
        hat = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        g = 2 * s * (hat - y)  # of one example; scale 1 and shift 0
        rows = torch.stack([g * hat, g], 2)  # [example, unit, (scale, shift)]
        fishers = torch.einsum("nui,nuj->uij", rows, rows) / N
        steepest = fishers.diagonal(dim1=1, dim2=2).mean(1).max() if mode == "relative" else 1.0
        damped = fishers + DAMPING * steepest * torch.eye(2).double()
        expected.append(torch.linalg.solve(damped, rows.mean(0)))
    loss.backward()
    optimizer.step()
    for norm, solution in zip(norms, expected, strict=True):
        found = torch.stack([1 - norm.weight, -norm.bias], 1).detach()
        torch.testing.assert_close(found, solution, rtol=1e-9, atol=1e-12)
