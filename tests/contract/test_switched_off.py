"""With an interval of 0, preconditioning is switched off, and steps are bitwise equal to those of `torch.optim`."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, assert_same_moves, snapshot, train, values

pytestmark = pytest.mark.option("skip_layers")

SGD_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0}, "momentum": {"momentum": 0.9}, "weight-decay": {"momentum": 0.9, "weight_decay": 0.1},
    "plain-weight-decay": {"momentum": 0.0, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "maximize": {"momentum": 0.9, "maximize": True, "weight_decay": 0.01},
}  # fmt: skip
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
    "betas and eps": {"betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.0},
}


def compare(
    method: Method, task: Task, keywords: dict[str, Any], reference: Callable[[Any], Any], dtype: torch.dtype
) -> None:
    """Compare twenty steps, half of them under a schedule."""
    model, twin = task.model(dtype), task.model(dtype)
    pairs = [(model, method.build(model, **method.every(0), **keywords)), (twin, reference(twin.parameters()))]
    schedules = [CosineAnnealingLR(optimizer, 20) for _, optimizer in pairs]
    for step in range(20):
        for net, optimizer in pairs:
            train(net, optimizer, task, 1, start=step)
        assert_identical(values(model), values(twin))
        for schedule in schedules if step >= 10 else ():
            schedule.step()


@pytest.mark.cover(options=[*SGD_OPTIONS], dtype=[torch.float64, torch.float32], foreach=[None, False, True])
def test_equals_sgd(method: Method, task: Task, options: str, dtype: torch.dtype, foreach: bool | None) -> None:
    chosen = SGD_OPTIONS[options]
    compare(method, task, {"lr": 0.05, **chosen, "foreach": foreach}, lambda p: SGD(p, 0.05, **chosen), dtype)


@pytest.mark.cover(dtype=[torch.float64, torch.float32], options=[*ADAMW_OPTIONS], rule=[*ADAMW_RULES])
def test_equals_adamw(method: Method, task: Task, rule: str, options: str, dtype: torch.dtype) -> None:
    chosen = ADAMW_OPTIONS[options]
    theirs = Adam if rule == "coupled" else AdamW
    compare(method, task, {"lr": 0.01, **ADAMW_RULES[rule], **chosen}, lambda p: theirs(p, 0.01, **chosen), dtype)


def test_kl_clip_and_grafting_do_not_touch_it(method: Method, mlp: Task) -> None:
    for option in ({"kl_clip": 1e-9}, {"graft": "sgd"}):
        compare(method, mlp, {"lr": 0.05, **option}, lambda p: SGD(p, 0.05, momentum=0.9), torch.float64)


def test_nothing_is_captured(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, **method.every(0))
    fresh = snapshot(optimizer)["state"]
    train(model, optimizer, mlp, 5)
    for index, now in optimizer.state_dict()["state"].items():
        for key in now.keys() - {"step", "momentum_buffer", "global_step"}:
            assert_identical(now[key], fresh[index][key])


def test_turned_on_later_it_starts_like_a_new_optimizer(method: Method, mlp: Task) -> None:
    """This holds at any step, not only at multiples of the intervals, and uses statistics of the same step."""
    bare = method.bare(lr=0.05, **method.every(0, capture=10))
    model, optimizer = method.start(mlp, 3, **bare)
    optimizer.param_groups[0][method.refresh_keyword] = 20
    fresh, later = method.start(mlp, **bare | method.every(20, capture=10))
    fresh.load_state_dict(model.state_dict())
    for pair in ((model, optimizer), (fresh, later)):
        train(*pair, mlp, 1, start=3)
    assert_identical(values(model), values(fresh))
    assert {optimizer.state[block.owner]["refreshes"] for block in optimizer.blocks.values()} == {1}


def test_turned_off_later_it_is_sgd_again(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, 3, momentum=0.0, lr=0.05)
    optimizer.param_groups[0][method.refresh_keyword] = 0
    twin, curvature = copy.deepcopy(model), optimizer.state[model.first.weight][method.landmark].clone()
    for pair in ((model, optimizer), (twin, SGD(twin.parameters(), 0.05))):
        train(*pair, mlp, 4, start=3)
    assert_identical(values(model), values(twin))
    assert_identical(optimizer.state[model.first.weight][method.landmark], curvature)


def test_one_group_off_and_one_on(method: Method, mlp: Task) -> None:
    def groups(model: Any) -> list[dict[str, Any]]:
        rest = [*model.scale.parameters(), *model.second.parameters()]
        return [{"params": list(model.first.parameters()), method.refresh_keyword: 0}, {"params": rest}]

    (moved,), (preconditioned,) = (method.bare_moves(mlp, 1, params=params) for params in (groups, None))
    model = mlp.model()
    mlp.loss(model, 0).backward()
    for name in ("first.weight", "first.bias"):
        preconditioned[name] = -model.get_parameter(name).grad
    assert_same_moves(moved, preconditioned)
