"""A non-finite gradient anywhere drops the step: no parameter, momentum or curvature changes, and it is counted."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch

from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_changed, assert_identical, backward, train, values

KEPT = (
    "step", "momentum_buffer", "gradient_momentum", "exp_avg", "exp_avg_sq", "factor_a", "factor_g", "factor_weight",
    "scale", "scale_weight", "rows_a", "rows_g", "kernel", "kernel_damping", "refreshes",
)  # fmt: skip
RULES: dict[str, dict[str, Any]] = {
    "momentum": {},
    "decay": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "adamw-fallback": {"fallback": "adamw"},
    "inner-adamw": {"inner": "adamw", "lr": 1e-3},
    "graft-adam": {"graft": "adam", "lr": 1e-3},
    "loop": {"foreach": False},
    "batched": {"foreach": True},
    "ema": {"momentum_mode": "ema"},
    "over-gradients": {"momentum_mode": "pre"},
    "betas": {"betas": (0.9, 0.99), "bias_correction": True},
    "relative-damping": {"damping": 0.1, "damping_mode": "relative"},
    "legacy-decay": {"weight_decay": 0.01, "weight_decay_mode": "legacy"},
    "decay-beside": {"weight_decay": 0.1, "weight_decay_mode": "reg"},
}
COUNTED = {"skipped", "global_step"}  # what a dropped step of a window method may write
BY_STEP = "amplification"  # of the last ten steps, dropped ones among them: each has its place


def kept(method: Method, optimizer: Any) -> list[dict[str, Any]]:
    """Of a layer method, whose capture is over before the step is judged, not what a refresh derives."""
    keys = [set(KEPT) if method.layerwise else state.keys() - COUNTED for state in optimizer.state.values()]
    states = zip(optimizer.state.values(), keys, strict=True)
    return [{key: copy.deepcopy(state[key]) for key in sorted(own & state.keys())} for state, own in states]


@pytest.mark.cover(where=["first.weight", "second.bias", "scale.gain"], bad=[math.nan, math.inf, -math.inf])
def test_one_bad_number_drops_the_step(method: Method, variant: Variant, mlp: Task, where: str, bad: float) -> None:
    model, optimizer = method.start(mlp, **variant.keywords)
    train(model, optimizer, mlp, 2)  # the next step updates the factors
    parameters, state = values(model), kept(method, optimizer)
    backward(model, optimizer, mlp, 2)
    model.get_parameter(where).grad.view(-1)[0] = bad
    optimizer.step()
    assert_identical(values(model), parameters)
    assert_identical(kept(method, optimizer), state)
    assert optimizer.diagnostics()["skipped_steps"] == 1
    train(model, optimizer, mlp, 4, start=3)
    assert_changed(model, parameters)
    assert optimizer.diagnostics()["skipped_steps"] == 1


@pytest.mark.rules(RULES)
def test_a_bad_number_drops_the_step_under_every_rule(method: Method, mlp: Task, rule: str) -> None:
    model, optimizer = method.start(mlp, 3, **method.eager, **RULES[rule])
    parameters, state = values(model), kept(method, optimizer)
    for _ in range(2):
        backward(model, optimizer, mlp, 3)
        model.second.weight.grad[0, 0] = math.nan
        optimizer.step()
    assert_identical(values(model), parameters)
    assert_identical(kept(method, optimizer), state)
    assert optimizer.diagnostics()["skipped_steps"] == 2


def test_batch_that_overflows_drops_the_step(method: Method, variant: Variant, task: Task) -> None:
    """Everything that the hooks saw is non-finite too."""
    model, optimizer = method.start(task, 3, **{**variant.keywords, **method.eager})
    parameters, state = values(model), kept(method, optimizer)
    optimizer.zero_grad()
    (math.inf * task.loss(model, 3)).backward()
    optimizer.step()
    assert_identical(values(model), parameters)
    assert_identical(kept(method, optimizer), state)
    assert optimizer.diagnostics()["skipped_steps"] == 1
    train(model, optimizer, task, 4, start=4)
    assert_changed(model, parameters)


def after_a_bad_first_batch(method: Method, task: Task, **keywords: Any) -> Any:
    model, optimizer = method.start(task, **keywords)
    (math.nan * task.loss(model, 0)).backward()
    optimizer.step()
    assert_identical(values(model), values(task.model()))
    return model, optimizer


def test_bad_first_batch_leaves_a_new_optimizer(method: Method, variant: Variant, mlp: Task) -> None:
    keywords = {**variant.keywords, **method.eager}
    if method.layerwise:
        keywords |= method.every(1)
    model, optimizer = after_a_bad_first_batch(method, mlp, **keywords)
    fresh = mlp.model()
    train(model, optimizer, mlp, 3, start=1)
    train(fresh, method.build(fresh, **keywords), mlp, 3, start=1)
    assert_identical(values(model), values(fresh))


def test_until_there_is_an_estimate_the_step_is_the_gradients(method: Method, variant: Variant, mlp: Task) -> None:
    """After a bad first batch with longer intervals: never the gradient over λ, nor zero."""
    model, optimizer = after_a_bad_first_batch(method, mlp, **method.bare(**variant.keywords))
    fresh, new = method.start(mlp, **method.bare(**variant.keywords))
    start = values(model)
    train(model, optimizer, mlp, 1, start=1)
    train(fresh, new, mlp, 1, start=1)
    for name, value in values(model).items():
        allowed = [-model.get_parameter(name).grad, values(fresh)[name] - start[name]]
        assert any(torch.allclose(value - start[name], move, rtol=1e-9, atol=1e-13) for move in allowed), name


def test_diagnostics_of_ordinary_training_are_plain_data_and_skip_nothing(
    method: Method, variant: Variant, task: Task
) -> None:
    model, optimizer = method.start(task, **variant.keywords)
    for step in range(6):
        report = optimizer.diagnostics()
        assert json.loads(json.dumps(report)) == report
        assert type(report["skipped_steps"]) is int
        assert report["skipped_steps"] == 0
        train(model, optimizer, task, 1, start=step)


@pytest.mark.option("window_size")
@pytest.mark.cover(dtype=[torch.float32, torch.bfloat16, torch.float64])
def test_gradient_whose_square_overflows_drops_the_step(
    method: Method, variant: Variant, mlp: Task, dtype: torch.dtype
) -> None:
    """Finite numbers, and a window could not hold their products."""
    size = 1e151 if dtype is torch.float64 else 1e16
    model = mlp.model(dtype)
    optimizer = method.build(model, **variant.keywords)
    train(model, optimizer, mlp, 5)
    parameters, state = values(model), kept(method, optimizer)
    backward(model, optimizer, mlp, 5)
    model.second.weight.grad[1, 2] = size
    optimizer.step()
    assert_identical(values(model), parameters)
    assert_identical(kept(method, optimizer), state)
    assert optimizer.diagnostics()["skipped_steps"] == 1
    train(model, optimizer, mlp, 2, start=6)
    assert all(value.isfinite().all() for value in values(model).values())


@pytest.mark.option("window_size")
def test_every_window_counts_the_dropped_step(method: Method, variant: Variant, mlp: Task) -> None:
    model, optimizer = method.start(mlp, 2, **variant.keywords)
    backward(model, optimizer, mlp, 2)
    model.second.bias.grad[0] = math.inf
    optimizer.step()
    for names in variant.units(model).values():
        state = optimizer.state[model.get_parameter(names[0])]
        assert (int(state["skipped"]), int(state["count"])) == (1, 2), names
    assert optimizer.diagnostics()["step"] in (2, 3)


@pytest.mark.option("window_size")
def test_the_window_is_clean_after_a_dropped_step(method: Method, variant: Variant, mlp: Task) -> None:
    """Bad steps in between, as often as the ring is long: as if they had not been."""
    model, twin = mlp.model(), mlp.model()
    optimizer, undisturbed = method.build(model, **variant.keywords), method.build(twin, **variant.keywords)
    for step in range(10):
        backward(model, optimizer, mlp, 100 + step)
        model.first.bias.grad[1] = math.nan
        optimizer.step()
        train(model, optimizer, mlp, 1, start=step)
        train(twin, undisturbed, mlp, 1, start=step)
    assert_identical(values(model), values(twin))
    ours, theirs = kept(method, optimizer), kept(method, undisturbed)
    for state in (*ours, *theirs):
        state.pop(BY_STEP, None)
    assert_identical(ours, theirs)
