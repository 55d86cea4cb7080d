"""Refreshes every 0 steps: nothing is captured and the step is torch's own, to the bit; it can be turned on and off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, covered_layers, displacements, snapshot, train, values

pytestmark = pytest.mark.option("skip_layers")

SGD_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "momentum": {"momentum": 0.9},
    "weight-decay": {"momentum": 0.9, "weight_decay": 0.1},
    "plain-weight-decay": {"momentum": 0.0, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "maximize": {"momentum": 0.9, "maximize": True, "weight_decay": 0.01},
}
ADAMW_RULES: dict[str, dict[str, Any]] = {
    "inner": {"inner": "adamw", "fallback": "adamw", "fallback_lr": 0.01},
    "graft": {"graft": "adamw"},
    "decoupled": {"graft": "adam", "decoupled_weight_decay": True},
    "coupled": {"graft": "adam"},
}
ADAMW_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"weight_decay": 0.0},
    "weight-decay": {"weight_decay": 0.1},
    "maximize": {"weight_decay": 0.1, "maximize": True},
}


def compare(
    method: Method, task: Task, keywords: dict[str, Any], reference: Callable[[Any], Any], dtype: torch.dtype
) -> None:
    model, twin = task.model(dtype), task.model(dtype)
    optimizer, theirs = method.build(model, **method.every(0), **keywords), reference(twin.parameters())
    for step in range(20):
        train(model, optimizer, task, 1, start=step)
        train(twin, theirs, task, 1, start=step)
        assert_identical(values(model), values(twin))


@pytest.mark.cover(options=[*SGD_OPTIONS], dtype=[torch.float64, torch.float32])
def test_equals_sgd(method: Method, mlp: Task, options: str, dtype: torch.dtype) -> None:
    chosen = SGD_OPTIONS[options]
    compare(method, mlp, {"lr": 0.05, **chosen}, lambda p: SGD(p, 0.05, **chosen), dtype)


def test_equals_sgd_on_every_task(method: Method, task: Task) -> None:
    compare(method, task, {"lr": 0.05}, lambda p: SGD(p, 0.05, momentum=0.9), torch.float32)


@pytest.mark.cover(foreach=[False, True])
def test_equals_sgd_with_either_implementation(method: Method, mlp: Task, foreach: bool) -> None:
    options = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "foreach": foreach}
    compare(method, mlp, {"lr": 0.05, **options}, lambda p: SGD(p, 0.05, **options), torch.float32)


@pytest.mark.cover(dtype=[torch.float64, torch.float32], options=[*ADAMW_OPTIONS], rule=[*ADAMW_RULES])
def test_equals_adamw(method: Method, mlp: Task, rule: str, options: str, dtype: torch.dtype) -> None:
    chosen = ADAMW_OPTIONS[options]
    theirs = Adam if rule == "coupled" else AdamW
    compare(method, mlp, {"lr": 0.01, **ADAMW_RULES[rule], **chosen}, lambda p: theirs(p, 0.01, **chosen), dtype)


@pytest.mark.cover(rule=[*ADAMW_RULES])
def test_equals_adamw_with_its_own_betas_and_eps(method: Method, task: Task, rule: str) -> None:
    betas = {"fallback_betas": (0.8, 0.95), "fallback_eps": 1e-4}
    reference = lambda p: AdamW(p, 0.01, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.0)  # noqa: E731
    compare(method, task, {"lr": 0.01, **ADAMW_RULES[rule], **betas}, reference, torch.float32)
    written = {"betas": (0.8, 0.95), "eps": 1e-4}
    if not method.accepts("sgd_weight"):
        compare(method, task, {"lr": 0.01, **ADAMW_RULES[rule], **written}, reference, torch.float32)


@pytest.mark.cover(theirs=["sgd", "adamw"])
def test_follows_a_schedule_exactly(method: Method, mlp: Task, theirs: str) -> None:
    model, twin = mlp.model(), mlp.model()
    options: dict[str, Any] = {"graft": "adamw", "lr": 0.01} if theirs == "adamw" else {"lr": 0.05}
    optimizer = method.build(model, **method.every(0), weight_decay=0.1, **options)
    if theirs == "adamw":
        reference: Any = AdamW(twin.parameters(), 0.01, weight_decay=0.1)
    else:
        reference = SGD(twin.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 20) for o in (optimizer, reference)]
    for step in range(20):
        train(model, optimizer, mlp, 1, start=step)
        train(twin, reference, mlp, 1, start=step)
        for schedule in schedules:
            schedule.step()
    assert_identical(values(model), values(twin))


def test_kl_clip_and_grafting_do_not_touch_it(method: Method, mlp: Task) -> None:
    """They belong to the preconditioned direction."""
    reference = lambda p: SGD(p, 0.05, momentum=0.9)  # noqa: E731
    compare(method, mlp, {"lr": 0.05, "kl_clip": 1e-9}, reference, torch.float64)
    compare(method, mlp, {"lr": 0.05, "graft": "sgd"}, reference, torch.float64)


def test_nothing_is_captured(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, **method.every(0))
    fresh = snapshot(optimizer)
    train(model, optimizer, mlp, 5)
    for now, then in zip(optimizer.state_dict()["state"].values(), fresh["state"].values(), strict=True):
        for key in now.keys() - {"step", "momentum_buffer", "global_step"}:
            assert_identical(now[key], then[key])


def test_turned_on_later_it_starts_like_a_new_optimizer(method: Method, mlp: Task) -> None:
    """At any step, not only at a multiple of the intervals, and from statistics of that very step."""
    model, optimizer = method.start(mlp, 3, **method.bare(lr=0.05, **method.every(0, capture=10)))
    optimizer.param_groups[0][method.refresh_keyword] = 20
    fresh = mlp.model()
    fresh.load_state_dict(model.state_dict())
    train(model, optimizer, mlp, 1, start=3)
    later = method.build(fresh, **method.bare(lr=0.05, **method.every(20, capture=10)))
    train(fresh, later, mlp, 1, start=3)
    assert_identical(values(model), values(fresh))
    assert all(optimizer.state[model.get_parameter(n[0])]["refreshes"] == 1 for n in covered_layers(model).values())


def test_turned_off_later_it_is_sgd_again(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, 3, momentum=0.0, lr=0.05)
    optimizer.param_groups[0][method.refresh_keyword] = 0
    twin = mlp.model()
    twin.load_state_dict(model.state_dict())
    curvature = optimizer.state[model.first.weight][method.landmark].clone()
    train(model, optimizer, mlp, 4, start=3)
    train(twin, SGD(twin.parameters(), 0.05), mlp, 4, start=3)
    assert_identical(values(model), values(twin))
    assert_identical(optimizer.state[model.first.weight][method.landmark], curvature)


def test_one_group_off_and_one_on(method: Method, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    groups = [{"params": list(model.first.parameters()), method.refresh_keyword: 0}]
    groups.append({"params": [*model.scale.parameters(), *model.second.parameters()]})
    mixed, whole = method.build(model, groups, **method.bare()), method.build(twin, **method.bare())
    (moved,), (preconditioned,) = displacements(model, mixed, mlp, 1), displacements(twin, whole, mlp, 1)
    for name in ("first.weight", "first.bias"):
        torch.testing.assert_close(moved[name], -model.get_parameter(name).grad, rtol=1e-9, atol=1e-13)
    for name in ("second.weight", "second.bias"):
        torch.testing.assert_close(moved[name], preconditioned[name], rtol=1e-9, atol=1e-13)
