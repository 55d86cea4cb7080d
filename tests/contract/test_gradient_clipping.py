"""Clipping of gradients before a step, by `torch.nn.utils`: what a method sees is what is left of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.methods import Method
from tests.support.tasks import Task, assert_all_close, assert_identical, backward, values

CLIPS: dict[str, Callable[[nn.Module, float], Any]] = {
    "norm": lambda model, bound: nn.utils.clip_grad_norm_(model.parameters(), bound),
    "value": lambda model, bound: nn.utils.clip_grad_value_(model.parameters(), bound),
}


def run(method: Method, task: Task, before_step: Callable[[nn.Module], Any], steps: int = 4) -> Any:
    model, optimizer = method.start(task)
    for step in range(steps):
        backward(model, optimizer, task, step)
        before_step(model)
        optimizer.step()
    return values(model), optimizer.state_dict()


@pytest.mark.cover(clip=[*CLIPS])
def test_a_bound_that_is_not_reached_changes_nothing(method: Method, mlp: Task, clip: str) -> None:
    clipped = run(method, mlp, lambda model: CLIPS[clip](model, 1e6))
    assert_identical(clipped, run(method, mlp, lambda model: None))


@pytest.mark.cover(clip=[*CLIPS])
def test_a_step_uses_the_clipped_gradients(method: Method, mlp: Task, clip: str) -> None:
    bound = 0.01

    def by_hand(model: nn.Module) -> None:
        gradients = [p.grad for p in model.parameters()]
        norm = torch.sqrt(sum(g.square().sum() for g in gradients))
        factor = bound / (norm + 1e-6)
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.grad = g * factor if clip == "norm" else g.clamp(-bound, bound)

    found, _ = run(method, mlp, lambda model: CLIPS[clip](model, bound))
    expected, _ = run(method, mlp, by_hand)
    free, _ = run(method, mlp, lambda model: None)
    assert_all_close(found, expected, rtol=1e-9, atol=1e-12)
    assert any(not torch.equal(found[name], free[name]) for name in free)


@pytest.mark.option("factor_update_steps")
def test_factors_know_nothing_of_clipping(method: Method, mlp: Task) -> None:
    """They come from the backward itself: a direction is as much shorter as its gradient."""
    keywords, steps = method.bare(), []
    for bound in (None, 0.01):
        model, optimizer = method.start(mlp, **keywords)
        backward(model, optimizer, mlp, 0)
        before, norm = values(model), 1.0
        if bound is not None:
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), bound))
        optimizer.step()
        scale = 1.0 if bound is None else bound / (norm + 1e-6)
        steps.append({name: (value - before[name]) / scale for name, value in values(model).items()})
    assert_all_close(steps[1], steps[0], rtol=1e-6, atol=1e-9)
