"""A non-finite gradient anywhere drops the step: no parameter, momentum or factor changes, and it is counted."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from tests.contract.methods import Method, Variant
from tests.contract.tasks import Task, assert_changed, assert_identical, backward, train, values

KEPT = ("momentum_buffer", "exp_avg", "exp_avg_sq", "factor_a", "factor_g", "factor_weight")
RULES: dict[str, dict[str, Any]] = {
    "momentum": {},
    "decay": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "adamw-fallback": {"fallback": "adamw"},
    "inner-adamw": {"inner": "adamw", "lr": 1e-3},
    "graft-adam": {"graft": "adam", "lr": 1e-3},
    "loop": {"foreach": False},
    "batched": {"foreach": True},
}


def kept(optimizer: Any) -> list[dict[str, torch.Tensor]]:
    return [{key: state[key].clone() for key in KEPT if key in state} for state in optimizer.state.values()]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["first.weight", "second.bias", "scale.gain"])
def test_one_bad_number_drops_the_step(method: Method, variant: Variant, mlp: Task, where: str, bad: float) -> None:
    model = mlp.model()
    optimizer = method.build(model, **variant.keywords)
    train(model, optimizer, mlp, 2)  # the next step updates the factors
    parameters, state = values(model), kept(optimizer)
    backward(model, optimizer, mlp, 2)
    model.get_parameter(where).grad.view(-1)[0] = bad
    optimizer.step()
    assert_identical(values(model), parameters)
    assert_identical(kept(optimizer), state)
    assert optimizer.diagnostics()["skipped_steps"] == 1
    train(model, optimizer, mlp, 4, start=3)
    assert_changed(model, parameters)
    assert optimizer.diagnostics()["skipped_steps"] == 1


@pytest.mark.parametrize("rule", RULES)
def test_under_every_rule(method: Method, mlp: Task, rule: str) -> None:
    model = mlp.model()
    optimizer = method.build(model, factor_update_steps=1, **RULES[rule])
    train(model, optimizer, mlp, 3)
    parameters, state = values(model), kept(optimizer)
    for _ in range(2):
        backward(model, optimizer, mlp, 3)
        model.second.weight.grad[0, 0] = math.nan
        optimizer.step()
    assert_identical(values(model), parameters)
    assert_identical(kept(optimizer), state)
    assert optimizer.diagnostics()["skipped_steps"] == 2


def test_batch_that_overflows_drops_the_step(method: Method, variant: Variant, task: Task) -> None:
    """Everything that the hooks saw is non-finite too."""
    model = task.model()
    optimizer = method.build(model, **{**variant.keywords, "factor_update_steps": 1})
    train(model, optimizer, task, 3)
    parameters, state = values(model), kept(optimizer)
    optimizer.zero_grad()
    (math.inf * task.loss(model, 3)).backward()
    optimizer.step()
    assert_identical(values(model), parameters)
    assert_identical(kept(optimizer), state)
    assert optimizer.diagnostics()["skipped_steps"] == 1
    train(model, optimizer, task, 4, start=4)
    assert_changed(model, parameters)


def after_a_bad_first_batch(method: Method, task: Task, **keywords: Any) -> Any:
    model = task.model()
    optimizer = method.build(model, **keywords)
    (math.nan * task.loss(model, 0)).backward()
    optimizer.step()
    assert_identical(values(model), values(task.model()))
    return model, optimizer


@pytest.mark.option("factor_update_steps", "inv_update_steps")
def test_bad_first_batch_leaves_a_new_optimizer(method: Method, variant: Variant, mlp: Task) -> None:
    keywords = {**variant.keywords, "factor_update_steps": 1, "inv_update_steps": 1}
    model, optimizer = after_a_bad_first_batch(method, mlp, **keywords)
    fresh = mlp.model()
    train(model, optimizer, mlp, 3, start=1)
    train(fresh, method.build(fresh, **keywords), mlp, 3, start=1)
    assert_identical(values(model), values(fresh))


def test_until_there_is_an_estimate_the_step_is_the_gradients(method: Method, variant: Variant, mlp: Task) -> None:
    """After a bad first batch with longer intervals: never the gradient over λ, nor zero."""
    model, optimizer = after_a_bad_first_batch(method, mlp, **variant.keywords, **method.bare())
    fresh = mlp.model()
    new = method.build(fresh, **variant.keywords, **method.bare())
    start = values(model)
    train(model, optimizer, mlp, 1, start=1)
    train(fresh, new, mlp, 1, start=1)
    for name, value in values(model).items():
        allowed = [-model.get_parameter(name).grad, values(fresh)[name] - start[name]]
        assert any(torch.allclose(value - start[name], move, rtol=1e-9, atol=1e-13) for move in allowed), name


def test_no_step_is_skipped_in_ordinary_training(method: Method, task: Task) -> None:
    model = task.model()
    optimizer = method.build(model)
    train(model, optimizer, task, 5)
    assert optimizer.diagnostics()["skipped_steps"] == 0


def test_diagnostics_are_plain_data(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model)
    for step in range(3):
        report = optimizer.diagnostics()
        assert json.loads(json.dumps(report)) == report
        assert type(report["skipped_steps"]) is int
        train(model, optimizer, mlp, 1, start=step)
