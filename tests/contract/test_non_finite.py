"""A non-finite gradient drops the step: no parameter, momentum or curvature changes, and the step is counted."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.contract import RULES
from tests.support.device_runs import KEPT
from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_changed, assert_identical, backward, train, values

COUNTED = {"skipped", "global_step"}  # keys that a dropped step of a window method may change
BY_STEP = "amplification"  # has an entry for each of the last ten steps, including dropped ones


def kept(method: Method, optimizer: Any) -> list[dict[str, Any]]:
    """The state that a dropped step must not change; for layer methods, this excludes the results of refreshes."""
    found = []
    for state in optimizer.state.values():
        keys = {*KEPT, "step", "refreshes"} & state.keys() if method.layerwise else state.keys() - COUNTED
        found.append({key: copy.deepcopy(state[key]) for key in sorted(keys)})
    return found


def dropped(method: Method, model: nn.Module, optimizer: Any, task: Task, step: int, spoil: Any) -> None:
    """Take a step whose gradients `spoil` changes, and check that it is dropped and counted."""
    parameters, state = values(model), kept(method, optimizer)
    skipped = optimizer.diagnostics()["skipped_steps"]
    backward(model, optimizer, task, step)
    spoil()
    optimizer.step()
    assert_identical(values(model), parameters)
    assert_identical(kept(method, optimizer), state)
    assert optimizer.diagnostics()["skipped_steps"] == skipped + 1


@pytest.mark.cover(where=["first.weight", "second.bias", "scale.gain"], bad=[math.nan, math.inf, -math.inf])
def test_one_bad_number_or_a_batch_that_overflows_drops_the_step(
    method: Method, variant: Variant, mlp: Task, where: str, bad: float
) -> None:
    """If one of three micro-batches overflows, so do its captured statistics."""
    model, optimizer = method.start(mlp, 2, **variant.keywords)  # the next step updates the factors
    parameters = values(model)
    dropped(method, model, optimizer, mlp, 2, lambda: model.get_parameter(where).grad.view(-1)[0].fill_(bad))
    train(model, optimizer, mlp, 4, start=3)
    assert_changed(model, parameters)

    def overflow() -> None:
        optimizer.zero_grad()
        for scale in (1.0, math.inf, 1.0):
            (scale * mlp.loss(model, 7)).backward()

    model, optimizer = method.start(mlp, 3, **{**variant.keywords, **method.eager})
    parameters = values(model)
    dropped(method, model, optimizer, mlp, 3, overflow)
    train(model, optimizer, mlp, 4, start=4)
    assert_changed(model, parameters)
    assert optimizer.diagnostics()["skipped_steps"] == 1
    if not method.layerwise:
        for names in variant.units(model).values():
            state = optimizer.state[model.get_parameter(names[0])]
            assert (int(state["skipped"]), int(state["count"])) == (1, 7), names
        assert optimizer.diagnostics()["step"] in (7, 8)


@pytest.mark.rules(RULES | {"loop": {"foreach": False}, "batched": {"foreach": True}})
def test_a_bad_number_drops_the_step_under_every_rule(method: Method, mlp: Task, rule: str) -> None:
    model, optimizer = method.start(mlp, 3, **method.eager, **RULES.get(rule, {"foreach": rule == "batched"}))
    for _ in range(2):
        dropped(method, model, optimizer, mlp, 3, lambda: model.second.weight.grad[0, 0].fill_(math.nan))


def after_a_bad_first_batch(method: Method, task: Task, **keywords: Any) -> Any:
    model, optimizer = method.start(task, **keywords)
    (math.nan * task.loss(model, 0)).backward()
    optimizer.step()
    assert_identical(values(model), values(task.model()))
    return model, optimizer


def test_bad_first_batch_leaves_a_new_optimizer(method: Method, variant: Variant, mlp: Task) -> None:
    """With longer intervals, the step uses the gradient until there is an estimate: neither ∇ / λ nor zero."""
    keywords = {**variant.keywords, **method.eager, **(method.every(1) if method.layerwise else {})}
    pairs = after_a_bad_first_batch(method, mlp, **keywords), method.start(mlp, **keywords)
    for pair in pairs:
        train(*pair, mlp, 3, start=1)
    assert_identical(*(values(model) for model, _ in pairs))

    bare = method.bare(**variant.keywords)
    pairs = after_a_bad_first_batch(method, mlp, **bare), method.start(mlp, **bare)
    start = values(mlp.model())
    for pair in pairs:
        train(*pair, mlp, 1, start=1)
    (model, _), (fresh, _) = pairs
    for name, value in values(model).items():
        allowed = [-model.get_parameter(name).grad, values(fresh)[name] - start[name]]
        assert any(torch.allclose(value - start[name], move, rtol=1e-9, atol=1e-13) for move in allowed), name


@pytest.mark.option("window_size")
@pytest.mark.cover(dtype=[torch.float32, torch.bfloat16, torch.float64])
def test_gradient_whose_square_overflows_drops_the_step(
    method: Method, variant: Variant, mlp: Task, dtype: torch.dtype
) -> None:
    """The entries are finite, but the window cannot store their products."""
    size = 1e151 if dtype is torch.float64 else 1e16
    model = mlp.model(dtype)
    optimizer = method.build(model, **variant.keywords)
    train(model, optimizer, mlp, 5)
    dropped(method, model, optimizer, mlp, 5, lambda: model.second.weight.grad[1, 2].fill_(size))
    train(model, optimizer, mlp, 2, start=6)
    assert all(value.isfinite().all() for value in values(model).values())


@pytest.mark.option("window_size")
def test_the_window_is_clean_after_a_dropped_step(method: Method, variant: Variant, mlp: Task) -> None:
    """Dropped steps between the others have no effect, even if there are more of them than rows."""
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
