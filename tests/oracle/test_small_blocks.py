"""Blocks that precondition together solve the equations of each: explicit curvature and solves in float64.

Those of KFAC are in `test_truncated.py`.
"""

import pytest
import torch
from torch import nn

from secondorder import EKFAC, KFAC
from tests.support.oracles.kfac import layer_values

LAYERS, N, WIDTH, DAMPING = 5, 20, 6, 0.3


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).double()


def rows_of(model, x, y):
    """Inputs with a 1 appended and gradients of the outputs of each layer, by an explicit forward pass."""
    inputs, outputs, h = [], [], x
    for layer in model[::2]:
        inputs.append(torch.cat([h, h.new_ones(len(h), 1)], 1).detach())
        outputs.append(h @ layer.weight.T + layer.bias)
        h = outputs[-1].tanh()
    loss = (h - y).square().sum(1).mean()
    return list(zip(inputs, torch.autograd.grad(loss, outputs), strict=True))


def moved(model, optimizer, x, y):
    """The step of each layer as a matrix, for a learning rate of 1."""
    before = [layer_values(layer) for layer in model[::2]]
    optimizer.zero_grad()
    (model(x) - y).square().sum(1).mean().backward()
    optimizer.step()
    return [values - layer_values(layer) for values, layer in zip(before, model[::2], strict=True)]


PLAIN = {
    "lr": 1.0, "momentum": 0.0, "kl_clip": None, "damping": DAMPING, "factor_update_steps": 1, "inv_update_steps": 1,
}  # fmt: skip


def test_ekfac_solves_with_second_moments_in_explicit_bases():
    """A first step of length zero finds the bases, in which the second one measures the scale."""
    model = network()
    x, y = torch.randn(N, WIDTH).double(), torch.randn(N, WIDTH).double()
    expected = []
    for a, g in rows_of(model, x, y):
        (_, q_a), (_, q_g) = torch.linalg.eigh(a.T @ a / N), torch.linalg.eigh(N * g.T @ g)
        each = torch.einsum("ni,nj->nij", N * g @ q_g, a @ q_a)
        scale = each.square().mean(0)
        expected.append(q_g @ ((q_g.T @ (g.T @ a) @ q_a) / (scale + DAMPING)) @ q_a.T)
    optimizer = EKFAC(model, **PLAIN)
    optimizer.param_groups[0]["lr"] = 0.0
    moved(model, optimizer, x, y)
    optimizer.param_groups[0]["lr"] = 1.0
    torch.testing.assert_close(moved(model, optimizer, x, y), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_each_norm_is_damped_by_the_curvature_of_its_own_units(mode):
    """Units of a norm are blocks of a scale and a shift; the steepest unit of a norm determines its λ."""
    torch.manual_seed(0)
    norms, scales = nn.ModuleList(nn.LayerNorm(WIDTH).double() for _ in range(3)), (1.0, 30.0, 0.1)
    inputs = [torch.randn(N, WIDTH).double() for _ in norms]
    targets = [torch.randn(N, WIDTH).double() * torch.linspace(0.5, 2.0, WIDTH).double() for _ in norms]
    optimizer, expected, loss = KFAC(norms, damping_mode=mode, **PLAIN), [], 0.0
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
