"""Layers without biases whose sides are multiples of 16, as most transformers and residual networks have them.

Their matrices need neither padding nor a column of ones, so a direction could be memory that the next layer overwrites.
Every direction is compared with an explicit solution from the factors in the state, layer by layer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secondorder import EKFAC, KFAC, HyLo, SecondOrderOptimizer

DAMPING = 0.1
CASES: dict[str, tuple[type[SecondOrderOptimizer], dict[str, Any]]] = {
    "cholesky": (KFAC, {"inverse_method": "cholesky"}),
    "eigen": (KFAC, {}),
    "ekfac": (EKFAC, {}),
    "running": (EKFAC, {"estimator": "running"}),
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(16, 64, 3, padding=1, bias=False), nn.Conv2d(64, 80, 1, bias=False)]
    linear = [nn.Linear(80, 96, bias=False), nn.Tanh(), nn.Linear(96, 64, bias=False), nn.Linear(64, 64, bias=False)]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *linear).double()


def _solution(name: str, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The direction of a layer by the definition."""
    if name == "cholesky":
        a, g = state["factor_a"], state["factor_g"]
        pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
        damped_a = a + pi * DAMPING**0.5 * torch.eye(len(a), dtype=a.dtype)
        damped_g = g + DAMPING**0.5 / pi * torch.eye(len(g), dtype=g.dtype)
        return torch.linalg.solve(damped_g, torch.linalg.solve(damped_a, gradient.mT).mT)
    if name == "eigen":
        (values_a, q_a), (values_g, q_g) = (torch.linalg.eigh(state[f"factor_{side}"]) for side in "ag")
        return q_g @ ((q_g.mT @ gradient @ q_a) / (torch.outer(values_g, values_a) + DAMPING)) @ q_a.mT
    q_a, q_g = state["basis_a"], state["basis_g"]
    return q_g @ ((q_g.mT @ gradient @ q_a) / (state["scale"] + DAMPING)) @ q_a.mT


def _kept(opt: SecondOrderOptimizer, model: nn.Module) -> dict[str, Tensor]:
    """The directions of a step on one batch."""
    x = torch.randn(24, 16, 4, 4, dtype=torch.float64)
    F.cross_entropy(model(x), torch.randint(64, (24,))).backward()
    with opt.keep_directions() as kept:
        opt.step()
    return dict(kept)


@pytest.mark.parametrize("name", CASES)
def test_every_layer_has_its_own_direction(name: str) -> None:
    model = _model()
    kind, keywords = CASES[name]
    opt = kind(model, damping=DAMPING, kl_clip=None, **keywords)
    kept = _kept(opt, model)
    gradients = {n: p.grad.flatten(1) for n, p in model.named_parameters() if p.grad is not None}
    for n, p in model.named_parameters():
        wanted = _solution(name, gradients[n], opt.state[p]).reshape(p.shape)
        torch.testing.assert_close(kept[n], wanted, rtol=1e-8, atol=0.0, msg=lambda text, n=n: f"{n}: {text}")


@pytest.mark.parametrize("mode", ["kid", "sngd"])
def test_rows_of_every_layer_give_their_own_direction(mode: str) -> None:
    """Beside the same layer alone: all others are left out of the method."""
    whole = _model()
    kept = _kept(HyLo(whole, damping=DAMPING, mode=mode, rank_fraction=0.5), whole)
    for n, _ in whole.named_parameters():
        model = _model()
        others = [other for other, _ in model.named_children() if other != n.partition(".")[0]]
        found = _kept(HyLo(model, damping=DAMPING, mode=mode, rank_fraction=0.5, skip_layers=others), model)
        torch.testing.assert_close(kept[n], found[n], rtol=1e-9, atol=1e-12)
