"""`foreach=True` does what the loop over parameters does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contract.test_maximize import RULES
from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_all_close, train, values


def run(method: Method, task: Task, dtype: torch.dtype, **keywords: Any) -> dict[str, torch.Tensor]:
    model = task.model(dtype)
    train(model, method.build(model, **keywords), task, 6)
    return values(model)


@pytest.mark.once
@pytest.mark.rules(RULES)
def test_every_rule(method: Method, mlp: Task, rule: str) -> None:
    loop = run(method, mlp, torch.float64, foreach=False, **RULES[rule])
    for foreach in (True, None):
        batched = run(method, mlp, torch.float64, foreach=foreach, **RULES[rule])
        assert_all_close(batched, loop, rtol=1e-12, atol=1e-14)


def test_every_variant_and_task(method: Method, variant: Variant, task: Task) -> None:
    loop = run(method, task, torch.float64, foreach=False, **variant.keywords)
    batched = run(method, task, torch.float64, foreach=True, **variant.keywords)
    assert_all_close(batched, loop, rtol=1e-12, atol=1e-14)


def test_parameters_of_several_dtypes(method: Method, mlp: Task) -> None:
    results = []
    for foreach in (False, True):
        model = mlp.model()
        model.second.float()
        optimizer = method.build(model, foreach=foreach)
        for step in range(4):
            optimizer.zero_grad()
            inputs, targets = mlp.batch(step)
            hidden = model.scale(torch.tanh(model.first(inputs)))
            torch.nn.functional.cross_entropy(model.second(hidden.float()), targets).backward()
            optimizer.step()
        results.append(values(model))
    for name, value in results[0].items():
        assert value.dtype == results[1][name].dtype
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-7)
