"""Damping chosen at the start, from the true loss after a step with each candidate."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from secondorder import EKFAC, KFAC
from tests.support.quadratic import Loop, batch, flat, kfac, mlp

GRID = [1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3]


@pytest.mark.parametrize("inverse_method", ["eigen", "cholesky"])
@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_the_best_of_the_grid_is_taken(inverse_method: str, mode: str) -> None:
    model, (x, y) = mlp(), batch()
    options: dict[str, Any] = {"inverse_method": inverse_method, "damping_mode": mode, "momentum": 0.9, "lr": 2.0}
    losses = {}
    for multiple in GRID:
        tried = copy.deepcopy(model)
        optimizer = kfac(tried, damping=0.1 * multiple, **options)
        optimizer.step(Loop(tried, optimizer, x, y))
        losses[multiple] = Loop(tried, None, x, y).value()
    best = min(losses, key=lambda m: losses[m])
    assert best not in (GRID[0], GRID[-1])  # else this says little
    optimizer = kfac(model, damping=0.1, calibrate_damping=True, **options)
    loop = Loop(model, optimizer, x, y)
    optimizer.step(loop)
    assert loop.calls == 1 + len(GRID)
    assert optimizer.param_groups[0]["damping"] == pytest.approx(0.1 * best)
    assert loop.value() == pytest.approx(losses[best], rel=1e-12)
    for _ in range(3):
        optimizer.step(loop)
    assert loop.calls == 4 + len(GRID)


@pytest.mark.parametrize(
    ("method", "options"),
    [(KFAC, {}), (KFAC, {"inverse_method": "cholesky"}), (EKFAC, {}), (EKFAC, {"estimator": "running"})],
    ids=str,
)
def test_the_step_is_that_of_the_damping_it_found(method: type[KFAC], options: dict[str, Any]) -> None:
    model, (x, y) = mlp(0.3), batch()
    other, state = copy.deepcopy(model), torch.get_rng_state()
    optimizer = method(model, damping=0.1, calibrate_damping=True, **options)
    optimizer.step(Loop(model, optimizer, x, y))
    plain = method(other, damping=optimizer.param_groups[0]["damping"], **options)
    torch.set_rng_state(state)
    plain.step(Loop(other, plain, x, y))
    assert torch.equal(flat(model.parameters()), flat(other.parameters()))
    for a, b in zip(optimizer.state.values(), plain.state.values(), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


def test_it_waits_for_the_first_estimate() -> None:
    model, (x, y) = mlp(), batch()
    optimizer = kfac(model, calibrate_damping=True)
    loop = Loop(model, optimizer, x * math.nan, y)
    optimizer.step(loop)
    assert loop.calls == 1
    loop.x = x
    optimizer.step(loop)
    assert loop.calls == 2 + len(GRID)


def test_where_no_candidate_has_a_finite_loss_the_greatest_damping_is_taken() -> None:
    model, (x, y) = mlp(), batch()
    optimizer = kfac(model, calibrate_damping=True, max_damping=7.0)
    loop = Loop(model, optimizer, x, y)
    optimizer.step(lambda: (loop(), math.nan if loop.calls > 1 else 1.0)[1])
    assert optimizer.param_groups[0]["damping"] == 7.0


def test_a_late_group_keeps_its_damping() -> None:
    model, (x, y) = mlp(), batch()
    optimizer = kfac(list(model[0].parameters()), module=model, calibrate_damping=True)
    loop = Loop(model, optimizer, x, y)
    optimizer.step(loop)
    optimizer.add_param_group({"params": list(model[3].parameters()), "damping": 0.7})
    calls = loop.calls
    optimizer.step(loop)
    assert loop.calls == calls + 1
    assert optimizer.param_groups[1]["damping"] == 0.7
