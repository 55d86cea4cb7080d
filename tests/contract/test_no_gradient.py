"""Steps with nothing to do: no gradient, some gradients missing, or gradients of zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contract.methods import Method, Variant
from tests.contract.tasks import Task, assert_identical, backward, snapshot, train, values

RULES: dict[str, dict[str, Any]] = {
    "momentum": {},
    "plain": {"momentum": 0.0},
    "nesterov": {"nesterov": True},
    "adamw-fallback": {"fallback": "adamw"},
    "inner-adamw": {"inner": "adamw"},
    "graft-sgd": {"graft": "sgd"},
    "graft-adam": {"graft": "adam"},
    "no-kl-clip": {"kl_clip": None},
    "clipped": {"clip_norm": 1.0, "clip_value": 1.0},
}


@pytest.mark.parametrize("rule", RULES)
def test_first_step_without_gradients_changes_nothing(method: Method, mlp: Task, rule: str) -> None:
    model = mlp.model()
    optimizer = method.build(model, **RULES[rule])
    before = values(model)
    optimizer.step()
    assert_identical(values(model), before)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # gradients that no backward pass left: nothing was captured
def test_first_step_with_zero_gradients_changes_nothing(method: Method, mlp: Task, rule: str) -> None:
    model = mlp.model()
    optimizer = method.build(model, **RULES[rule])
    before = values(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert_identical(values(model), before)


def test_zero_gradients_of_a_real_backward_change_nothing(method: Method, variant: Variant, task: Task) -> None:
    """All factors of the output gradients are zero: they too are refreshed and used without a NaN."""
    model = task.model()
    optimizer = method.build(model, momentum=0.0, **variant.keywords)
    before = values(model)
    for step in range(5):
        optimizer.zero_grad()
        (0.0 * task.loss(model, step)).backward()
        optimizer.step()
    assert_identical(values(model), before)


def test_zero_gradients_after_training_change_nothing(method: Method, variant: Variant, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, momentum=0.0, **variant.keywords)
    train(model, optimizer, mlp, 3)
    before = values(model)
    for step in range(3, 8):
        optimizer.zero_grad()
        (0.0 * mlp.loss(model, step)).backward()
        optimizer.step()
    assert_identical(values(model), before)


def test_step_without_gradients_after_training_moves_no_parameter(method: Method, mlp: Task) -> None:
    """As in torch: momentum is not applied where there is no gradient, and `step` does not count it."""
    model = mlp.model()
    optimizer = method.build(model, weight_decay=0.1)
    train(model, optimizer, mlp, 3)
    parameters = values(model)
    buffers = [snapshot(optimizer)["state"][0][key] for key in ("step", "momentum_buffer")]
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert_identical(values(model), parameters)
    assert_identical([snapshot(optimizer)["state"][0][key] for key in ("step", "momentum_buffer")], buffers)


@pytest.mark.parametrize("missing", ["first.weight", "first.bias", "second.weight", "scale.gain"])
def test_parameter_without_a_gradient_is_skipped(method: Method, mlp: Task, missing: str) -> None:
    model = mlp.model()
    optimizer = method.build(model)
    train(model, optimizer, mlp, 2)
    before = values(model)
    backward(model, optimizer, mlp, 2)
    model.get_parameter(missing).grad = None
    optimizer.step()
    for name, value in values(model).items():
        assert value.isfinite().all()
        assert torch.equal(value, before[name]) == (name == missing), name


def test_unused_branch_is_left_alone_and_joins_later(method: Method, mlp: Task) -> None:
    """A covered layer that takes no part in the loss at first: no statistics, no step, no crash."""
    model = mlp.model()
    optimizer = method.build(model)
    unused = [model.second.weight.detach().clone(), model.second.bias.detach().clone()]
    for step in range(3):
        optimizer.zero_grad()
        model.scale(model.first(mlp.batch(step)[0])).square().mean().backward()
        optimizer.step()
    assert_identical([model.second.weight.detach(), model.second.bias.detach()], unused)
    before = values(model)
    train(model, optimizer, mlp, 2, start=3)
    for name, value in values(model).items():
        assert value.isfinite().all()
        assert not torch.equal(value, before[name]), name


@pytest.mark.option("module")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_both_kinds_of_zero_grad_train_alike(method: Method, task: Task, set_to_none: bool) -> None:
    model, twin = task.model(), task.model()
    optimizer = method.build(model)
    for step in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        task.loss(model, step).backward()
        optimizer.step()
    other = method.build(twin)
    for step in range(5):
        twin.zero_grad()  # as the Hugging Face trainer does it
        task.loss(twin, step).backward()
        other.step()
    assert_identical(values(model), values(twin))
