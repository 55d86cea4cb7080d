"""Steps that raise the loss are undone to the bit, answered with more damping, and counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from secondorder import EKFAC, KFAC
from tests.support.quadratic import Loop, batch, flat, kfac, mlp

OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "adamw": {"inner": "adamw"},
    "graft": {"graft": "adam"},
    "fallback": {"skip_layers": "3", "fallback": "adamw", "momentum": 0.9},
    "model": {"quadratic_model": True, "momentum": 0.9, "likelihood": "categorical"},
    "decay": {"weight_decay": 0.1, "decoupled_weight_decay": True, "nesterov": True, "momentum": 0.5},
}


def rule_state(optimizer: KFAC) -> list[Tensor]:
    keys = ("step", "momentum_buffer", "exp_avg", "exp_avg_sq", "gradient_momentum")
    return [v.clone() for s in optimizer.state.values() for k, v in s.items() if k in keys]


@pytest.mark.parametrize("bad", [1e3, math.nan, math.inf])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_that_raised_the_loss_is_undone_to_the_bit(name: str, bad: float) -> None:
    model, (x, y) = mlp(), batch()
    optimizer = kfac(model, lr=0.05, reject_steps=True, **OPTIONS[name])
    loop, spoiled = Loop(model, optimizer, x, y, outputs=True), False

    def closure() -> Any:
        loss, outputs = loop()
        return (loss.detach() + bad, outputs) if spoiled and loop.calls % 2 == 0 else (loss, outputs)

    for _ in range(3):
        optimizer.step(closure)
    assert optimizer.diagnostics()["rejected_steps"] == 0
    before, state, moved = flat(model.parameters()), rule_state(optimizer), optimizer.param_groups[0]["damping"]
    spoiled = True
    optimizer.step(closure)
    assert loop.calls == 8
    assert torch.equal(flat(model.parameters()), before)
    assert all(torch.equal(a, b) for a, b in zip(rule_state(optimizer), state, strict=True))
    assert optimizer.param_groups[0]["damping"] == pytest.approx(moved / 0.95**5)
    assert optimizer.diagnostics()["rejected_steps"] == 1
    assert optimizer.diagnostics()["step"] == 4
    spoiled = False
    optimizer.step(closure)
    assert not torch.equal(flat(model.parameters()), before)


def test_momentum_in_the_gradient_is_undone_too() -> None:
    model, (x, y) = mlp(), batch()
    optimizer = EKFAC(model, lr=0.1, momentum=0.9, momentum_mode="pre", kl_clip=None, damping=0.1, reject_steps=True)
    loop = Loop(model, optimizer, x, y)
    optimizer.step(loop)
    state = rule_state(optimizer)
    assert len(state) == 8
    optimizer.step(lambda: (loop(), float(loop.calls))[1])
    assert optimizer.diagnostics()["rejected_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(rule_state(optimizer), state, strict=True))


def test_without_rejection_a_bad_step_stays() -> None:
    model, (x, y) = mlp(), batch()
    optimizer = kfac(model, lr=100.0, adaptive_damping=True, damping_interval=1)
    loop = Loop(model, optimizer, x, y)
    before = loop.value()
    optimizer.step(loop)
    assert loop.value() > before
    assert optimizer.diagnostics()["rejected_steps"] == 0


def test_the_loss_never_rises() -> None:
    model, (x, y) = mlp(), batch()
    optimizer = kfac(model, lr=8.0, momentum=0.9, reject_steps=True, adaptive_damping=True, damping_interval=3)
    loop, losses = Loop(model, optimizer, x, y), []
    for _ in range(25):
        optimizer.step(loop)
        losses.append(loop.value())
    assert all(b <= a for a, b in zip(losses, losses[1:], strict=False))
    assert 0 < optimizer.diagnostics()["rejected_steps"] < 25
    assert losses[-1] < 0.8 * losses[0]
    assert loop.calls == 50


def test_a_rejected_step_raises_damping_once_and_by_the_ceiling() -> None:
    model, (x, y) = mlp(), batch()
    optimizer = kfac(model, adaptive_damping=True, damping_interval=2, reject_steps=True, max_damping=0.12)
    loop = Loop(model, optimizer, x, y)
    seen = []
    for _ in range(3):
        optimizer.step(lambda: (loop(), float(loop.calls))[1])
        seen.append(optimizer.param_groups[0]["damping"])
    assert seen == [pytest.approx(0.1 / 0.95**2), 0.12, 0.12]


def test_damping_rises_ever_faster_with_rejections_in_a_row() -> None:
    model, (x, y) = mlp(), batch()
    optimizer = kfac(model, adaptive_damping=True, damping_interval=1, reject_steps=True)
    loop = Loop(model, optimizer, x, y)
    seen = [optimizer.param_groups[0]["damping"]]
    for _ in range(5):
        optimizer.step(lambda: (loop(), float(loop.calls))[1])
        seen.append(optimizer.param_groups[0]["damping"])
    assert [b / a for a, b in zip(seen, seen[1:], strict=False)] == pytest.approx([1 / 0.95, 2.0, 4.0, 8.0, 16.0])
    optimizer.step(loop)  # taken: the count starts anew
    before = optimizer.param_groups[0]["damping"]
    optimizer.step(lambda: (loop(), float(loop.calls))[1])
    assert optimizer.param_groups[0]["damping"] == pytest.approx(before / 0.95)


def test_momentum_that_is_rejected_twice_starts_anew() -> None:
    """An isolated rejection restores momentum; one that would come again, whatever λ is, ends it."""
    model, (x, y) = mlp(), batch()
    optimizer = kfac(model, momentum=0.9, lr=0.05, reject_steps=True)
    loop = Loop(model, optimizer, x, y)
    optimizer.step(loop)
    buffers = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    kept = flat(buffers)

    def rising() -> float:
        loop()
        return float(loop.calls)

    optimizer.step(rising)
    assert torch.equal(flat(buffers), kept)
    optimizer.step(loop)  # taken: the count starts anew
    optimizer.step(rising)
    assert flat(buffers).any()
    optimizer.step(rising)
    assert not flat(buffers).any()
