"""`maximize=True` on the negative loss is minimizing the loss, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_identical, displacements, train, values

RULES: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "momentum": {},
    "nesterov": {"nesterov": True},
    "coupled-decay": {"weight_decay": 0.1},
    "decoupled-decay": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "adamw-fallback": {"fallback": "adamw", "weight_decay": 0.1},
    "inner-adamw": {"inner": "adamw", "lr": 1e-3},
    "graft-sgd": {"graft": "sgd"},
    "graft-adam": {"graft": "adam", "lr": 1e-3},
    "clipped": {"clip_norm": 0.5, "clip_value": 0.1},
    "ema": {"momentum_mode": "ema", "weight_decay": 0.1},
    "legacy-decay": {"weight_decay": 0.01, "weight_decay_mode": "legacy"},
}
WINDOW_RULES: dict[str, dict[str, Any]] = {
    "over-gradients": {"momentum_mode": "pre"},
    "betas": {"betas": (0.9, 0.99), "bias_correction": True},
    "in-the-span": {"betas": (0.5, 1.0), "sgd_weight": 0.0},
    "decay-beside": {"weight_decay": 0.1, "weight_decay_mode": "reg"},
    "both-decays": {"weight_decay": 0.01, "weight_decay_mode": "both"},
    "relative-damping": {"damping": 0.1, "damping_mode": "relative"},
    "window-scale": {"scale": "window"},
    "eigh": {"solver": "eigh"},
}


def ascend(method: Method, task: Task, **keywords: Any) -> dict[str, Any]:
    model, optimizer = method.start(task, maximize=True, **keywords)
    for step in range(5):
        optimizer.zero_grad()
        (-task.loss(model, step)).backward()
        optimizer.step()
    return values(model)


def descend(method: Method, task: Task, **keywords: Any) -> dict[str, Any]:
    model = task.model()
    train(model, method.build(model, **keywords), task, 5)
    return values(model)


@pytest.mark.rules({**RULES, **WINDOW_RULES})
def test_maximizing_the_negative_is_minimizing(method: Method, mlp: Task, rule: str) -> None:
    keywords = {**RULES, **WINDOW_RULES}[rule]
    assert_identical(ascend(method, mlp, **keywords), descend(method, mlp, **keywords))


def test_for_every_variant_and_task(method: Method, variant: Variant, task: Task) -> None:
    assert_identical(ascend(method, task, **variant.keywords), descend(method, task, **variant.keywords))


def test_maximize_is_read_from_each_group(method: Method, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.second.parameters())}]
    same = [{"params": list(twin.first.parameters())}, {"params": list(twin.second.parameters())}]
    mixed, plain = method.build(model, groups, **method.bare()), method.build(twin, same, **method.bare())
    mixed.param_groups[1]["maximize"] = True
    (moved,), (descent,) = displacements(model, mixed, mlp, 1), displacements(twin, plain, mlp, 1)
    for name in ("first.weight", "first.bias", "second.weight", "second.bias"):
        sign = -1.0 if name.startswith("second.") else 1.0
        torch.testing.assert_close(moved[name], sign * descent[name], rtol=1e-9, atol=1e-13)
