"""`.grad` belongs to the user and to DDP's buckets: never rebound, never written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.test_maximize import RULES
from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_identical, backward


def gradients(model: nn.Module) -> list[tuple[int, int, int]]:
    return [(id(p.grad), p.grad.data_ptr(), p.grad._version) for p in model.parameters()]


def check(method: Method, task: Task, **keywords: Any) -> None:
    model, optimizer = method.start(task, **keywords)
    for step in range(5):
        backward(model, optimizer, task, step)
        before, contents = gradients(model), [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert_identical([p.grad for p in model.parameters()], contents)
        assert gradients(model) == before


def test_for_every_variant_and_task(method: Method, variant: Variant, task: Task) -> None:
    check(method, task, **variant.keywords)


@pytest.mark.cover(foreach=[False, True])
@pytest.mark.once
@pytest.mark.rules(RULES)
def test_gradients_are_untouched_under_every_rule(method: Method, mlp: Task, rule: str, foreach: bool) -> None:
    check(method, mlp, **{**RULES[rule], "foreach": foreach})


@pytest.mark.option("skip_layers")
@pytest.mark.cover(maximize=[False, True])
def test_when_switched_off(method: Method, mlp: Task, maximize: bool) -> None:
    check(method, mlp, **method.every(0), weight_decay=0.1, nesterov=True, maximize=maximize)


def test_when_the_step_is_dropped(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    backward(model, optimizer, mlp, 0)
    model.first.weight.grad[0, 0] = torch.nan
    before, contents = gradients(model), [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert gradients(model) == before
    assert_identical([p.grad for p in model.parameters()], contents)


def test_gradients_that_are_views_of_one_buffer_stay_views(method: Method, mlp: Task) -> None:
    """`gradient_as_bucket_view=True` of DDP."""
    model, optimizer = method.start(mlp)
    bucket = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    offset = 0
    for parameter in model.parameters():
        parameter.grad = bucket[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        mlp.loss(model, step).backward()
        optimizer.step()
    base = bucket.untyped_storage().data_ptr()
    assert all(p.grad.untyped_storage().data_ptr() == base for p in model.parameters())
