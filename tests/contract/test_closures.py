"""`step(closure)`: called once, under grad, its loss returned."""

from __future__ import annotations

import pytest
import torch

from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, backward, train, values


def test_closure_runs_once_per_step_with_grad_enabled_and_its_loss_comes_back(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    for step in range(5):
        grad_enabled, losses = [], []

        def closure() -> torch.Tensor:
            grad_enabled.append(torch.is_grad_enabled())  # noqa: B023 - used within the iteration
            optimizer.zero_grad()
            loss = mlp.loss(model, step)  # noqa: B023
            loss.backward()
            losses.append(loss)  # noqa: B023
            return loss

        with torch.no_grad():
            returned = optimizer.step(closure)
        assert grad_enabled == [True]
        assert returned is losses[0]


def test_training_by_closure_equals_training_by_hand(method: Method, task: Task) -> None:
    """What is captured inside `step` counts for that very step."""
    by_hand, by_closure = task.model(), task.model()
    train(by_hand, method.build(by_hand), task, 6)
    optimizer = method.build(by_closure)
    for step in range(6):
        optimizer.step(lambda: backward(by_closure, optimizer, task, step))  # noqa: B023
    assert_identical(values(by_closure), values(by_hand))


def test_step_without_closure_returns_none(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    backward(model, optimizer, mlp, 0)
    assert optimizer.step() is None
    assert optimizer.step(closure=None) is None


def test_closure_may_return_none(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    before = values(model)

    def closure() -> None:
        backward(model, optimizer, mlp, 0)

    assert optimizer.step(closure) is None
    assert not torch.equal(model.first.weight, before["first.weight"])


def test_closure_may_return_a_float(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    assert optimizer.step(lambda: float(backward(model, optimizer, mlp, 0))) == float(mlp.loss(mlp.model(), 0).detach())


def test_failing_closure_leaves_everything_as_it_was(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    before = values(model)

    def closure() -> torch.Tensor:
        raise RuntimeError("out of data")

    with pytest.raises(RuntimeError, match="out of data"):
        optimizer.step(closure)
    assert_identical(values(model), before)
    twin = mlp.model()
    train(twin, method.build(twin), mlp, 3)
    train(model, optimizer, mlp, 3)
    assert_identical(values(model), values(twin))
