"""A 0-dim tensor as `lr` does what the float does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contract.test_maximize import RULES
from tests.support.methods import Method
from tests.support.tasks import Task, assert_all_close, assert_identical, snapshot, train, values

LR = 0.125  # exact in every dtype


@pytest.mark.cover(
    lr={"no dimension": torch.tensor(LR), "one dimension": torch.tensor([LR])}, foreach=[False, True, None]
)
@pytest.mark.once
@pytest.mark.rules(RULES)
def test_tensor_equals_float(method: Method, mlp: Task, rule: str, lr: torch.Tensor, foreach: bool | None) -> None:
    results = [
        method.trained(mlp, 5, **{**RULES[rule], "lr": given, "foreach": foreach}) for given in (LR, lr.double())
    ]
    assert_all_close(results[1], results[0], rtol=1e-12, atol=1e-14)


@pytest.mark.option("skip_layers")
def test_tensor_equals_float_where_the_method_is_switched_off(method: Method, mlp: Task) -> None:
    results = [method.trained(mlp, 4, **method.every(0), lr=lr) for lr in (LR, torch.tensor([LR], dtype=torch.float64))]
    assert_all_close(results[1], results[0], rtol=1e-11, atol=1e-13)


def test_scheduler_moves_the_tensor_in_place(method: Method, mlp: Task) -> None:
    results = []
    for lr in (LR, torch.tensor(LR, dtype=torch.float64)):
        model, optimizer = method.start(mlp, lr=lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(4):
            train(model, optimizer, mlp, 1, start=step)
            scheduler.step()
        results.append(values(model))
        assert float(optimizer.param_groups[0]["lr"]) == LR / 16
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert_all_close(results[1], results[0], rtol=1e-12, atol=1e-14)


def test_the_step_does_not_change_the_tensor(method: Method, mlp: Task) -> None:
    lr = torch.tensor(LR)
    model, optimizer = method.start(mlp, 3, lr=lr)
    assert optimizer.param_groups[0]["lr"] is lr
    assert_identical(lr, torch.tensor(LR))


def test_groups_do_not_share_a_tensor_by_accident(method: Method, mlp: Task) -> None:
    """A tensor in one group, the float default in another."""
    model = mlp.model()
    groups: list[dict[str, Any]] = [
        {"params": list(model.first.parameters()), "lr": torch.tensor(LR)},
        {"params": list(model.second.parameters())},
    ]
    optimizer = method.build(model, groups)
    optimizer.param_groups[0]["lr"].fill_(0.0)
    before = values(model)
    train(model, optimizer, mlp, 2)
    moved = {name for name, value in values(model).items() if not torch.equal(value, before[name])}
    assert moved == {"second.weight", "second.bias"}


def test_tensor_lr_survives_a_checkpoint(method: Method, mlp: Task) -> None:
    model, other = mlp.model(), mlp.model()
    optimizer = method.build(model, lr=torch.tensor(LR))
    train(model, optimizer, mlp, 2)
    second = method.build(other, lr=torch.tensor(1.0))
    saved = snapshot(optimizer)
    second.load_state_dict(saved)
    assert_identical(second.param_groups[0]["lr"], torch.tensor(LR))
    saved["param_groups"][0]["lr"].fill_(7.0)  # the optimizer has one of its own
    assert_identical(second.param_groups[0]["lr"], torch.tensor(LR))


def test_lr_of_several_elements_is_refused(method: Method, mlp: Task) -> None:
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        method.build(mlp.model(), lr=torch.tensor([0.1, 0.2]))
