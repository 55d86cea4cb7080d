"""Coupled decay is added to the preconditioned gradient; decoupled decay shrinks the parameters beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contract.methods import Method, Variant
from tests.contract.tasks import Task, displacements, values

LR, DECAY = 0.5, 0.1


def moves(method: Method, task: Task, steps: int, **keywords: Any) -> list[dict[str, torch.Tensor]]:
    model = task.model()
    return list(displacements(model, method.build(model, **method.bare(lr=LR, **keywords)), task, steps))


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("decoupled", [False, True])
def test_without_momentum_the_two_agree(method: Method, variant: Variant, task: Task, decoupled: bool) -> None:
    """`θ - lr (V + wd θ)` either way; V is that of the gradient without decay."""
    start = values(task.model())
    plain = moves(method, task, 3, **variant.keywords)
    options = {"weight_decay": DECAY, "decoupled_weight_decay": decoupled}
    for without, moved in zip(plain, moves(method, task, 3, **variant.keywords, **options), strict=True):
        assert_close(moved, {name: without[name] - LR * DECAY * start[name] for name in start})


def test_coupled_decay_enters_the_momentum(method: Method, mlp: Task) -> None:
    start = values(mlp.model())
    one, two = moves(method, mlp, 2)
    _, moved = moves(method, mlp, 2, momentum=0.5, weight_decay=DECAY)
    pull = {name: LR * DECAY * value for name, value in start.items()}
    assert_close(moved, {name: two[name] - pull[name] + 0.5 * (one[name] - pull[name]) for name in start})


def test_decoupled_decay_stays_out_of_the_momentum(method: Method, mlp: Task) -> None:
    start = values(mlp.model())
    one, two = moves(method, mlp, 2)
    _, moved = moves(method, mlp, 2, momentum=0.5, weight_decay=DECAY, decoupled_weight_decay=True)
    assert_close(moved, {name: two[name] + 0.5 * one[name] - LR * DECAY * start[name] for name in start})


@pytest.mark.parametrize("decoupled", [False, True])
def test_nesterov_looks_ahead(method: Method, mlp: Task, decoupled: bool) -> None:
    start = values(mlp.model())
    one, two = moves(method, mlp, 2)
    options = {"weight_decay": DECAY, "decoupled_weight_decay": decoupled}
    _, moved = moves(method, mlp, 2, momentum=0.5, nesterov=True, **options)
    inside = {name: (0.0 if decoupled else LR * DECAY) * value for name, value in start.items()}
    outside = {name: (LR * DECAY if decoupled else 0.0) * value for name, value in start.items()}
    expected = {}
    for name in start:
        first, second = one[name] - inside[name], two[name] - inside[name]
        expected[name] = second + 0.5 * (second + 0.5 * first) - outside[name]
    assert_close(moved, expected)


@pytest.mark.parametrize("decoupled", [False, True])
def test_maximize_still_decays(method: Method, mlp: Task, decoupled: bool) -> None:
    start = values(mlp.model())
    (plain,) = moves(method, mlp, 1)
    options = {"weight_decay": DECAY, "decoupled_weight_decay": decoupled}
    (moved,) = moves(method, mlp, 1, maximize=True, **options)
    assert_close(moved, {name: -plain[name] - LR * DECAY * start[name] for name in start})


def test_decay_is_read_at_each_step(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, **method.bare(lr=LR))
    start = values(model)

    def decay() -> None:
        optimizer.param_groups[0]["weight_decay"] = DECAY

    _, moved = displacements(model, optimizer, mlp, 2, decay)
    without = moves(method, mlp, 2)[1]
    assert_close(moved, {name: without[name] - LR * DECAY * start[name] for name in start})
