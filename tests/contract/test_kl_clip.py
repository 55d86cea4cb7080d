"""kl-clip: one factor `min(1, sqrt(κ / s))` for all blocks, with `s = Σ η² ⟨V, ∇⟩` and the learning rates of now.

The factor may be computed in single precision, hence the tolerance of 1e-6.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_all_close, assert_identical, covered_names, displacements, values

pytestmark = pytest.mark.option("kl_clip")

LRS = {"first": 0.3, "rest": 0.7}


def lr_of(name: str) -> float:
    return LRS["first"] if name.startswith("first.") else LRS["rest"]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.startswith("first.")], "lr": LRS["first"]},
        {"params": [p for name, p in named if not name.startswith("first.")], "lr": LRS["rest"]},
    ]


def check(method: Method, task: Task, kl_clip: float, gamma: float = 1.0, **keywords: Any) -> list[float]:
    """Compare with the formula over six steps, the learning rates multiplied by `gamma` after each; the factors."""
    model, twin = task.model(), task.model()
    plain = method.build(model, **method.bare(**keywords))
    clipped = method.build(twin, groups(twin), **method.bare(**{**keywords, "kl_clip": kl_clip}))
    schedule = torch.optim.lr_scheduler.ExponentialLR(clipped, gamma)
    factors = []
    pairs = zip(displacements(model, plain, task, 6), displacements(twin, clipped, task, 6, schedule.step), strict=True)
    for step, (direction, moved) in enumerate(pairs):
        gradients = {name: p.grad for name, p in twin.named_parameters()}
        lrs = {name: lr_of(name) * gamma**step for name in gradients}
        covered = covered_names(twin)
        s = sum(lrs[n] ** 2 * float((-direction[n] * gradients[n]).sum()) for n in covered)
        factor = min(1.0, (kl_clip / abs(s)) ** 0.5)
        factors.append(factor)
        for name in covered:
            torch.testing.assert_close(moved[name], lrs[name] * factor * direction[name], rtol=1e-6, atol=1e-13)
        gain = "scale.gain"
        torch.testing.assert_close(moved[gain], -lrs[gain] * gradients[gain], rtol=1e-9, atol=1e-13)
    return factors


@pytest.mark.cover(kl_clip=[1e-6, 1e-4])
def test_formula_over_groups(method: Method, variant: Variant, task: Task, kl_clip: float) -> None:
    assert min(check(method, task, kl_clip, **variant.keywords)) < 1


def test_scheduled_lr_enters_the_factor(method: Method, mlp: Task) -> None:
    """s falls with the square of the learning rate, so the factor doubles where lr halves, up to 1."""
    factors = check(method, mlp, 1e-4, gamma=0.25)
    assert factors[0] < 0.5
    assert factors[-1] == 1.0


def test_weight_decay_and_momentum_do_not_enter(method: Method, mlp: Task) -> None:
    results = []
    for options in ({}, {"weight_decay": 0.5, "decoupled_weight_decay": True}):
        model, optimizer = method.start(mlp, **{**method.bare(lr=0.5), "kl_clip": 1e-6, **options})
        start = values(model)
        (moved,) = displacements(model, optimizer, mlp, 1)
        pull = 0.5 * options.get("weight_decay", 0.0)
        results.append({name: moved[name] + pull * start[name] for name in covered_names(model)})
    assert_all_close(results[1], results[0], rtol=1e-6, atol=1e-12)


def test_generous_bound_is_no_bound(method: Method, mlp: Task) -> None:
    results = [method.trained(mlp, 5, kl_clip=kl_clip) for kl_clip in (None, 1e9)]
    assert_identical(results[1], results[0])


def test_tensor_lr_enters_the_factor(method: Method, mlp: Task) -> None:
    results = []
    for lr in (0.5, torch.tensor(0.5, dtype=torch.float64)):
        model, optimizer = method.start(mlp, **{**method.bare(lr=lr), "kl_clip": 1e-6})
        results.extend(displacements(model, optimizer, mlp, 1))
    assert_all_close(results[1], results[0], rtol=1e-6, atol=1e-13)


def test_bound_is_read_at_each_step(method: Method, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    optimizer = method.build(model, **{**method.bare(lr=0.5), "kl_clip": 1e-6})
    free = method.build(twin, **method.bare(lr=0.5))

    def lift() -> None:
        for group in optimizer.param_groups:
            group["kl_clip"] = None

    _, expected = displacements(twin, free, mlp, 2)
    first, second = displacements(model, optimizer, mlp, 2, lift)
    for name in covered_names(model):
        torch.testing.assert_close(second[name], expected[name], rtol=1e-9, atol=1e-13)
        assert first[name].norm() < 0.5 * expected[name].norm()
