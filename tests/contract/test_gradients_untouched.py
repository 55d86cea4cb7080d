"""`.grad` belongs to the user and to DDP's buckets: a step neither replaces nor writes it."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.contract import RULES
from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_identical, backward


def gradients(model: nn.Module) -> list[tuple[int, int, int]]:
    return [(id(p.grad), p.grad.data_ptr(), p.grad._version) for p in model.parameters()]


def check(method: Method, task: Task, bad: int | None = None, **keywords: Any) -> None:
    """Take five steps, one of which may have a gradient that is not finite."""
    model, optimizer = method.start(task, **keywords)
    for step in range(5):
        backward(model, optimizer, task, step)
        if step == bad:
            model.first.weight.grad[0, 0] = torch.nan
        before, contents = gradients(model), [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert_identical([p.grad for p in model.parameters()], contents)
        assert gradients(model) == before


def test_for_every_variant_and_task(method: Method, variant: Variant, task: Task) -> None:
    check(method, task, **variant.keywords)


@pytest.mark.once
@pytest.mark.rules(RULES)
def test_gradients_are_untouched_under_every_rule(method: Method, mlp: Task, rule: str) -> None:
    for foreach in (False, True):
        check(method, mlp, **{**RULES[rule], "foreach": foreach})


def test_when_a_step_is_dropped_or_the_method_is_switched_off(method: Method, mlp: Task) -> None:
    check(method, mlp, bad=0)
    check(method, mlp, clip_norm=1e-6, clip_value=1e-6)
    for maximize in (False, True) if method.layerwise else ():
        check(method, mlp, **method.every(0), weight_decay=0.1, nesterov=True, maximize=maximize)


def test_gradients_that_are_views_of_one_buffer_stay_views(method: Method, mlp: Task) -> None:
    """As with `gradient_as_bucket_view=True` of DDP."""
    model, optimizer = method.start(mlp)
    parameters = list(model.parameters())
    bucket = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for parameter, part in zip(parameters, bucket.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        mlp.loss(model, step).backward()
        optimizer.step()
    base = bucket.untyped_storage().data_ptr()
    assert all(p.grad.untyped_storage().data_ptr() == base for p in parameters)
