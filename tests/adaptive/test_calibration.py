"""Damping that is chosen at the start by the loss after a step with each candidate."""

import copy
import math
from typing import Any

import pytest
import torch

from secondorder import EKFAC, KFAC
from tests.support.building import built
from tests.support.grid import pairs
from tests.support.quadratic import Loop, batch, damping, flat, kfac, mlp, problem, repeat

GRID = [1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3]


@pairs(inverse_method=["eigen", "cholesky"], mode=["absolute", "relative"])
def test_the_best_damping_of_the_grid_is_chosen(inverse_method: str, mode: str) -> None:
    model, (x, y) = mlp(), batch()
    options: dict[str, Any] = {"inverse_method": inverse_method, "damping_mode": mode, "momentum": 0.9, "lr": 2.0}
    losses = {}
    for multiple in GRID:
        tried = copy.deepcopy(model)
        optimizer = kfac(tried, damping=0.1 * multiple, **options)
        optimizer.step(Loop(tried, optimizer, x, y))
        losses[multiple] = Loop(tried, None, x, y).value()
    best = min(losses, key=lambda m: losses[m])
    assert best not in (GRID[0], GRID[-1])  # the test would show little otherwise
    optimizer = kfac(model, damping=0.1, calibrate_damping=True, **options)
    loop = Loop(model, optimizer, x, y)
    optimizer.step(loop)
    assert loop.calls == 1 + len(GRID)
    assert damping(optimizer) == pytest.approx(0.1 * best)
    assert loop.value() == pytest.approx(losses[best], rel=1e-12)
    repeat(optimizer, loop, 3)
    assert loop.calls == 4 + len(GRID)


@pytest.mark.parametrize(
    ("method", "options"),
    [(KFAC, {}), (KFAC, {"inverse_method": "cholesky"}), (EKFAC, {}), (EKFAC, {"estimator": "running"})],
    ids=str,
)
def test_the_step_is_that_of_the_chosen_damping(method: type[KFAC], options: dict[str, Any]) -> None:
    model, (x, y) = mlp(0.3), batch()
    other, state = copy.deepcopy(model), torch.get_rng_state()
    optimizer = built(method, model, damping=0.1, calibrate_damping=True, **options)
    optimizer.step(Loop(model, optimizer, x, y))
    plain = built(method, other, damping=damping(optimizer), **options)
    torch.set_rng_state(state)
    plain.step(Loop(other, plain, x, y))
    assert torch.equal(flat(model.parameters()), flat(other.parameters()))
    for a, b in zip(optimizer.state.values(), plain.state.values(), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


def test_calibration_waits_for_the_first_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profilers see the step that is taken, but not those that are tried."""
    _, optimizer, loop = problem(calibrate_damping=True)
    loop.x, x = loop.x * math.nan, loop.x
    optimizer.step(loop)
    assert loop.calls == 1
    loop.x = x
    stages: list[str] = []
    stage = optimizer._runtime.stage
    monkeypatch.setattr(optimizer._runtime, "stage", lambda name: (stages.append(name), stage(name))[1])
    optimizer.step(loop)
    assert loop.calls == 2 + len(GRID)
    assert stages.count("update") == 1


def test_if_no_candidate_has_a_finite_loss_the_largest_damping_is_chosen() -> None:
    _, optimizer, loop = problem(calibrate_damping=True, max_damping=7.0)
    optimizer.step(lambda: (loop(), math.nan if loop.calls > 1 else 1.0)[1])
    assert damping(optimizer) == 7.0


def test_a_group_that_is_added_later_keeps_its_damping() -> None:
    model, (x, y) = mlp(), batch()
    optimizer = kfac(list(model[0].parameters()), module=model, calibrate_damping=True)
    loop = Loop(model, optimizer, x, y)
    optimizer.step(loop)
    optimizer.add_param_group({"params": list(model[3].parameters()), "damping": 0.7})
    calls = loop.calls
    optimizer.step(loop)
    assert loop.calls == calls + 1
    assert optimizer.param_groups[1]["damping"] == 0.7


@pytest.mark.parametrize("fails", [2, 3, 1 + len(GRID)])
def test_an_error_undoes_the_step_that_is_tried(fails: int) -> None:
    model, optimizer, loop = problem(calibrate_damping=True, momentum=0.9)
    before, given = flat(model.parameters()), damping(optimizer)

    def closure() -> Any:
        if loop.calls == fails - 1:
            raise ValueError("the data ran out")
        return loop()

    with pytest.raises(ValueError, match="the data ran out"):
        optimizer.step(closure)
    assert torch.equal(flat(model.parameters()), before)
    assert damping(optimizer) == given
    assert not any(state["step"] for state in optimizer.state.values())
