"""Steps with nothing to do: no gradient, some gradients missing, or gradients of zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.methods import Method, Variant
from tests.support.tasks import (
    Task,
    assert_all_close,
    assert_changed,
    assert_identical,
    backward,
    snapshot,
    train,
    values,
)

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
    "relative-damping": {"damping": 0.1, "damping_mode": "relative"},
    "ema": {"momentum_mode": "ema"},
    "over-gradients": {"momentum_mode": "pre"},
    "betas": {"betas": (0.9, 0.99), "bias_correction": True},
    "in-the-span": {"betas": (0.5, 1.0), "sgd_weight": 0.0},
    "window-scale": {"scale": "window"},
    "cholesky": {"solver": "cholesky"},
    "eigh": {"solver": "eigh"},
}


@pytest.mark.rules(RULES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # gradients that no backward pass left: nothing was captured
def test_first_steps_without_gradients_and_with_zero_gradients_change_nothing(
    method: Method, mlp: Task, rule: str
) -> None:
    for zeros in (False, True):
        model = mlp.model()
        optimizer, before = method.build(model, **RULES[rule]), values(model)
        for parameter in model.parameters() if zeros else ():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert_identical(values(model), before)


def test_zero_gradients_of_a_real_backward_change_nothing(method: Method, variant: Variant, task: Task) -> None:
    """All factors of the output gradients, or all rows of a window, are zero: used without a NaN all the same."""
    model, optimizer = method.start(task, momentum=0.0, **variant.keywords)
    before = values(model)
    for step in range(5):
        optimizer.zero_grad()
        (0.0 * task.loss(model, step)).backward()
        optimizer.step()
    assert_identical(values(model), before)


def test_zero_gradients_after_training_change_nothing(method: Method, variant: Variant, mlp: Task) -> None:
    model, optimizer = method.start(mlp, 3, momentum=0.0, **variant.keywords)
    before = values(model)
    for step in range(3, 8):
        optimizer.zero_grad()
        (0.0 * mlp.loss(model, step)).backward()
        optimizer.step()
    if variant.lingers:  # what was not sent yet still is, and an average of gradients still goes on
        assert all(value.isfinite().all() for value in values(model).values())
    else:
        assert_identical(values(model), before)


def test_step_without_gradients_after_training_moves_no_parameter(method: Method, mlp: Task) -> None:
    """As in torch: momentum is not applied where there is no gradient, and `step` does not count it."""
    model, optimizer = method.start(mlp, 3, weight_decay=0.1)
    parameters = values(model)
    buffers = [snapshot(optimizer)["state"][0][key] for key in ("step", "momentum_buffer")]
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert_identical(values(model), parameters)
    assert_identical([snapshot(optimizer)["state"][0][key] for key in ("step", "momentum_buffer")], buffers)


@pytest.mark.cover(missing=["first.weight", "first.bias", "second.weight", "scale.gain"])
def test_parameter_without_a_gradient_is_skipped(method: Method, mlp: Task, missing: str) -> None:
    model, optimizer = method.start(mlp, 2)
    before = values(model)
    backward(model, optimizer, mlp, 2)
    model.get_parameter(missing).grad = None
    optimizer.step()
    for name, value in values(model).items():
        assert value.isfinite().all()
        assert torch.equal(value, before[name]) == (name == missing), name


def test_unused_branch_is_left_alone_and_joins_later(method: Method, mlp: Task) -> None:
    """A covered layer that takes no part in the loss at first: no curvature, no step, no crash."""
    model, optimizer = method.start(mlp)
    unused = [model.second.weight.detach().clone(), model.second.bias.detach().clone()]
    for step in range(3):
        optimizer.zero_grad()
        model.scale(model.first(mlp.batch(step)[0])).square().mean().backward()
        optimizer.step()
    assert_identical([model.second.weight.detach(), model.second.bias.detach()], unused)
    before = values(model)
    train(model, optimizer, mlp, 2, start=3)
    assert_changed(model, before)


@pytest.mark.option("window_size")
@pytest.mark.cover(missing=[["first.weight"], ["scale.gain", "second.weight", "second.bias"]])
def test_a_missing_gradient_is_a_zero_slice_of_the_row(
    method: Method, variant: Variant, mlp: Task, missing: list[str]
) -> None:
    """The others move as if it had been zero; the parameter itself, its decay and its momentum rest."""
    results = []
    for absent in (True, False):
        model, optimizer = method.start(mlp, 5, weight_decay=0.1, decoupled_weight_decay=True, **variant.keywords)
        start = values(model)
        for step in range(5, 11):
            backward(model, optimizer, mlp, step)
            for name in missing:
                parameter = model.get_parameter(name)
                parameter.grad = None if absent else torch.zeros_like(parameter)
            optimizer.step()
            if not absent:
                with torch.no_grad():
                    for name in missing:
                        model.get_parameter(name).copy_(start[name])
        assert_identical({name: values(model)[name] for name in missing}, {name: start[name] for name in missing})
        counts = [float(optimizer.state[model.get_parameter(name)]["step"]) for name in missing]
        assert counts == [5.0 if absent else 11.0] * len(missing)
        results.append(values(model))
    if variant.own_state(model.first.weight) & {"error", "tail_error"}:
        return  # a zero gradient sends what an earlier one left; a missing one does not
    assert_all_close(results[0], results[1], rtol=1e-10, atol=1e-13)


@pytest.mark.option("window_size")
@pytest.mark.cover(frozen=["first.weight", "second.bias"])
def test_parameter_frozen_in_between_stays_in_the_window(
    method: Method, variant: Variant, mlp: Task, frozen: str
) -> None:
    model, optimizer = method.start(mlp, 3, **variant.keywords)
    before = values(model)
    parameter = model.get_parameter(frozen)
    parameter.requires_grad_(False)
    train(model, optimizer, mlp, 3, start=3)
    for name, value in values(model).items():
        assert torch.equal(value, before[name]) == (name == frozen), name
    parameter.requires_grad_(True)
    before = values(model)
    train(model, optimizer, mlp, 3, start=6)
    assert_changed(model, before)


@pytest.mark.option("window_size")
@pytest.mark.cover(frozen=["first.weight", "second.bias"])
def test_parameter_frozen_at_construction_joins_when_it_thaws(
    method: Method, variant: Variant, mlp: Task, frozen: str
) -> None:
    """Until then the window is that of the others."""
    model, twin = mlp.model(), mlp.model()
    model.get_parameter(frozen).requires_grad_(False)
    optimizer = method.build(model, **variant.keywords)
    others = [(name, p) for name, p in twin.named_parameters() if name != frozen]
    reference = method.build(twin, others, **variant.keywords)
    train(model, optimizer, mlp, 5)
    train(twin, reference, mlp, 5)
    assert_identical(values(model), values(twin))
    assert not optimizer.state[model.get_parameter(frozen)].keys() & variant.dtypes(torch.float64).keys()
    model.get_parameter(frozen).requires_grad_(True)
    before = values(model)
    train(model, optimizer, mlp, 6, start=5)
    assert_changed(model, before)


@pytest.mark.option("module")
@pytest.mark.cover(set_to_none=[True, False])
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
