"""Steps that raise the loss are undone bit for bit, raise damping, are counted, and are not repeated forever."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder import EKFAC, KFAC
from tests.support.building import built
from tests.support.grid import pairs
from tests.support.quadratic import Loop, batch, damping, flat, mlp, momenta, problem, repeat

OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "adamw": {"inner": "adamw"},
    "graft": {"graft": "adam"},
    "fallback": {"skip_layers": "3", "fallback": "adamw", "momentum": 0.9},
    "model": {"quadratic_model": True, "momentum": 0.9, "likelihood": "categorical"},
    "decay": {"weight_decay": 0.1, "decoupled_weight_decay": True, "nesterov": True, "momentum": 0.5},
}
#: Momentum of gradients instead of directions.
PRE = {
    "momentum": 0.9, "momentum_mode": "pre", "kl_clip": None, "reject_steps": True,
    "factor_update_steps": 1, "inv_update_steps": 1,
}  # fmt: skip


def rule_state(optimizer: KFAC) -> list[Tensor]:
    keys = ("step", "momentum_buffer", "exp_avg", "exp_avg_sq", "gradient_momentum")
    return [v.clone() for s in optimizer.state.values() for k, v in s.items() if k in keys]


def ekfac(**options: Any) -> tuple[nn.Sequential, EKFAC, Loop]:
    model, (x, y) = mlp(), batch()
    optimizer = built(EKFAC, model, **PRE, **options)
    return model, optimizer, Loop(model, optimizer, x, y)


@pairs(bad=[1e3, math.nan, math.inf], options=OPTIONS)
def test_a_step_that_raised_the_loss_is_undone_bit_for_bit(options: dict[str, Any], bad: float) -> None:
    model, optimizer, loop = problem(lr=0.05, reject_steps=True, outputs=True, **options)
    spoiled = False

    def closure() -> Any:
        loss, outputs = loop()
        return (loss.detach() + bad, outputs) if spoiled and loop.calls % 2 == 0 else (loss, outputs)

    repeat(optimizer, closure, 3)
    assert optimizer.diagnostics()["rejected_steps"] == 0
    before, state, moved = flat(model.parameters()), rule_state(optimizer), damping(optimizer)
    spoiled = True
    optimizer.step(closure)
    assert loop.calls == 8
    assert torch.equal(flat(model.parameters()), before)
    assert all(torch.equal(a, b) for a, b in zip(rule_state(optimizer), state, strict=True))
    assert damping(optimizer) == pytest.approx(moved / 0.95**5)
    assert optimizer.diagnostics()["rejected_steps"] == 1
    assert optimizer.diagnostics()["step"] == 4
    spoiled = False
    optimizer.step(closure)
    assert not torch.equal(flat(model.parameters()), before)


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({}, [1 / 0.95, 2.0, 4.0, 8.0, 16.0]),
        ({"damping_interval": 2, "max_damping": 0.12}, [1 / 0.95**2, 1.2 * 0.95**2, 1.0]),
    ],
    ids=str,
)
def test_damping_rises_faster_with_every_rejection_in_a_row(options: dict[str, Any], factors: list[float]) -> None:
    _, optimizer, loop = problem(adaptive_damping=True, reject_steps=True, **{"damping_interval": 1, **options})
    seen = [damping(optimizer)]
    for _ in factors:
        optimizer.step(loop.rising)
        seen.append(damping(optimizer))
    assert [b / a for a, b in pairwise(seen)] == pytest.approx(factors)
    if not options:
        optimizer.step(loop)  # a step that is taken resets the count
        before = damping(optimizer)
        optimizer.step(loop.rising)
        assert damping(optimizer) == pytest.approx(before / 0.95)


@pytest.mark.parametrize("key", ["momentum_buffer", "gradient_momentum"])
def test_two_rejections_in_a_row_reset_momentum(key: str) -> None:
    """A single rejection restores momentum; a second one would recur for any λ, so it resets momentum."""
    if key == "gradient_momentum":
        model, optimizer, loop = ekfac(lr=0.01, damping=0.1)
    else:
        model, optimizer, loop = problem(momentum=0.9, lr=0.05, reject_steps=True)
    repeat(optimizer, loop, 3)
    for _ in range(2):
        kept, state, start = momenta(optimizer, key), rule_state(optimizer), flat(model.parameters())
        assert kept.any()
        optimizer.step(loop.rising)
        assert all(torch.equal(a, b) for a, b in zip(rule_state(optimizer), state, strict=True))
        assert torch.equal(flat(model.parameters()), start)
        optimizer.step(loop)  # a step that is taken resets the count
    start = flat(model.parameters())
    repeat(optimizer, loop.rising, 2)
    assert not momenta(optimizer, key).any()
    assert torch.equal(flat(model.parameters()), start)


def test_the_step_after_two_rejections_is_along_the_current_gradient() -> None:
    """λ is so large that the direction is a multiple of the bias-corrected mean of gradients."""
    model, optimizer, loop = ekfac(lr=1e6, damping=1e9)
    for t in range(4):
        optimizer.step(Loop(model, optimizer, loop.x.roll(t, 1), loop.y))
    assert optimizer.diagnostics()["rejected_steps"] == 0
    loop.y = (loop.y + 1) % 4
    repeat(optimizer, loop.rising, 2)
    lam = damping(optimizer)
    with optimizer.keep_directions() as directions:
        optimizer.step(loop)
    found = lam * flat(directions[name] for name, _ in model.named_parameters())
    gradient = flat(p.grad for p in model.parameters())
    assert float((found - gradient).norm()) <= 1e-6 * float(gradient.norm())


def test_momentum_that_is_allocated_by_a_rejected_step_is_zero() -> None:
    model, optimizer, loop = problem(lr=0.05, momentum=0.0, reject_steps=True)
    repeat(optimizer, loop, 1)
    for group in optimizer.param_groups:
        group.update(momentum=0.9, lr=1e6)
    before = flat(model.parameters())
    optimizer.step(loop)
    assert optimizer.diagnostics()["rejected_steps"] == 1
    assert torch.equal(flat(model.parameters()), before)
    assert not momenta(optimizer).any()
