"""`step(closure)` calls the closure once with gradients enabled and returns its loss; hooks of `torch.optim` work."""

from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, backward, snapshot, train, values


def test_training_by_closure_equals_training_by_hand(method: Method, task: Task) -> None:
    """Statistics that are captured inside `step` are used in the same step. A step returns what the closure does."""
    model, optimizer = method.start(task)
    results = iter([None, 0.5, "loss", *map(torch.tensor, (1.0, 2.0, 3.0))])
    calls: list[Any] = []

    def closure() -> Any:
        assert torch.is_grad_enabled()
        backward(model, optimizer, task, len(calls))
        calls.append(next(results))
        return calls[-1]

    for step in range(6):
        with torch.no_grad():
            assert optimizer.step(closure) is calls[step]
        assert len(calls) == step + 1
    assert_identical(values(model), method.trained(task, 6))
    assert optimizer.step() is None
    assert optimizer.step(closure=None) is None


def test_a_closure_that_raises_changes_nothing(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    with pytest.raises(RuntimeError, match="out of data"):
        optimizer.step(Mock(side_effect=RuntimeError("out of data")))
    assert_identical(values(model), values(mlp.model()))
    train(model, optimizer, mlp, 3)
    assert_identical(values(model), method.trained(mlp, 3))


def test_step_hooks_run_around_the_step_until_they_are_removed(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    start, seen = values(model), []

    def note(name: str, opt: Any, args: Any, kwargs: Any) -> None:
        assert opt is optimizer
        seen.append((name, torch.equal(model.first.weight, start["first.weight"])))

    with (
        optimizer.register_step_pre_hook(partial(note, "pre")),
        optimizer.register_step_post_hook(partial(note, "post")),
        register_optimizer_step_pre_hook(partial(note, "global pre")),
        register_optimizer_step_post_hook(partial(note, "global post")),
    ):
        train(model, optimizer, mlp, 1)
    train(model, optimizer, mlp, 1)
    assert sorted(seen) == [("global post", False), ("global pre", True), ("post", False), ("pre", True)]


def test_a_step_pre_hook_may_replace_arguments_and_gradients(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, momentum=0.0)

    def clear(opt: Any, args: Any, kwargs: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.zero_()

    handle = optimizer.register_step_pre_hook(clear)
    train(model, optimizer, mlp, 1)
    assert_identical(values(model), values(mlp.model()))
    handle.remove()
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((opt, lambda: 3.0), {}))
    assert optimizer.step() == 3.0


def test_state_dict_hooks_run_in_order_and_receive_the_state_that_is_saved(method: Method, mlp: Task) -> None:
    _, optimizer = method.start(mlp, 2, checkpoint_curvature="none")
    expected, seen = snapshot(optimizer), []

    def wrap(opt: Any, saved: dict[str, Any]) -> dict[str, Any]:
        seen.append("post")
        assert_identical(saved, expected)
        return {"optimizer": saved}

    optimizer.register_state_dict_post_hook(wrap)
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("pre"))
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("first"), prepend=True)
    assert_identical(optimizer.state_dict(), {"optimizer": expected})
    assert seen == ["first", "pre", "post"]


def test_load_state_dict_hooks_run_in_order_and_may_complete_a_checkpoint(method: Method, mlp: Task) -> None:
    """Torch's documentation recommends this for incompatible checkpoints, so checks must run after the hook."""
    _, optimizer = method.start(mlp, 2, lr=0.125)
    saved, second, seen = snapshot(optimizer), method.build(mlp.model()), []

    def before(opt: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        assert opt is second
        seen.append(float(opt.state_dict()["state"][0]["step"]))
        return {**state_dict, "state": saved["state"]}

    def after(opt: Any) -> None:
        assert_identical(snapshot(opt), saved)
        seen.append("post")

    second.register_load_state_dict_pre_hook(before)
    second.register_load_state_dict_post_hook(after)
    second.load_state_dict({**saved, "state": {}})
    assert seen == [0.0, "post"]
