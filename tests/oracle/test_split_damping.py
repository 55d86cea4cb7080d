"""Damping that is split over the factors, in float32 at a realistic width, against a solve in float64."""

import pytest
import torch
from torch import nn

from secondorder import KFAC

WIDTH, OUT, DAMPING = 512, 64, 0.1


def damped_factors(state, damping):
    """``A + π√λ I`` and ``G + √λ/π I`` in float64, from the factors that the optimizer holds."""
    a, g = state["factor_a"].double(), state["factor_g"].double()
    pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
    shares = (a, pi * damping**0.5), (g, damping**0.5 / pi)
    return [x + share * torch.eye(len(x), dtype=x.dtype) for x, share in shares]


def one_step(width, out, examples, **keywords):
    torch.manual_seed(0)
    layer = nn.Linear(width, out, bias=False)
    opt = KFAC(layer, damping_split="pi", kl_clip=None, **keywords)
    # Positive inputs make one eigenvalue hundreds of times the mean, and its rounding comparable to what λ adds.
    x, y = torch.rand(examples, width) + 1, torch.randn(examples, out) + 1
    (layer(x) * y).sum(1).mean().backward()
    gradient = layer.weight.grad.clone()
    with opt.keep_directions() as kept:
        opt.step()
    return opt, layer, gradient, kept["weight"]


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_nothing_is_added_to_a_damping_that_the_factors_contain(method):
    opt, layer, gradient, found = one_step(WIDTH, OUT, 96, damping=DAMPING, inverse_method=method)
    a, g = damped_factors(opt.state[layer.weight], DAMPING)
    expected = torch.linalg.solve(g, torch.linalg.solve(a, gradient.double().mT).mT)
    error = torch.linalg.vector_norm(found.double() - expected) / torch.linalg.vector_norm(expected)
    assert error < 1e-3


def test_a_split_damping_below_rounding_leaves_finite_steps():
    _, _, _, found = one_step(32, 8, 4, damping=1e-30)
    assert torch.isfinite(found).all()
