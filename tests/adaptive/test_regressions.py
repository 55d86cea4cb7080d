"""Rejected steps whose direction comes from momentum of gradients: they must not come again for ever."""

import torch
from torch import Tensor, nn

from secondorder import EKFAC
from tests.support.quadratic import Loop, batch, flat, mlp

PRE = {"momentum": 0.9, "momentum_mode": "pre", "kl_clip": None, "reject_steps": True}
OFTEN = {"factor_update_steps": 1, "inv_update_steps": 1}


def momenta(optimizer: EKFAC, model: nn.Module) -> Tensor:
    return flat(optimizer.state[p]["gradient_momentum"] for p in model.parameters())


def test_momentum_of_gradients_that_is_rejected_twice_starts_anew() -> None:
    """An isolated rejection restores it; a second one in a row ends it."""
    model, (x, y) = mlp(), batch()
    optimizer = EKFAC(model, lr=0.01, damping=0.1, **PRE, **OFTEN)
    loop = Loop(model, optimizer, x, y)
    for _ in range(3):
        optimizer.step(loop)
    assert optimizer.diagnostics()["rejected_steps"] == 0
    kept, start = momenta(optimizer, model), flat(model.parameters())
    assert float(kept.norm()) > 0

    def rising() -> float:
        loop()
        return float(loop.calls)

    optimizer.step(rising)
    assert torch.equal(momenta(optimizer, model), kept)
    optimizer.step(loop)  # taken: the count starts anew
    kept, start = momenta(optimizer, model), flat(model.parameters())
    optimizer.step(rising)
    assert torch.equal(momenta(optimizer, model), kept)
    optimizer.step(rising)
    assert torch.equal(momenta(optimizer, model), torch.zeros_like(kept))
    assert torch.equal(flat(model.parameters()), start)


def test_the_step_after_two_rejections_is_along_the_gradient_of_now() -> None:
    """λ is so large that the direction is a multiple of the bias-corrected mean of gradients."""
    model, (x, y) = mlp(), batch()
    optimizer = EKFAC(model, lr=1e6, damping=1e9, **PRE, **OFTEN)
    for t in range(4):
        optimizer.step(Loop(model, optimizer, x.roll(t, 1), y))
    assert optimizer.diagnostics()["rejected_steps"] == 0
    loop = Loop(model, optimizer, x, (y + 1) % 4)
    for _ in range(2):
        optimizer.step(lambda: (loop(), float(loop.calls))[1])
    damping = optimizer.param_groups[0]["damping"]
    with optimizer.keep_directions() as directions:
        optimizer.step(loop)
    found = damping * flat(directions[name] for name, _ in model.named_parameters())
    gradient = flat(p.grad for p in model.parameters())
    assert float((found - gradient).norm()) <= 1e-6 * float(gradient.norm())


def test_rejection_does_not_stall_on_a_quadratic() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2)).double()
    x, y = torch.randn(16, 3).double(), torch.randn(16, 2).double()
    optimizer = EKFAC(model, lr=1.0, damping=1.0, **PRE, **OFTEN)
    loop = Loop(model, optimizer, x, y, lambda f, t: (f - t).square().sum(1).mean())
    losses, longest = [], 0
    for _ in range(150):
        losses.append(float(optimizer.step(loop).detach()))
        longest = max(longest, optimizer.param_groups[0]["rejected_in_a_row"])
    rows = torch.cat([x, torch.ones(16, 1, dtype=torch.float64)], 1)
    least = float((rows @ torch.linalg.lstsq(rows, y).solution - y).square().sum(1).mean())
    assert optimizer.diagnostics()["rejected_steps"] > 0
    assert longest <= 20
    assert losses[-1] - least <= 0.05 * (losses[0] - least)
