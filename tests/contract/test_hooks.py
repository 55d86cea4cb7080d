"""The hooks of `torch.optim.Optimizer`: around `step`, `state_dict` and `load_state_dict`."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, backward, snapshot, train, values


def test_step_hooks_run_around_the_step(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    start, seen = values(model), []

    def note(name: str) -> Any:
        def hook(opt: Any, args: Any, kwargs: Any) -> None:
            assert opt is optimizer
            seen.append((name, torch.equal(model.first.weight, start["first.weight"])))

        return hook

    optimizer.register_step_pre_hook(note("pre"))
    optimizer.register_step_post_hook(note("post"))
    train(model, optimizer, mlp, 1)
    assert seen == [("pre", True), ("post", False)]


def test_step_pre_hook_may_replace_the_arguments(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((opt, lambda: 3.0), {}))
    assert optimizer.step() == 3.0


def test_removed_step_hook_is_silent(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    seen: list[int] = []
    handle = optimizer.register_step_post_hook(lambda *_: seen.append(1))
    train(model, optimizer, mlp, 1)
    handle.remove()
    train(model, optimizer, mlp, 1)
    assert seen == [1]


def test_global_step_hooks_run(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("post")),
    ]
    try:
        train(model, optimizer, mlp, 1)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["pre", "post"]


def test_hooks_do_not_change_the_result(method: Method, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    hooked, plain = method.build(model), method.build(twin)
    hooked.register_step_pre_hook(lambda *_: None)
    hooked.register_step_post_hook(lambda *_: None)
    train(model, hooked, mlp, 4)
    train(twin, plain, mlp, 4)
    assert_identical(values(model), values(twin))


def test_state_dict_hooks_run_in_order(method: Method, mlp: Task) -> None:
    optimizer = method.build(mlp.model())
    seen: list[str] = []

    def replace(opt: Any, saved: dict[str, Any]) -> dict[str, Any]:
        seen.append("post")
        return {**saved, "note": "mine"}

    optimizer.register_state_dict_post_hook(replace)
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("pre"))
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("first"), prepend=True)
    assert optimizer.state_dict()["note"] == "mine"
    assert seen == ["first", "pre", "post"]


def test_load_state_dict_hooks_run_in_order(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, 2)
    saved = snapshot(optimizer)
    second = method.build(mlp.model())
    seen: list[str] = []

    def before(opt: Any, state_dict: dict[str, Any]) -> None:
        assert opt is second
        assert float(opt.state_dict()["state"][0]["step"]) == 0
        seen.append("pre")

    def after(opt: Any) -> None:
        assert_identical(snapshot(opt), saved)
        seen.append("post")

    second.register_load_state_dict_pre_hook(before)
    second.register_load_state_dict_post_hook(after)
    second.load_state_dict(saved)
    assert seen == ["pre", "post"]


def test_load_state_dict_pre_hook_may_mend_a_checkpoint(method: Method, mlp: Task) -> None:
    """What torch's documentation tells users to do with a dict that does not fit: it is checked after the hook."""
    model, optimizer = method.start(mlp, 2, lr=0.125)
    good = snapshot(optimizer)
    second = method.build(mlp.model())
    second.register_load_state_dict_pre_hook(lambda opt, saved: {**saved, "state": good["state"]})
    second.load_state_dict({**good, "state": {}})
    assert_identical(snapshot(second), good)


def test_gradients_changed_by_a_pre_hook_are_used(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, momentum=0.0)

    def clear(opt: Any, args: Any, kwargs: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.zero_()

    optimizer.register_step_pre_hook(clear)
    before = values(model)
    backward(model, optimizer, mlp, 0)
    optimizer.step()
    assert_identical(values(model), before)
